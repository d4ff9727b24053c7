"""States of a stage that a peer's folder gives: the checkpoint's, and those after the rounds beside it."""

from pathlib import Path

import pytest
from tests.fakes.stateful import play_rounds, stateful_swarm
from tests.fakes.swarm import run_toml
from tests.fakes.virtual_clock import run_virtual
from tests.peer.checkpoints.stages import keep, stage_chains
from tests.peer.offline.test_replay import ELEMENTS, ROUNDS, SAMPLES, contribution, record, save

from shoal.peer.checkpoints.checkpoint import read_verdicts
from shoal.peer.checkpoints.manifest import StageAbout, read_manifest
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.offline.whole_model import KeptStage
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.rounds import Verdict


@pytest.fixture
def played(tmp_path: Path) -> tuple[KeptStage, list[bytes]]:
    """The checkpoint of round 0, the rounds after it, and the digests of all states.

    A stage averages like a run of its own, so this is a run's."""
    digests: list[bytes] = []

    async def main() -> None:
        async with stateful_swarm(tmp_path, 2, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (_, members):
            members[0].keeper.needed_since = lambda: -1
            await play_rounds(members, ROUNDS, SAMPLES, contribution)
            save(members[0], members[0].states[1], (await members[0].verdicts_from(0))[0])
            digests.extend(state.digest for state in members[0].states)

    run_virtual(main())
    (place,) = tmp_path.glob("*/checkpoints/*")
    source = FolderSource(place)
    manifest = read_manifest(source)
    known = {verdict.round: verdict for verdict in read_verdicts(source, manifest)}
    return KeptStage(place, source, manifest, StageAbout(number=0, stages=1), known), digests


def test_the_rounds_beside_a_checkpoint_lead_on_from_it(played: tuple[KeptStage, list[bytes]]) -> None:
    kept, digests = played
    states = list(kept.states())
    assert [one.verdict.anchor_version for one in states] == list(range(1, ROUNDS + 1))
    assert [len(one.way) for one in states] == list(range(ROUNDS))
    assert [one.load().digest for one in states] == digests[1:]
    assert [one.verdicts[-1].round for one in states] == list(range(ROUNDS))


def test_as_far_as_they_are_there_and_whole(played: tuple[KeptStage, list[bytes]]) -> None:
    kept, digests = played
    peer = kept.place.parent.parent
    record(peer, ROUNDS - 1).unlink()
    damaged = record(peer, 2)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    states = list(kept.states())
    assert [one.verdict.round for one in states] == list(range(ROUNDS - 1))
    assert states[1].load().digest == digests[2]
    with pytest.raises(StateFileError, match="the records there lead to version 2 only"):
        states[2].load()


@pytest.mark.parametrize(
    ("aborted", "of_round", "known", "rounds"),
    [
        ([2, 3], 1, range(6), [1, 2, 3]),
        ([2, 3], 3, range(6), [3, 2, 1]),
        ([2, 3], 2, range(6), [2, 1, 3]),
        ([2, 3], 2, [2], [2]),
        ([], 2, range(6), [2]),
        ([3], 2, [0, 1, 2, 4, 5], [2]),
    ],
)
def test_a_state_stands_while_rounds_are_aborted(
    tmp_path: Path, aborted: list[int], of_round: int, known: list[int], rounds: list[int]
) -> None:
    chain = stage_chains(6, aborted=aborted)[0]
    assert states(keep(tmp_path, 0, chain, of_round), {number: chain[number] for number in known}) == rounds


def test_but_not_beyond_a_round_that_went_back(tmp_path: Path) -> None:
    chain = stage_chains(4, aborted=[2])[0]
    lower = chain[2].model_copy(update={"anchor_version": 1})
    known = {0: chain[0], 1: chain[1], 2: lower, 3: chain[3]}
    assert states(keep(tmp_path, 0, chain, 1), known) == [1]


def states(place: Path, known: dict[int, Verdict]) -> list[int]:
    """The rounds at whose end the stage had the checkpoint's state."""
    source = FolderSource(place)
    manifest = read_manifest(source)
    assert manifest.stage is not None
    return [one.verdict.round for one in KeptStage(place, source, manifest, manifest.stage, known).states()]
