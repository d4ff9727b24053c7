"""A run that starts from a checkpoint: whatever members say, its first state is what the run file says."""

from typing import Any

import pytest
from tests.swarm.coordinator.world import CPU, MODEL, SIGNER, entry, heartbeat, peer_name, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.barrier import Barrier
from shoal.swarm.coordinator.event_log import EventLog
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.errors import ModelMismatch
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.run_file import PipelineSection, RunFile
from shoal.swarm.protocol.start_section import StartSection, StartTensor
from shoal.swarm.protocol.types import TensorSpec

OTHER = TensorSpec(name="other", shape=(4,))
RIGHT, FORGED = "right", "forged"


def started(**tensors: tuple[int, ...]) -> RunFile:
    start = StartSection(
        run="reef-01234567",
        round=8,
        state="a" * 64,
        tensors={name: StartTensor(shape=shape, sha256="1" * 64) for name, shape in tensors.items()},
    )
    return run_file().model_copy(update={"start": start})


RUN = started(w=(100, 500))


class Desk:
    """A scope, and what members say to it."""

    def __init__(self, scope: RoundScope) -> None:
        self.scope = scope
        assert scope.run.start is not None
        self.digests = {RIGHT: scope.run.start.state_digest(MODEL.layout), FORGED: b"f" * 32}

    def join(self, number: int, model: PeerToCoordinatorDescribeModel = MODEL) -> None:
        self.scope.admission.join(entry(number, number), CPU, 0.0)
        self.scope.describe_model(peer_name(number), model)

    def beat(self, number: int, holds: str | None) -> None:
        state: dict[str, Any] = {"anchor_version": None, "state_digest": None}
        if holds is not None:
            state = {"anchor_version": 0, "state_digest": self.digests[holds]}
        self.scope.heartbeat(peer_name(number), heartbeat(**state), 1.0)

    def must_resync(self, number: int) -> bool:
        return self.scope.view(peer_name(number), 1.0).must_resync


@pytest.fixture
def desk() -> Desk:
    return Desk(RoundScope(RUN, SIGNER.sign, EventLog(0.0, 1)))


def test_its_digest_is_known_before_anybody_holds_it(desk: Desk) -> None:
    desk.join(0)
    desk.beat(0, None)
    assert desk.scope.view(peer_name(0), 1.0).state_digest == desk.digests[RIGHT]


def test_whoever_is_first_with_another_state_is_not_believed(desk: Desk) -> None:
    for number in range(3):
        desk.join(number)
        desk.beat(number, FORGED)
    assert all(desk.must_resync(number) for number in range(3))
    assert desk.scope.round.phase == "waiting"
    assert desk.scope.synced() == {}
    desk.join(3)
    desk.beat(3, RIGHT)
    assert not desk.must_resync(3)
    assert (desk.scope.round.phase, list(desk.scope.synced())) == ("training", [peer_name(3)])
    desk.scope.admission.leave(peer_name(3), "", 2.0)
    desk.beat(0, FORGED)
    assert desk.scope.agreed_digest == desk.digests[RIGHT], "also when nobody has it any more"


def test_it_says_what_it_waits_for(desk: Desk) -> None:
    assert desk.scope.status(1.0).outlook == ""
    desk.join(0)
    desk.beat(0, None)
    assert "starts from round 8 of reef-01234567" in desk.scope.status(1.0).outlook
    assert "shoal join INVITE --from FOLDER" in desk.scope.status(1.0).outlook
    Barrier([desk.scope], all_or_none=False).tick(100.0)
    desk.beat(0, RIGHT)
    assert desk.scope.status(1.0).outlook == ""


def test_a_journal_brings_it_back(desk: Desk) -> None:
    desk.join(0)
    events = desk.scope.log.take()
    assert not any(isinstance(event, ev.StateAgreed) for event in events)
    again = RoundScope(RUN, SIGNER.sign, EventLog(0.0, 2))
    again.log.replay(again, events, 0.0)
    assert again.agreed_digest == desk.digests[RIGHT]
    snapshot = again.snapshot()
    assert snapshot is not None
    third = RoundScope(RUN, SIGNER.sign, EventLog(0.0, 3))
    third.log.replay(third, [snapshot], 0.0)
    assert third.agreed_digest == desk.digests[RIGHT]


def test_a_model_that_the_checkpoint_is_not_of_is_refused() -> None:
    desk = Desk(RoundScope(started(w=(100, 500), other=(4,)), SIGNER.sign, EventLog(0.0, 1)))
    with pytest.raises(ModelMismatch, match=r"round 8 of reef-01234567.*: it lacks other \[4\]"):
        desk.join(0)
    assert desk.scope.model is None
    desk.join(0, MODEL.model_copy(update={"layout": (*MODEL.layout, OTHER)}))


def test_a_stage_may_lack_what_others_have() -> None:
    run = started(w=(100, 500), other=(4,))
    run = run.model_copy(update={"pipeline": PipelineSection(micro_batch=2), "algorithm": "virtual_batch"})
    desk = Desk(RoundScope(run, SIGNER.sign, EventLog(0.0, 1), stage=1))
    desk.join(0)
    assert desk.scope.agreed_digest == desk.digests[RIGHT]
    assert "round 8 of reef-01234567" in desk.scope.say_outlook()
    with pytest.raises(ModelMismatch, match=r"it has new \[4\], which the checkpoint lacks"):
        Desk(RoundScope(run, SIGNER.sign, EventLog(0.0, 1), stage=1)).join(
            0, MODEL.model_copy(update={"layout": (OTHER.model_copy(update={"name": "new"}),)})
        )
