"""A peer that holds stages of a model: computing, activations, claims, measured layers."""
