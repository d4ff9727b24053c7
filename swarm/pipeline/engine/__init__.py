"""Pure state machine of a stage: micro-batches, claims, gradients on their way, routes."""
