"""A run whose file pins model, data and first state: whoever comes first, the coordinator believes the file."""

from typing import Any

import pytest
from tests.swarm.coordinator.world import CPU, MODEL, SIGNER, entry, heartbeat, peer_name, run_file

from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.errors import CorpusError, ModelMismatch
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.pins import PinsSection, layout_digest
from shoal.swarm.protocol.types import FrozenParameters, TensorSpec

RIGHT, FORGED = b"r" * 32, b"f" * 32
PINS = PinsSection(
    layout=layout_digest(MODEL.layout),
    elements=50_000,
    tokens_per_sample=MODEL.tokens_per_sample,
    samples=MODEL.samples,
    corpus=(MODEL.corpus_digest or b"").hex(),
    state=RIGHT.hex(),
)
RUN = run_file().model_copy(update={"pins": PINS})


@pytest.fixture
def machine() -> PlainRun:
    return PlainRun(RUN, SIGNER.sign, 0.0, 1)


def join(machine: PlainRun, number: int, model: PeerToCoordinatorDescribeModel = MODEL) -> None:
    machine.scope.admission.join(entry(number, number), CPU, 0.0)
    machine.scope.describe_model(peer_name(number), model)


def beat(machine: PlainRun, number: int, digest: bytes | None) -> None:
    state: dict[str, Any] = {"anchor_version": None if digest is None else 0, "state_digest": digest}
    machine.scope.heartbeat(peer_name(number), heartbeat(**state), 1.0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"layout": (TensorSpec(name="w", shape=(100, 501)),)}, ModelMismatch),
        ({"tokens_per_sample": 1}, ModelMismatch),
        ({"corpus_digest": b"d" * 32}, CorpusError),
        ({"samples": 1}, CorpusError),
    ],
)
def test_the_first_member_cannot_define_anything(
    machine: PlainRun, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        join(machine, 0, MODEL.model_copy(update=changes))
    assert machine.scope.model is None
    join(machine, 1)
    assert machine.scope.model == MODEL
    with pytest.raises(error):
        join(machine, 2, MODEL.model_copy(update=changes))


def test_data_that_is_told_later_is_checked_then(machine: PlainRun) -> None:
    silent = MODEL.model_copy(update={"corpus_digest": None, "samples": None})
    join(machine, 0, silent)
    with pytest.raises(CorpusError):
        machine.scope.describe_model(peer_name(0), MODEL.model_copy(update={"corpus_digest": b"d" * 32}))
    assert machine.scope.model == silent
    machine.scope.describe_model(peer_name(0), MODEL)
    assert machine.scope.model == MODEL


def test_the_first_state_is_the_pinned_one_whatever_members_say(machine: PlainRun) -> None:
    for number in range(3):
        join(machine, number)
        beat(machine, number, FORGED)
    assert all(machine.scope.view(peer_name(number), 1.0).must_resync for number in range(3))
    assert machine.scope.view(peer_name(0), 1.0).state_digest == RIGHT
    assert (machine.scope.round.phase, dict(machine.scope.synced())) == ("waiting", {})
    assert "no member has the first state that the run file pins" in machine.scope.status(1.0).outlook
    join(machine, 3)
    beat(machine, 3, RIGHT)
    assert (machine.scope.round.phase, list(machine.scope.synced())) == ("training", [peer_name(3)])
    assert machine.scope.status(1.0).outlook == ""
    machine.scope.admission.leave(peer_name(3), "", 2.0)
    beat(machine, 0, FORGED)
    assert machine.scope.agreed_digest == RIGHT, "also when nobody has it any more"


def test_a_restart_changes_nothing(machine: PlainRun) -> None:
    join(machine, 0)
    again = PlainRun(RUN, SIGNER.sign, 0.0, 2)
    again.log.replay(again.scope, machine.log.take(), 0.0)
    assert again.scope.agreed_digest == RIGHT
    beat(again, 0, FORGED)
    assert again.scope.agreed_digest == RIGHT


def test_without_pins_whoever_comes_first_defines_the_run() -> None:
    machine = PlainRun(run_file(), SIGNER.sign, 0.0, 1)
    join(machine, 0, MODEL.model_copy(update={"corpus_digest": b"d" * 32}))
    beat(machine, 0, FORGED)
    assert machine.scope.agreed_digest == FORGED


def test_members_with_another_base_are_refused_without_pins_too() -> None:
    machine = PlainRun(run_file(), SIGNER.sign, 0.0, 1)
    base = FrozenParameters(elements=10, digest=b"a" * 32)
    join(machine, 0, MODEL.model_copy(update={"frozen": base}))
    join(machine, 1, MODEL.model_copy(update={"frozen": base}))
    for other in (None, FrozenParameters(elements=10, digest=b"b" * 32)):
        with pytest.raises(ModelMismatch, match=r"frozen parameters differ: .* load the same base model"):
            machine.scope.describe_model(peer_name(1), MODEL.model_copy(update={"frozen": other}))
