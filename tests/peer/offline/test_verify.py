"""``shoal verify``: undamaged checkpoints pass, errors name what is wrong, and each state's voucher is named."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.peer.checkpoints.making import (
    IDENTITY,
    RUN,
    RUN_TOML,
    contents,
    open_store,
    pack_history,
    signed,
    state_of,
    verdict_chain,
)
from tests.swarm.coordinator.world import SIGNER
from typer.testing import CliRunner

from shoal.peer.checkpoints.checkpoint import CheckpointContents
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.cli.main import app
from shoal.peer.history.history_file import HISTORY_FILE, HistoryOrigin
from shoal.peer.offline.verify import Refused, Verified, find_checkpoints, verify_checkpoints
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, Verdict
from shoal.swarm.protocol.verdict_chain import genesis

ORIGIN = HistoryOrigin(run_toml=RUN_TOML, coordinator=SIGNER.certify(CurveKeys.fresh()))


def planned_chain(
    rounds: int, planned_on: dict[int, bytes] | None = None, lowered: Sequence[int] = ()
) -> tuple[Verdict, ...]:
    """As ``verdict_chain``, with plans that name the states of ``state_of``, or ``planned_on``.

    In the rounds ``lowered`` the run goes back to version 1."""
    verdicts: list[Verdict] = []
    version = 0
    for number, blank in enumerate(verdict_chain(rounds)):
        plan = RoundPlan(
            round=number,
            anchor_version=version,
            state_digest=(planned_on or {}).get(number, state_of(version).digest),
            chunk_elements=1,
            members=(PlanMember(peer="a" * 16, weight_tokens=10),),
            parts=(Part(owner=0, start=0, stop=7),),
        )
        version = 1 if number in lowered else version + 1
        changes: dict[str, Any] = {"anchor_version": version, "plan": None if number in lowered else plan}
        changes["previous_chain"] = verdicts[-1].chain if verdicts else genesis(RUN.hash)
        verdicts.append(signed(blank.model_copy(update=changes)))
    return tuple(verdicts)


def write(folder: Path, verdicts: Sequence[Verdict], number: int, first: int = 0, **changes: Any) -> Path:
    """Write the checkpoint of round ``number``, with the verdicts from ``first`` on."""
    last = verdicts[number]
    state = state_of(last.anchor_version)
    fields = {"chain": last.chain.hex(), "tokens": last.tokens_total, "anchor_version": last.anchor_version}
    made = contents(number, **{**fields, "state_digest": state.digest.hex(), **changes})
    store = open_store(folder, Retention(9))
    return store.write(CheckpointContents(made.about, state, None, tuple(verdicts[first : number + 1]))).folder


def history(folder: Path, verdicts: Sequence[Verdict], owner: HistoryOrigin = ORIGIN) -> Path:
    """Write the peer's history, beside its checkpoints."""
    path = folder / HISTORY_FILE
    path.write_bytes(pack_history(owner, verdicts))
    return path


def told(folder: Path) -> list[tuple[int, int, int | None]]:
    """Round, start of the chain, and voucher of each undamaged checkpoint."""
    found = verify(folder)
    assert all(isinstance(one, Verified) for one in found), found
    return [(one.manifest.round, one.first_round, one.vouched_by) for one in found if isinstance(one, Verified)]


def verify(folder: Path) -> list[Verified | Refused]:
    return verify_checkpoints(find_checkpoints(folder))


def reason(folder: Path) -> str:
    (one,) = verify(folder)
    assert isinstance(one, Refused), one
    return one.reason


def test_later_plans_vouch_for_states(tmp_path: Path) -> None:
    verdicts = planned_chain(6)
    for number, first in ((1, 0), (3, 2), (5, 1)):
        write(tmp_path, verdicts, number, first)
    found = verify(tmp_path)
    assert [(one.manifest.round, one.first_round, one.vouched_by) for one in found if isinstance(one, Verified)] == [
        (1, 0, 2),
        (3, 2, 4),
        (5, 1, None),
    ]
    (alone,) = verify(tmp_path / "checkpoints" / "round-00000003")
    assert isinstance(alone, Verified)
    assert alone.vouched_by is None, "nothing here knows of it"


def test_the_history_beside_a_checkpoint_has_its_whole_chain_and_vouches(tmp_path: Path) -> None:
    verdicts = planned_chain(7)
    for number in (3, 5):
        write(tmp_path, verdicts, number, number - 1)
    assert told(tmp_path) == [(3, 2, None), (5, 4, None)]
    history(tmp_path, verdicts)
    assert told(tmp_path) == [(3, 0, 4), (5, 0, 6)]
    assert told(tmp_path / "checkpoints" / "round-00000003") == [(3, 0, 4)]
    copy = tmp_path / "copy" / "round-00000003"
    shutil.copytree(tmp_path / "checkpoints" / "round-00000003", copy)
    assert told(copy) == [(3, 2, None)], "a copy has no history"


def test_a_history_is_not_flushed_and_may_be_behind(tmp_path: Path) -> None:
    verdicts = planned_chain(6)
    write(tmp_path, verdicts, 5, 3)
    for known, first in ((5, 0), (3, 0), (2, 3), (0, 3)):
        path = history(tmp_path, verdicts[:known])
        path.write_bytes(path.read_bytes() + b"\x8e\xa5round")  # being written
        assert told(tmp_path) == [(5, first, None)]


def test_a_history_vouches_for_what_other_peers_saved(tmp_path: Path) -> None:
    verdicts = planned_chain(4, {2: bytes(32)})
    write(tmp_path / "one", verdicts, 1)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", verdicts, 0)
    history(tmp_path / "other", verdicts)
    one, other = verify(tmp_path)
    assert isinstance(one, Refused)
    assert f"state_digest: expected {bytes(32).hex()}, as the plan of round 2 says" in one.reason
    assert isinstance(other, Verified)


@pytest.mark.parametrize("known", [2, 3, 6])
def test_a_checkpoint_of_another_history_than_its_peers_is_refused(tmp_path: Path, known: int) -> None:
    write(tmp_path, planned_chain(4), 3, 2)
    path = history(tmp_path, planned_chain(6, {1: bytes(32)})[:known])
    assert f"verdicts.msgpack: round 1: expected the verdict that {path} has, not that of another" in reason(tmp_path)
    aside = tmp_path / "checkpoints" / "round-00000003"
    aside.rename(aside.with_name("other-round-00000003-00"))
    assert told(tmp_path) == [(3, 2, None)], "it was set aside for that"


def test_a_history_that_is_wrong_is_named(tmp_path: Path) -> None:
    verdicts = planned_chain(4)
    write(tmp_path, verdicts, 3, 2)
    forged = signed(verdicts[1], Identity.generate())
    whole = pack_history(ORIGIN, verdicts)
    elsewhere = pack_history(HistoryOrigin(run_toml=RUN_TOML.replace("100", "101"), coordinator=ORIGIN.coordinator), ())
    for data, message in (
        (pack_history(ORIGIN, [verdicts[0], forged, *verdicts[2:]]), "verdict of round 1 is not signed by the coord"),
        (pack_history(ORIGIN, [verdicts[0], *verdicts[2:]]), "the verdict of round 1 is missing"),
        (whole + b"\xc1", "damaged at offset"),
        (b"something else", "its head is not that of a run's history"),
    ):
        (tmp_path / HISTORY_FILE).write_bytes(data)
        checkpoint, wrong = verify(tmp_path)
        assert isinstance(checkpoint, Verified)
        assert checkpoint.first_round == 2
        assert isinstance(wrong, Refused)
        assert wrong.is_history
        assert f"{tmp_path / HISTORY_FILE}: " in wrong.reason
        assert message in wrong.reason
    (tmp_path / HISTORY_FILE).write_bytes(elsewhere)
    assert "its head: expected the run and the coordinator of the checkpoint" in reason(tmp_path)


def test_a_state_that_the_run_did_not_have_is_refused(tmp_path: Path) -> None:
    verdicts = planned_chain(4, {2: bytes(32)})
    write(tmp_path, verdicts, 1)
    write(tmp_path, verdicts, 3)
    one, other = verify(tmp_path)
    assert isinstance(one, Refused)
    assert f"state_digest: expected {bytes(32).hex()}, as the plan of round 2 says" in one.reason
    assert isinstance(other, Verified)


def test_what_came_after_a_rollback_says_nothing_of_the_history_before(tmp_path: Path) -> None:
    verdicts = planned_chain(6, {4: bytes(32)}, lowered=[2])  # versions 1 2 1 2 3 4
    write(tmp_path, verdicts, 1)
    write(tmp_path, verdicts, 5)
    one, other = verify(tmp_path)
    assert isinstance(one, Verified)
    assert one.vouched_by is None
    assert isinstance(other, Verified)


def test_a_chain_with_a_gap_or_another_signer_is_refused(tmp_path: Path) -> None:
    verdicts = planned_chain(4)
    write(tmp_path / "gap", [verdicts[0], verdicts[2], verdicts[2]], 2)
    assert "verdicts.msgpack: the verdict of round 1 is missing: round 2 follows instead" in reason(tmp_path / "gap")
    forged = signed(verdicts[1], Identity.generate())
    write(tmp_path / "forged", [verdicts[0], forged], 1)
    assert "the verdict of round 1 is not signed by the coordinator" in reason(tmp_path / "forged")
    elsewhere = verdict_chain(2, bytes(32))
    write(tmp_path / "elsewhere", elsewhere, 1)
    assert "verdicts.msgpack: the verdict of round 0 does not go on from the one before" in reason(
        tmp_path / "elsewhere"
    )
    write(tmp_path / "none", verdicts, 1, 2)
    assert "expected verdicts, not none" in reason(tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 7}, "tokens: expected 20, as its last verdict says, not 7"),
        ({"chain": "0" * 64}, "chain: expected"),
        ({"run_toml": "["}, "run_toml: expected a run file"),
        (
            {"run_hash": RUN.hash.hex(), "run_toml": "[run]\nname='x'\n[recipe]\nname='own'\n[round]\ntokens=1\n"},
            "run_hash: exp",
        ),
    ],
)
def test_a_manifest_has_to_agree_with_its_run_and_its_verdicts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path, planned_chain(2), 1, **changes)
    assert message in reason(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    verdicts = planned_chain(4)
    for number in (1, 3):
        write(tmp_path / "run" / "peer", verdicts, number)
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run")], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "plan of 2" in done.output
    assert "its peer" in done.output
    assert IDENTITY.peer_id in done.output
    assert "whole" in done.output
    assert "From N" not in done.output
    history(tmp_path / "run" / "peer", verdicts[1:])
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run")], env={"COLUMNS": "160"})
    assert isinstance(done.exception, StateFileError)
    assert "0 of 2 checkpoints are not what they have to be, and 1 of the histories" in str(done.exception)
    (tmp_path / "run" / "peer" / HISTORY_FILE).unlink()
    anchor = tmp_path / "run" / "peer" / "checkpoints" / "round-00000001" / "anchor-00001-of-00001.safetensors"
    anchor.write_bytes(anchor.read_bytes()[:-1])
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run")], env={"COLUMNS": "160"})
    assert isinstance(done.exception, StateFileError)
    assert done.exception.exit_code == 17
    assert "1 of 2 checkpoints" in str(done.exception)
    assert "anchor-00001-of-00001.safetensors: size: expected" in done.output
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "none")])
    assert isinstance(done.exception, StateFileError)


def test_copies_are_found_from_any_folder_above(tmp_path: Path) -> None:
    place = write(tmp_path / "peer", planned_chain(2), 1)
    copy = tmp_path / "copies" / "reef-12345678" / "peer" / place.name
    shutil.copytree(place, copy)
    for folder in (copy, *copy.parents[:3]):
        assert find_checkpoints(folder) == [copy]


def test_a_checkpoint_that_was_set_aside_can_be_verified(tmp_path: Path) -> None:
    place = write(tmp_path, planned_chain(2), 1)
    aside = place.rename(place.with_name(f"other-{place.name}-00"))
    (one,) = verify(tmp_path)
    assert isinstance(one, Verified)
    copy = tmp_path / "copy"
    shutil.copytree(aside, copy)
    assert find_checkpoints(copy) == [copy]
    assert json.loads((copy / "manifest.json").read_text())["round"] == 1
    assert CheckpointStore(tmp_path / "checkpoints", RUN.hash, IDENTITY, Retention()).kept() == ()
