"""The pipeline: a model cut into stages, which stage runs where, and how micro-batches go through them."""
