"""What reading and writing checkpoints holds in memory: nothing of a file's size but what stays."""

from pathlib import Path

import pytest
import torch
from tests.peer.checkpoints.making import IDENTITY, RUN, contents
from tests.peer.checkpoints.peak_memory import peak_bytes
from torch import nn

from shoal.peer.checkpoints.checkpoint import check_checkpoint, read_checkpoint
from shoal.peer.checkpoints.encryption import open_source
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import CheckpointSource, FolderSource
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.checkpoints.tensor_reader import CheckpointTensors
from shoal.swarm.protocol.types import TensorSpec

LAYOUT = tuple(TensorSpec(name=name, shape=(3_000_000,)) for name in ("0", "1", "2", "3"))
ELEMENTS = sum(spec.elements for spec in LAYOUT)
PASSING = 40 * 2**20
"""Bytes of pieces, segments, buffers of files and the allocator, less than a vector of the model."""


def make_model() -> nn.Module:
    return nn.ParameterList([torch.zeros(spec.shape) for spec in LAYOUT])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step."""
    model = make_model()
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture(scope="module", params=[None, ()], ids=["plain", "sealed"])
def source(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> CheckpointSource:
    """A checkpoint of 12M parameters: 96 MB of state, 96 MB of the inner optimizer's, 48 MB of residual."""
    folder = tmp_path_factory.mktemp("large")
    _, optimizer = stepped()
    own = {"optimizer": optimizer.state_dict(), "residual": torch.ones(ELEMENTS)}
    store = CheckpointStore(folder, RUN.hash, IDENTITY, Retention(), sealed_for=request.param)
    return open_source(FolderSource(store.write(contents(0, own, LAYOUT)).folder), IDENTITY)


@pytest.mark.parametrize("sealed_for", [None, ()], ids=["plain", "sealed"])
def test_a_checkpoint_is_written_from_the_memory_that_is_in_use(tmp_path: Path, sealed_for: tuple[()] | None) -> None:
    _, optimizer = stepped()
    own = {"optimizer": optimizer.state_dict(), "residual": torch.ones(ELEMENTS)}
    what = contents(0, own, LAYOUT)
    store = CheckpointStore(tmp_path, RUN.hash, IDENTITY, Retention(), sealed_for=sealed_for)
    _, peak = peak_bytes(lambda: store.write(what))
    assert peak < PASSING


def test_a_state_is_read_into_its_own_memory_and_no_other(source: CheckpointSource) -> None:
    found, peak = peak_bytes(lambda: read_checkpoint(source, RUN.hash))
    assert found.state.values.nbytes == 8 * ELEMENTS
    assert peak < found.state.values.nbytes + PASSING


def test_checks_hold_nothing(source: CheckpointSource) -> None:
    found, peak = peak_bytes(lambda: check_checkpoint(source, RUN.hash))
    assert peak < PASSING
    for tensors in (found.tensors, CheckpointTensors(source, found.manifest)):
        values, peak = peak_bytes(lambda tensors=tensors: sum(piece.numel() for piece in tensors.pieces(2)))
        assert values == 2 * ELEMENTS
        assert peak < PASSING


def test_a_peers_own_state_is_read_where_it_belongs(source: CheckpointSource) -> None:
    own = read_checkpoint(source, RUN.hash).own
    assert own is not None
    model = make_model()
    optimizer, residual = adamw(model), torch.zeros(ELEMENTS).fill_(2.0)
    _, peak = peak_bytes(lambda: own.restore(optimizer, model))
    assert peak < 8 * ELEMENTS + PASSING, "new tensors"
    _, peak = peak_bytes(lambda: own.restore(optimizer, model))
    assert peak < PASSING, "into those that are there"
    _, peak = peak_bytes(lambda: own.restore_residual(residual))
    assert peak < PASSING
    assert bool((residual == 1.0).all())
