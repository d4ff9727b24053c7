"""History files: which verdicts are accepted, and what is kept of a damaged file."""

from pathlib import Path
from typing import Any

import pytest
from tests.peer.checkpoints.making import RUN, RUN_TOML, pack_history, verdict_chain

from shoal.peer.history.chain import check_chain
from shoal.peer.history.history_file import HistoryFile, HistoryOrigin, pack_origin, unpack_history
from shoal.swarm.errors import StateFileError, StorageError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.rounds import Verdict

HOST = Identity.generate()
KEY = HOST.public_key
ORIGIN = HistoryOrigin(run_toml=RUN_TOML, coordinator=HOST.certify(CurveKeys.fresh()))
CHAIN = verdict_chain(6, signer=HOST)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "history.msgpack"


def kept(path: Path, verdicts: tuple[Verdict, ...] = CHAIN, origin: HistoryOrigin = ORIGIN) -> HistoryFile:
    file = HistoryFile(path, origin)
    file.append(verdicts)
    return file


# The chain --------------------------------------------------------------------------------------------------


def test_a_whole_chain() -> None:
    chain = check_chain(CHAIN, RUN.hash, KEY)
    assert (chain.first, chain.rounds, chain.committed, chain.aborted) == (0, 6, 6, 0)
    assert (chain.anchor_version, chain.tokens_total, chain.chain) == (6, 60, CHAIN[-1].chain)
    assert check_chain((), RUN.hash, KEY).rounds == 0


def without(number: int) -> tuple[Verdict, ...]:
    return CHAIN[:number] + CHAIN[number + 1 :]


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        (without(0), "round 0 is missing: round 1"),
        (without(3), "round 3 is missing: round 4"),
        (CHAIN[:3] + CHAIN[2:], "round 3 is missing: round 2"),
        (CHAIN[:2] + verdict_chain(4, signer=HOST, run_hash=bytes(32))[2:], "round 2 does not go on"),
        (verdict_chain(1, signer=HOST, run_hash=bytes(32)), "round 0 does not go on"),
        (verdict_chain(3), "round 0 is not signed"),
        ((*CHAIN[:4], CHAIN[4].model_copy(update={"tokens": 11})), "round 4 does not match its own hash"),
        ((*CHAIN[:4], CHAIN[4].model_copy(update={"signature": bytes(64)})), "round 4 is not signed"),
    ],
)
def test_a_broken_chain_names_the_round(verdicts: tuple[Verdict, ...], words: str) -> None:
    with pytest.raises(StateFileError, match=words):
        check_chain(verdicts, RUN.hash, KEY)


def test_the_end_of_a_chain_can_be_checked_by_itself() -> None:
    chain = check_chain(CHAIN[4:], RUN.hash, KEY, whole=False)
    assert (chain.first, chain.rounds, chain.committed) == (4, 6, 2)
    with pytest.raises(StateFileError, match="round 3 is missing"):
        check_chain((CHAIN[2], CHAIN[4]), RUN.hash, KEY, whole=False)
    with pytest.raises(StateFileError, match="round 0 does not go on"):
        check_chain(verdict_chain(1, signer=HOST, run_hash=bytes(32)), RUN.hash, KEY, whole=False)


# The file ---------------------------------------------------------------------------------------------------


def test_it_goes_on_where_it_was(path: Path) -> None:
    kept(path, CHAIN[:2])
    file = HistoryFile(path, ORIGIN)
    assert file.chain == check_chain(CHAIN[:2], RUN.hash, KEY)
    file.append(CHAIN[2:])
    assert file.verdicts() == CHAIN
    assert file.verdicts(2, 4) == CHAIN[2:4]
    assert file.verdicts(9) == file.verdicts(3, 3) == file.verdicts(3, 2) == ()
    assert HistoryFile(path, ORIGIN).verdicts(5, 99) == CHAIN[5:]
    assert path.read_bytes() == pack_history(ORIGIN, CHAIN)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_what_does_not_go_on_is_not_kept(path: Path) -> None:
    file = kept(path, CHAIN[:2])
    with pytest.raises(StateFileError, match="round 3 is missing"):
        file.append((CHAIN[2], CHAIN[4]))
    assert file.verdicts() == CHAIN[:3]
    assert HistoryFile(path, ORIGIN).verdicts() == CHAIN[:3]


def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kept(path, CHAIN[:2])
    opened = Path.open

    def full(self: Path, mode: str = "r", *arguments: Any) -> Any:
        if "+" in mode:
            with opened(self, "ab") as torn:
                torn.write(b"\x8e\xa5round")
            raise OSError(28, "No space left on device")
        return opened(self, mode, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(StorageError, match=r"history\.msgpack.*No space left.*free some space"):
            file.append(CHAIN[2:4])
        assert file.verdicts() == CHAIN[:2]
    file.append(CHAIN[2:])
    assert path.read_bytes() == pack_history(ORIGIN, CHAIN)


def test_cut_off_anywhere_it_opens_at_the_last_whole_verdict(path: Path) -> None:
    whole = pack_history(ORIGIN, CHAIN[:3])
    ends = [len(pack_history(ORIGIN, CHAIN[:number])) for number in range(4)]
    path.parent.mkdir()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        file = HistoryFile(path, ORIGIN)
        expected = max((number for number, end in enumerate(ends) if end <= size), default=0)
        assert file.chain.rounds == expected
        file.append(CHAIN[expected:3])
        assert path.read_bytes() == whole


def test_no_flipped_byte_is_accepted(path: Path) -> None:
    whole = pack_history(ORIGIN, CHAIN[:3])
    head_bytes = len(pack_origin(ORIGIN))
    path.parent.mkdir()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        file = HistoryFile(path, ORIGIN)
        rounds = file.chain.rounds
        assert file.verdicts() == CHAIN[:rounds]
        assert at < head_bytes or rounds < 3
        file.append(CHAIN[rounds:3])
        assert HistoryFile(path, ORIGIN).verdicts() == CHAIN[:3], "what is missing can be fetched again"
        for other in path.parent.glob("*.old"):
            other.unlink()


def test_what_is_damaged_in_the_middle_is_put_aside(path: Path) -> None:
    kept(path)
    damaged = bytearray(path.read_bytes())
    damaged[len(pack_history(ORIGIN, CHAIN[:2])) + 50] ^= 1
    path.write_bytes(damaged)
    assert HistoryFile(path, ORIGIN).verdicts() == CHAIN[:2]
    (aside,) = path.parent.glob("*.old")
    assert aside.read_bytes() == damaged


@pytest.mark.parametrize(
    "origin",
    [
        HistoryOrigin(run_toml=RUN_TOML.replace("100", "200"), coordinator=ORIGIN.coordinator),
        HistoryOrigin(run_toml=RUN_TOML, coordinator=Identity.generate().certify(CurveKeys.fresh())),
    ],
    ids=["run", "coordinator"],
)
def test_the_history_of_another_is_put_aside(path: Path, origin: HistoryOrigin) -> None:
    kept(path)
    file = HistoryFile(path, origin)
    assert file.chain.rounds == 0
    (aside,) = path.parent.glob("*.old")
    assert unpack_history(aside.read_bytes(), "").verdicts == CHAIN


def test_the_head_says_whose_it_is(path: Path) -> None:
    found = unpack_history(pack_history(ORIGIN, CHAIN), "here")
    assert (found.origin, found.verdicts, found.damage) == (ORIGIN, CHAIN, None)
    assert (found.origin.run, found.origin.run_hash) == ("reef", RUN.hash)
    forged = ORIGIN.coordinator.model_copy(update={"identity_key": Identity.generate().public_key})
    for data in (
        b"",
        b"\xc1",
        pack_history(HistoryOrigin(run_toml=RUN_TOML, coordinator=forged), ()),
        b"\x93\x01\x02\x03",
    ):
        with pytest.raises(StateFileError, match="here: its head is not that of a run's history"):
            unpack_history(data, "here")
    with pytest.raises(StateFileError, match="here: field run_toml"):
        unpack_history(pack_history(HistoryOrigin(run_toml="x = 1", coordinator=ORIGIN.coordinator), ()), "here")
