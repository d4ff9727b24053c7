"""The devices that a test runs on: those on a GPU skip by themselves where there is none."""

import pytest
import torch

CPU = torch.device("cpu")
CUDA = pytest.param(
    torch.device("cuda"),
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
devices = pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
