"""``shoal log --audit``: the expulsions that the host has recorded, and whether the evidence proves them."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.fakes.audits import HOST
from tests.fakes.hearings import GUILTY, INNOCENT, LIAR, RUN, TOML, evidence_of, negate, serving, show
from tests.swarm.coordinator.test_evidence_service import has_committed
from tests.swarm.coordinator.world import entry

from shoal.peer.cli.audits import show_audits
from shoal.peer.cli.host import ORIGIN_FILE
from shoal.peer.history.history_file import HistoryOrigin, pack_origin
from shoal.swarm.averaging.chunk_judge import Judgement
from shoal.swarm.coordinator.local_journal import LocalJournal, evidence_path
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import StateFileError, UserError, WrongEvidence
from shoal.swarm.protocol.evidence import evidence_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A host's folder in which one member is expelled."""

    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        assert await show(service, 1, GUILTY) == "guilty"

    serving(tmp_path, test)
    origin = HistoryOrigin(run_toml=TOML, coordinator=HOST.certify(HOST.coordinator_keys()))
    assert origin.run_hash == RUN.hash
    (tmp_path / ORIGIN_FILE).write_bytes(pack_origin(origin))
    return tmp_path


def said(folder: Path, *, check: bool) -> str:
    out = Console(file=io.StringIO(), width=80)
    try:
        show_audits(str(folder), folder / "no keys", out, check=check, as_json=False)
    finally:
        assert isinstance(out.file, io.StringIO)
        text = out.file.getvalue()
    return text


def test_an_expulsion_is_listed_with_its_evidence(folder: Path) -> None:
    text = said(folder, check=False)
    assert LIAR in text
    assert entry(1).peer in text
    assert evidence_id(GUILTY).hex()[:12] in text
    assert "1 expulsions; all hashes, links and signatures are right" in text
    assert "guilty" in said(folder, check=True)


def test_a_mean_beyond_the_bound_is_told_apart(tmp_path: Path) -> None:
    far = evidence_of(1, 3, negate)

    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        has_committed(service, 2)
        assert await show(service, 1, far) == "guilty"

    serving(tmp_path, test)
    origin = HistoryOrigin(run_toml=TOML, coordinator=HOST.certify(HOST.coordinator_keys()))
    (tmp_path / ORIGIN_FILE).write_bytes(pack_origin(origin))
    text = said(tmp_path, check=True)
    assert text.count("guilty") == 2
    assert "round 3: a mean was off by " in text
    assert "1 expulsions, and 1 means beyond the bound" in text


def test_json_has_the_judgement(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_audits(str(folder), folder / "no keys", Console(), check=True, as_json=True)
    (one,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["peer"], one["judgement"], one["round"]) == (LIAR, "guilty", 3)
    assert one["evidence"] == evidence_id(GUILTY).hex()


@pytest.mark.parametrize(
    ("data", "says"),
    [(None, "missing"), (GUILTY[:-1] + b"x", "damaged"), (INNOCENT, "damaged"), (b"", "damaged")],
    ids=["missing", "changed", "another", "empty"],
)
def test_evidence_that_is_not_there_is_an_error_of_its_own(folder: Path, data: bytes | None, says: str) -> None:
    path = evidence_path(folder, evidence_id(GUILTY).hex())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    said(folder, check=False)
    with pytest.raises(WrongEvidence, match="1 of 1 records are not proven") as error:
        said(folder, check=True)
    assert error.value.exit_code == 57
    out = Console(file=io.StringIO(), width=80)
    with pytest.raises(WrongEvidence):
        show_audits(str(folder), folder / "no keys", out, check=True, as_json=False)
    assert says in out.file.getvalue()  # type: ignore[attr-defined]


def test_who_was_expelled_by_evidence_of_its_innocence_is_shown_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that lies about what evidence proves is found out by whoever judges it again."""
    judged = "shoal.swarm.coordinator.service._judged"
    monkeypatch.setattr(judged, lambda *_: Judgement("guilty", "so it says", LIAR, 3))

    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        assert await show(service, 1, INNOCENT) == "guilty"

    serving(tmp_path, test)
    origin = HistoryOrigin(run_toml=TOML, coordinator=HOST.certify(HOST.coordinator_keys()))
    (tmp_path / ORIGIN_FILE).write_bytes(pack_origin(origin))
    out = Console(file=io.StringIO(), width=200)
    with pytest.raises(WrongEvidence):
        show_audits(str(tmp_path), tmp_path / "no keys", out, check=True, as_json=False)
    assert "innocent: chunk 2 is the mean of what it includes" in out.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        (Judgement("guilty", "", entry(2).peer, 3), f"void: it is about {LIAR} in round 3"),
        (Judgement("guilty", "", LIAR, 2), f"void: it is about {LIAR} in round 3"),
        (Judgement("guilty", "", LIAR, 3, excess=8.0), "void: the mean is wrong within the bound"),
    ],
    ids=["another member", "another round", "a larger lie"],
)
def test_evidence_proves_what_the_record_says_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims: Judgement, says: str
) -> None:
    """The host has true evidence, and says that it shows something else."""
    monkeypatch.setattr("shoal.swarm.coordinator.service._judged", lambda *_: claims)

    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        has_committed(service, 2)
        assert await show(service, 1, GUILTY) == "guilty"

    serving(tmp_path, test)
    origin = HistoryOrigin(run_toml=TOML, coordinator=HOST.certify(HOST.coordinator_keys()))
    (tmp_path / ORIGIN_FILE).write_bytes(pack_origin(origin))
    out = Console(file=io.StringIO(), width=200)
    with pytest.raises(WrongEvidence, match="1 of"):
        show_audits(str(tmp_path), tmp_path / "no keys", out, check=True, as_json=False)
    assert says in out.file.getvalue()  # type: ignore[attr-defined]


def test_only_a_folder_has_evidence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="host's folder"):
        show_audits("shoal://somewhere", tmp_path, Console(), check=True, as_json=False)
    with pytest.raises(StateFileError):
        show_audits(str(tmp_path), tmp_path, Console(), check=False, as_json=False)
