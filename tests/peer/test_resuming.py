"""Tests of a restarted member: it goes on from its checkpoint with the same bits."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.peer.checkpoints.making import IDENTITY, RUN_TOML, signed
from tests.peer.member.test_replica import FakeNetwork, TensorMean
from torch import Tensor, nn

from shoal.compression.range_reader import whole_vector
from shoal.peer.checkpoints.checkpoint import unpack_verdicts
from shoal.peer.checkpoints.checkpointer import CheckpointPace, CheckpointSubject
from shoal.peer.checkpoints.local_state import LocalStateContent
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CheckpointStore, UnfinishedCheckpoint
from shoal.peer.checkpoints.writer import CheckpointWriter
from shoal.peer.member.replica import TrainingReplica, TrainingSetup
from shoal.peer.network_thread import Interrupted
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.data import DataAbout
from shoal.swarm.averaging.outcome import Aborted, CarriedResidual, Committed, Resync
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.verdict_chain import genesis
from shoal.swarm.secure.reveal_record import RevealRecord

STEPS = 4


class Noisy(nn.Module):
    """Model that draws from every generator and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + float(np.random.standard_normal()) + random.gauss(0.0, 1.0))  # type: ignore[no-any-return]


class Run:
    """What outlives the member: the history, with one member a round, whose contribution is the mean."""

    def __init__(self, algorithm: str, overlap: bool = False) -> None:
        averaging = f"[averaging]\ncodec = 'float32'\noverlap = {str(overlap).lower()}"
        toml = RUN_TOML.replace("[run]", f"algorithm = '{algorithm}'\n{averaging}\n[run]", 1)
        self.file = parse_run_file(toml)
        self.verdicts: list[Verdict] = []

    def end_round(self, committed: bool = True) -> Verdict:
        verdict = Verdict(
            round=len(self.verdicts),
            committed=committed,
            reason="",
            anchor_version=sum(one.committed for one in self.verdicts) + committed,
            plan=None,
            digests=(),
            tokens=10,
            tokens_total=10 * (len(self.verdicts) + 1),
            loss=None,
            ended_s=0.0,
            sent_bytes=0,
            previous_chain=self.verdicts[-1].chain if self.verdicts else genesis(self.file.hash),
            chain=bytes(32),
            signature=b"",
        )
        self.verdicts.append(signed(verdict))
        return self.verdicts[-1]


class Life:
    """One process of the member."""

    def __init__(self, run: Run, folder: Path, seed: int, keeps: bool = True) -> None:
        self.run = run
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(5)  # everybody begins with the same model
        model = Noisy()
        torch.manual_seed(seed)
        self.network = Network()
        self.member = self.network.resource
        version = sum(one.committed for one in run.verdicts)
        self.member.client.view = SimpleNamespace(
            round=len(run.verdicts),
            anchor_version=version,
            state_digest=None,
            plan=None,
            verdict=run.verdicts[-1] if run.verdicts else None,
        )
        self.member.client.peer = IDENTITY.peer_id
        self.member.averager = FakeAverager()
        self.store = CheckpointStore(folder / "checkpoints", run.file.hash, IDENTITY, Retention())
        self.events: list[dict[str, Any]] = []
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        network: Any = self.network
        self.replica = TrainingReplica(
            run.file,
            TrainingSetup(
                model, self.optimizer if run.file.algorithm == "diloco" else None, DataAbout(bytes(32), "", 10)
            ),
            network,
            network.resource,
            folder,
            self.store if keeps else None,
            lambda event, **fields: self.events.append({"event": event, **fields}),
        )
        self.model = model
        self.replica.sync_state()
        self.replica.samples.add_lease(0, 10_000)

    def train(self) -> None:
        for _ in range(STEPS):
            self.replica.samples.next_batch(8)
            x = torch.randn(8, 4)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self.replica.step(self.replica.samples.finish_batch(loss), 1.0)

    def round(self, committed: bool = True) -> None:
        self.train()
        self.network.resource.average = self._average  # type: ignore[method-assign]
        self._committed = committed
        self.replica.close_round()

    async def _average(self, offer: Any, step: Any) -> Any:
        verdict = self.run.end_round(self._committed)
        contribution = whole_vector(offer.contribution)
        self.member.averager.round_feedback.carried = CarriedResidual(contribution * 0.5, offer.weight_tokens)
        if self._committed:
            outcome = Committed(TensorMean(contribution), verdict, included=True)
            self.member.hold_state(await step(outcome))
            return outcome
        return Aborted("for the test", verdict)

    def stop(self) -> None:
        self.replica.save_checkpoint()

    @property
    def digest(self) -> bytes:
        assert self.replica.state is not None
        return self.replica.state.digest

    def bits(self) -> list[bytes]:
        carried = self.member.averager.round_feedback.carried.residual
        return [self.digest, *(one.numpy().tobytes() for one in [carried, *self.model.state_dict().values()])]


class Network(FakeNetwork):
    """Network thread that finishes every coroutine at once."""

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(asyncio.run(coroutine))
        return done


class FakeAverager:
    def __init__(self) -> None:
        self.round_feedback = FakeFeedback()
        self.reveal_record = RevealRecord(None)

    async def until_idle(self) -> None:
        """Return at once: rounds are over when they begin."""


class FakeFeedback:
    def __init__(self) -> None:
        self.carried = CarriedResidual(torch.zeros(49), 0)

    def restore(self, fill: Callable[[Tensor], int | None]) -> bool:
        residual = torch.zeros(49)
        weight_tokens = fill(residual)
        assert weight_tokens is not None
        self.carried = CarriedResidual(residual, weight_tokens)
        return True


@pytest.mark.parametrize("algorithm", ["diloco", "virtual_batch"])
@pytest.mark.parametrize("stopped_after", [1, 3])
def test_who_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, algorithm: str, stopped_after: int) -> None:
    one = Life(Run(algorithm), tmp_path / "one", 0)
    for _ in range(5):
        one.round()

    run = Run(algorithm)
    first = Life(run, tmp_path / "two", 0)
    for _ in range(stopped_after):
        first.round()
    first.stop()
    second = Life(run, tmp_path / "two", 99)
    assert second.events[-1] == {
        "event": "synced",
        "anchor_version": stopped_after,
        "digest": first.digest.hex(),
        "residual": True,
        "checkpoint": stopped_after - 1,
        "caught_up": 0,
    }
    assert second.replica.samples.tokens_trained == stopped_after * STEPS * 80
    for _ in range(5 - stopped_after):
        second.round()
    assert second.bits() == one.bits()


def test_it_does_matter(tmp_path: Path) -> None:
    """Without its own state the same member computes other values."""
    one = Life(Run("diloco"), tmp_path / "one", 0)
    one.round()
    one.round()
    run = Run("diloco")
    two = Life(run, tmp_path / "two", 0)
    two.round()
    two.stop()
    (two.store.kept()[0].folder / "peer.safetensors").unlink()
    again = Life(run, tmp_path / "two", 99)
    assert again.digest == two.digest
    assert again.events[-1]["residual"] is False
    again.round()
    assert again.bits() != one.bits()


def test_a_checkpoint_is_written_after_each_committed_round_and_no_aborted_one(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    clock = Clock()
    life.replica._checkpointer._clock = clock  # type: ignore[union-attr]
    for committed in (True, False, True, False):
        life.round(committed)
    assert [one.round for one in life.store.kept()] == [2, 0]
    life.stop()
    assert [one.round for one in life.store.kept()] == [2, 0], "that state is there already"
    chain = life.store.load(life.store.kept()[0]).verdicts[0]
    assert [one.round for one in unpack_verdicts(chain, "")] == [0, 1, 2]


class Clock:
    """Clock that moves by ``write_s`` whenever something is written."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def slow_disk(monkeypatch: pytest.MonkeyPatch, clock: Clock, write_s: float) -> None:
    real: Callable[..., Any] = UnfinishedCheckpoint.finish

    def finish(self: UnfinishedCheckpoint, *rest: Any) -> Any:
        clock.now_s += write_s
        return real(self, *rest)

    monkeypatch.setattr(UnfinishedCheckpoint, "finish", finish)


def test_writing_takes_at_most_a_twentieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life, clock = Life(Run("diloco"), tmp_path, 0), Clock()
    life.replica._checkpointer._clock = clock  # type: ignore[union-attr]
    slow_disk(monkeypatch, clock, 1.0)
    for _ in range(45):
        life.round()
        clock.now_s += 1.0
    # Each takes 1 s, and then 20 s are for other things.
    assert [one.round for one in life.store.kept()] == [40, 20, 0]
    life.stop()
    assert life.store.kept()[0].round == 44, "at the end always"
    again = Life(life.run, tmp_path, 1)
    assert again.digest == life.digest


class SlowEnd(Network):
    """Network thread that does not come to the last part of a checkpoint until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[Coroutine[Any, Any, Any], Future[Any]]] = []

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        if coroutine.__name__ != "complete":
            return super().submit(coroutine)
        self.pending.append((coroutine, Future()))
        return self.pending[-1][1]

    def finish(self) -> None:
        coroutine, future = self.pending.pop()
        future.set_result(asyncio.run(coroutine))


def test_while_one_is_written_the_next_is_skipped(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    keeper, network = life.replica._checkpointer, SlowEnd()
    assert keeper is not None
    keeper._network = network  # type: ignore[assignment]
    for _ in range(3):
        life.round()
    assert len(network.pending) == 1
    network.finish()
    keeper._pace = CheckpointPace(in_step=False)
    life.round()
    assert [one.round for one in life.store.kept()] == [0]
    network.finish()
    assert [one.round for one in life.store.kept()] == [3, 0]


def folders(tmp_path: Path) -> list[str]:
    return sorted(one.name for one in (tmp_path / "checkpoints").glob("[.r]*"))


def test_own_state_is_written_while_the_round_is_averaged(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    life.train()
    life.network.resource.average = life._average  # type: ignore[method-assign]
    life._committed = True
    assert life.replica.begin_exchange()
    (hidden,) = folders(tmp_path)
    assert hidden.startswith(".new-00000000-")
    there = sorted(one.name for one in (tmp_path / "checkpoints" / hidden).iterdir())
    assert there == ["peer.safetensors"], "the residual and the state are of the verdict"
    assert life.replica.conclude_round()
    assert folders(tmp_path) == ["round-00000000"]


@pytest.mark.parametrize("outcome", [Aborted("for the test"), Resync("for the test"), Interrupted()], ids=str)
def test_what_was_begun_goes_with_a_round_that_made_no_state(tmp_path: Path, outcome: Any) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    life.round()
    life.train()
    keeper = life.replica._checkpointer
    assert keeper is not None
    keeper._pace = CheckpointPace(in_step=False)

    async def average(offer: Any, step: Any) -> Any:
        return outcome

    life.network.resource.average = average  # type: ignore[method-assign]
    assert life.replica.begin_exchange()
    assert len(folders(tmp_path)) == 2
    if isinstance(outcome, Exception):
        life.network.trouble = outcome
        real, life.network.wait_for = life.network.wait_for, lambda *_, **__: raised(outcome)  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            life.replica.conclude_round()
        life.network.wait_for, life.network.trouble = real, None  # type: ignore[method-assign]
    else:
        life.replica.conclude_round()
    assert folders(tmp_path) == ["round-00000000"]
    found = life.store.load_newest()
    assert found is not None
    assert found.manifest.round == 0


def raised(error: Exception) -> Any:
    raise error


def test_the_state_is_written_as_it_was_although_the_next_round_overwrites_it(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    keeper, network = life.replica._checkpointer, SlowEnd()
    assert keeper is not None
    keeper._network = network  # type: ignore[assignment]
    life.round()
    state = life.replica.state
    assert state is not None
    before = state.values.clone()
    state.step(2, [(0, state.elements, torch.ones(state.elements))], lambda _, rows, mean: rows.add_(mean))
    assert not torch.equal(state.current.values, before)  # type: ignore[union-attr]
    network.finish()
    found = life.store.load_newest()
    assert found is not None
    assert torch.equal(found.state.values, before)
    assert (found.state.version, found.state.digest) == (1, state.digest)


def test_the_next_round_begins_when_the_residual_is_written(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    keeper = life.replica._checkpointer
    assert keeper is not None
    life.round()
    assert keeper._residual is not None
    real: Any = life.network.submit
    waited: list[bool] = []

    def submit(coroutine: Coroutine[Any, Any, Any]) -> Any:
        if coroutine.__name__ == "_average":
            waited.append(keeper._residual is None)
        return real(coroutine)

    life.network.submit = submit  # type: ignore[method-assign]
    life.round()
    assert waited == [True]


def test_training_waits_for_its_own_state_and_the_wait_counts(tmp_path: Path) -> None:
    life, clock = Life(Run("diloco"), tmp_path, 0), Clock()
    keeper = life.replica._checkpointer
    assert keeper is not None
    keeper._clock = clock
    real = life.network.wait_for

    def wait_for(future: Any, interruptible: Any = False) -> Any:
        clock.now_s += 1.0
        return real(future)

    life.network.wait_for = wait_for  # type: ignore[method-assign]
    life.round()
    assert keeper._pace._next_s == clock.now_s + 20.0


@pytest.mark.parametrize("overlap", [False, True])
def test_only_with_overlap_a_copy_of_own_state_is_written(tmp_path: Path, overlap: bool) -> None:
    run = Run("diloco", overlap=overlap)
    life = Life(run, tmp_path, 0)
    written: list[int] = []
    real = LocalStateContent.pieces

    def pieces(self: LocalStateContent) -> Any:
        written.append(self.tensors["optimizer/state/0/exp_avg"].data_ptr())
        return real(self)

    life.network.resource.average = life._average  # type: ignore[method-assign]
    life._committed = True
    life.train()
    held = life.optimizer.state[next(life.model.parameters())]["exp_avg"].data_ptr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStateContent, "pieces", pieces)
        assert life.replica.begin_exchange()
    assert [one == held for one in written] == [not overlap]
    if overlap:
        life.train()
    assert life.replica.conclude_round()
    assert folders(tmp_path) == ["round-00000000"]


def test_own_state_is_copied_before_the_next_step_where_nobody_has_copied_it_yet(tmp_path: Path) -> None:
    """With overlap, and the worker thread that is to copy and write it slower than a step."""
    run = Run("diloco", overlap=True)
    life = Life(run, tmp_path, 0)
    life.network.resource.average = life._average  # type: ignore[method-assign]
    life._committed = True
    life.train()
    late: list[Callable[[], Any]] = []
    keeper = life.replica._checkpointer
    assert keeper is not None
    timed = keeper._timed

    async def written_late(unfinished: UnfinishedCheckpoint, work: Callable[[], object]) -> Any:
        late.append(work)
        return await timed(unfinished, lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "_timed", written_late)
        assert life.replica.begin_exchange()
    first = life.optimizer.state[next(life.model.parameters())]
    expected = first["exp_avg"].clone()
    life.train()
    assert not torch.equal(first["exp_avg"], expected)
    for work in late:
        work()
    assert keeper._begun is not None
    content = keeper._begun.unfinished._writer._folder / "peer.safetensors"
    assert torch.equal(load_file(content)["optimizer/state/0/exp_avg"], expected)


def test_a_full_disk_is_one_warning_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life, clock = Life(Run("diloco"), tmp_path, 0), Clock()
    life.replica._checkpointer._clock = clock  # type: ignore[union-attr]

    def full(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_write_file", full)
        for _ in range(3):
            life.round()
    assert caplog.text.count("no space; older ones are as they were. Free some") == 1
    life.round()
    assert "can be written again" in caplog.text
    assert [one.round for one in life.store.kept()] == [3]
    assert life.replica.state is not None
    assert life.replica.state.version == 4, "and training went on"


def test_without_checkpoints_nothing_is_written(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0, keeps=False)
    life.round()
    life.stop()
    assert not (tmp_path / "checkpoints").exists()
    assert Life(life.run, tmp_path, 1, keeps=False).events[-1]["checkpoint"] is None


def test_a_checkpoint_of_another_model_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    life.round()
    life.stop()
    keeper = life.replica._checkpointer
    assert keeper is not None
    keeper._subject = replace(keeper._subject, outer_vectors=2)
    assert keeper.find(1, None, with_own=True) is None
    assert "is of another model" in caplog.text


def test_what_another_peer_had_of_its_own_is_not_taken(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    life.round()
    life.stop()
    found = life.store.load(life.store.kept()[0])
    other = Life(life.run, tmp_path, 1)
    other.member.client.peer = "b" * 16
    assert other.replica._own.take_up(found, found.state) is False


def test_the_residual_is_not_taken_while_a_round_may_hold_it(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    life.round()
    life.stop()
    found = life.store.load(life.store.kept()[0])
    other = Life(life.run, tmp_path, 1)
    assert other.replica._own.take_up(found, found.state) is True
    other.member.client.view.plan = object()
    assert other.replica._own.take_up(found, found.state) is False


def test_the_chain_in_checkpoints_goes_on_over_restarts(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    for _ in range(3):
        life.round()
    life.stop()
    again = Life(life.run, tmp_path, 1)
    again.round(committed=False)
    again.round()
    again.stop()
    newest = again.store.load(again.store.kept()[0])
    assert [one.round for one in unpack_verdicts(newest.verdicts[0], "")] == [0, 1, 2, 3, 4]
    other = Life(again.run, tmp_path / "other", 1)
    other.round()
    other.stop()
    newest = other.store.load(other.store.kept()[0])
    assert [one.round for one in unpack_verdicts(newest.verdicts[0], "")] == [4, 5], "as far back as it knows"


def test_the_residual_belongs_to_its_state_and_the_optimizer_to_the_peer(tmp_path: Path) -> None:
    life = Life(Run("diloco"), tmp_path, 0)
    life.round()
    life.stop()
    found = life.store.load(life.store.kept()[0])
    other = Life(Run("diloco"), tmp_path / "other", 1)
    newer = AnchorState.of(found.state.values.clone(), found.state.version + 1)
    assert other.replica._own.take_up(found, newer) is False
    assert not other.member.averager.round_feedback.carried.residual.any()
    moments = [one["exp_avg"] for one in other.optimizer.state_dict()["state"].values()]
    expected = [one["exp_avg"] for one in life.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(one, two) for one, two in zip(moments, expected, strict=True))
    assert moments


def test_a_recipes_config_that_cannot_stand_in_a_checkpoint_is_refused_at_the_start() -> None:
    run = Run("diloco").file
    for config in ({"layers": {1, 2}}, {"lr": float("nan")}):
        with pytest.raises(RecipeError, match="has to be JSON"):
            CheckpointSubject(run, "", config, (), 1, bytes(32))
