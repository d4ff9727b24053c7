"""A model's gradients as one vector, to compare contributions with."""

import torch
from torch import Tensor

from shoal.peer.training.parameters import ParameterVector


def take_gradients(vector: ParameterVector) -> Tensor:
    """Return the gradients, a new (n,) float32 on the model's device, zeros where there is none, and clear them."""
    parts = []
    for parameter in vector.parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append(gradient.detach().reshape(-1).float().clone())
        parameter.grad = None
    return torch.cat(parts)
