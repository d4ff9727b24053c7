"""``shoal log``: every source tells the same history, and a broken chain is never shown as a whole one."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.fakes.journals import leased
from tests.fakes.secure_rounds import Scene
from tests.peer.checkpoints.making import IDENTITY, RUN, RUN_TOML, SIGNER, contents, open_store, pack_history
from tests.peer.terminal.test_reporter import PEERS, PLAN
from tests.swarm.coordinator.world import World, run_file
from typer.testing import CliRunner

from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.cli import host as hosting
from shoal.peer.cli.host import ORIGIN_FILE
from shoal.peer.cli.log import open_log, round_details, show_log
from shoal.peer.cli.main import app
from shoal.peer.history.history_file import HistoryOrigin, pack_origin
from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.errors import SealedForOthers, StateFileError, UserError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.rounds import PlanMember, Verdict
from shoal.swarm.protocol.secure import SecureStage, SignedSets
from shoal.swarm.protocol.types import RUN_MEMBERS
from shoal.swarm.protocol.verdict_chain import chain_hash, genesis, signed_bytes

ORIGIN = HistoryOrigin(run_toml=RUN_TOML, coordinator=SIGNER.certify(CurveKeys.fresh()))


def history(*changes: dict[str, object]) -> tuple[Verdict, ...]:
    """A verdict for each of the changes to a committed round of two members."""
    verdicts: list[Verdict] = []
    for number, change in enumerate(changes):
        fields = {
            "round": number,
            "committed": True,
            "reason": "",
            "anchor_version": number + 1,
            "plan": PLAN,
            "digests": (b"d" * 32, b"e" * 32),
            "tokens": 201,
            "tokens_total": 201 * (number + 1),
            "loss": 2.3456,
            "ended_s": 1.7e9 + 60 * number,
            "sent_bytes": 123_456,
            "previous_chain": verdicts[-1].chain if verdicts else genesis(RUN.hash),
            "chain": bytes(32),
            "signature": b"",
        }
        unsigned = Verdict.model_validate(fields | change)
        chain = chain_hash(unsigned)
        verdicts.append(unsigned.model_copy(update={"chain": chain, "signature": SIGNER.sign(signed_bytes(chain))}))
    return tuple(verdicts)


ABORTED = {"committed": False, "digests": (), "tokens": 0, "loss": None, "reason": "2 of 2 parts did not arrive"}
CHAIN = history({}, {"digests": (None, b"e" * 32)}, ABORTED, {"plan": None, **ABORTED, "reason": "nobody came"}, {})


def written(tmp_path: Path, verdicts: tuple[Verdict, ...] = CHAIN) -> Path:
    path = tmp_path / "runs" / "reef-12345678" / "peer" / "history.msgpack"
    path.parent.mkdir(parents=True)
    path.write_bytes(pack_history(ORIGIN, verdicts))
    return path


def shown(source: Path, width: int = 160, *, fails: bool = False, as_json: bool = False, **options: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    if fails:
        with pytest.raises(StateFileError) as refused:
            show_log(open_log(str(source)), console, json_lines=as_json, **options)  # type: ignore[arg-type]
        assert refused.value.exit_code == 17
    else:
        show_log(open_log(str(source)), console, json_lines=as_json, **options)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_round_names_its_amended_settings(tmp_path: Path) -> None:
    path = written(tmp_path, history({}, {"amended": (("card.title", '"A \\u001b reef"'), ("outer.lr", "0.5"))}))
    assert "amended" not in shown(path, round_number=0)
    told = shown(path, round_number=1)
    assert "outer.lr = 0.5" in told
    assert "card.title" in told
    lines = [json.loads(line) for line in shown(path, as_json=True).splitlines()]
    assert [one["amended"] for one in lines] == [[], [["card.title", '"A \\u001b reef"'], ["outer.lr", "0.5"]]]


def test_one_round_shows_whose_masked_work_it_is_of(tmp_path: Path) -> None:
    scene = Scene(n=8, group=4)
    scene.until(SecureStage.OPEN)
    signed = scene.board.signed()
    assert signed is not None
    about = {"plan": scene.plan, "round": scene.plan.round, "run_hash": b"r" * 32}

    def told(signed_sets: SignedSets | None) -> str:
        console = Console(file=io.StringIO(), width=160, color_system=None)
        console.print(round_details(history({**about, "signed_sets": signed_sets})[0]))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    assert "the work of 8 of 8 members, in 2 groups  ✓ 8 signed" in told(signed)
    assert "1 of 2 groups have not signed" in told(
        signed.model_copy(update={"consents": tuple(one for one in signed.consents if one.member in first(scene))})
    )
    assert "nothing was opened" in told(None)
    assert "masked" not in shown(written(tmp_path), round_number=0)


def first(scene: Scene) -> tuple[int, ...]:
    return scene.members[0].groups[0].members


# Sources ----------------------------------------------------------------------------------------------------


def test_a_members_folder(tmp_path: Path) -> None:
    path = written(tmp_path)
    for source in (path, path.parent, path.parent.parent):
        log = open_log(str(source))
        assert (log.run, log.run_hash, log.verdicts) == ("reef", RUN.hash, CHAIN)
    behind = tmp_path / "runs" / "reef-12345678" / "other" / "history.msgpack"
    behind.parent.mkdir()
    behind.write_bytes(pack_history(ORIGIN, CHAIN[:2]))
    assert open_log(str(path.parent.parent)).verdicts == CHAIN, "of several members, who knows most"


def test_a_hosts_folder_while_it_is_written_to(tmp_path: Path) -> None:
    journal = leased(tmp_path, RUN.hash, RUN_TOML)
    (tmp_path / ORIGIN_FILE).write_bytes(pack_origin(ORIGIN))
    for one in CHAIN:
        journal.append(journal.next_index, [VerdictGiven(verdict=one, elapsed_s=1.0, lost=())])
    assert open_log(str(tmp_path)).verdicts == CHAIN
    journal.close()
    assert open_log(str(tmp_path)).verdicts == CHAIN
    (tmp_path / ORIGIN_FILE).unlink()
    with pytest.raises(StateFileError, match=ORIGIN_FILE):
        open_log(str(tmp_path))


def test_a_hosted_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "SHOAL_HOME", tmp_path)
    folder = tmp_path / "host" / "reef"
    journal = leased(folder, RUN.hash, RUN_TOML)
    (folder / ORIGIN_FILE).write_bytes(pack_origin(ORIGIN))
    journal.append(journal.next_index, [VerdictGiven(verdict=CHAIN[0], elapsed_s=1.0, lost=())])
    journal.close()
    assert open_log("reef").verdicts == CHAIN[:1]


def test_the_history_of_another_run_is_a_broken_one(tmp_path: Path) -> None:
    run = run_file("virtual_batch")
    world = World(run, 2)
    while len(world.verdicts) < 3:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    toml = '[run]\nname = "x"\n[recipe]\nname = "own"\n[round]\ntokens = 1\n'
    journal = leased(tmp_path, run.hash, toml)
    for event in world.events:
        journal.append(journal.next_index, [event])
    journal.close()
    (tmp_path / ORIGIN_FILE).write_bytes(pack_origin(ORIGIN))
    assert "round 0 does not go on" in shown(tmp_path, fails=True)


def test_a_checkpoint(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept = store.write(contents(3))
    log = open_log(str(kept.folder))
    assert (log.run, log.run_hash, log.coordinator_key) == ("reef", RUN.hash, SIGNER.public_key)
    assert log.verdicts
    assert "✓" in shown(kept.folder)


def test_a_sealed_checkpoint(tmp_path: Path) -> None:
    reader = Identity.load_or_create(tmp_path / "reader")
    store = CheckpointStore(tmp_path / "checkpoints", RUN.hash, IDENTITY, Retention(), [reader.public_key])
    folder = store.write(contents(3)).folder
    assert open_log(str(folder), reader) == open_log(str(folder), IDENTITY)
    assert len(open_log(str(folder), reader).verdicts) == 4
    for stranger in (None, Identity.generate()):
        with pytest.raises(SealedForOthers, match="--identity"):
            open_log(str(folder), stranger)
    done = CliRunner().invoke(app, ["log", str(folder), "--json", "--identity", str(tmp_path / "reader")])
    assert [json.loads(line)["round"] for line in done.output.splitlines()] == [0, 1, 2, 3]
    done = CliRunner().invoke(app, ["log", str(folder), "--identity", str(tmp_path / "none")])
    assert isinstance(done.exception, SealedForOthers)
    assert not (tmp_path / "none").exists(), "reading makes no identity"


@pytest.mark.parametrize("name", ["", "nothing", "file"])
def test_where_there_is_no_history(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(StateFileError):
        open_log(str(tmp_path / name))


# What it looks like -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 119, 120, 160])
def test_it_fits_the_terminal_with_nothing_cut_off(tmp_path: Path, width: int) -> None:
    members = tuple(
        PlanMember(peer=f"{'abcdefghijklmnopqrstuvwxyz234567'[n]}" * 16, weight_tokens=9**n) for n in range(9)
    )
    big = PLAN.model_copy(update={"members": members})
    numbers = {
        "plan": big,
        "tokens": 999_999_999,
        "tokens_total": 10**12,
        "sent_bytes": 999 * 10**9,
        "anchor_version": 99_999,
    }
    text = shown(written(tmp_path, history(*[{}] * 9, numbers, ABORTED)), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for cell in ("round", "when (UTC)", "chain", "committed", "99999", "999.0 GB", "2.346", "aborted"):
        assert cell in text, cell
    assert text.count("✓") == 11
    rows = [line for line in lines if "committed" in line]
    assert len(rows) == 10, "one line each"


def test_a_row_says_it_all(tmp_path: Path) -> None:
    rows = shown(written(tmp_path)).splitlines()
    first, second, third = (next(row for row in rows if row.strip().startswith(f"{n} ")) for n in (0, 1, 2))
    assert "2023-11-14 22:13:20" in first
    assert f"{PEERS[1][:6]} 50%, {PEERS[0][:6]} 50%" in first
    assert CHAIN[0].chain.hex()[:12] in first
    assert second.split("50%")[-1].split()[0] == "1", "one part is void"
    assert "aborted: 2 of 2 parts did not arrive" in " ".join(third.split())


def test_the_last_rounds_only(tmp_path: Path) -> None:
    text = shown(written(tmp_path), last=2)
    assert CHAIN[3].chain.hex()[:12] in text
    assert CHAIN[2].chain.hex()[:12] not in text


def test_it_says_what_was_checked(tmp_path: Path) -> None:
    path = written(tmp_path)
    for width in (80, 160):
        words = "Rounds 0 to 4: all hashes, links and signatures are right."
        assert words in shown(path, width, last=2)
    assert "members: how many" in shown(path, 80)


def test_one_round_in_detail(tmp_path: Path) -> None:
    path = written(tmp_path)
    text = shown(path, round_number=1)
    for words in (*PEERS, "void", (b"e" * 32).hex(), CHAIN[1].chain.hex(), CHAIN[0].chain.hex(), "49.8%", "50.2%"):
        assert words in text
    assert max(map(len, shown(path, 80, round_number=1).splitlines())) <= 80
    assert "nobody came" in shown(path, round_number=3)
    with pytest.raises(UserError, match="round 9 has no verdict here: there are those of rounds 0 to 4"):
        shown(path, round_number=9)


def test_json_has_everything(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = [json.loads(line) for line in shown(path, as_json=True).splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["signature_ok"] for line in lines)
    assert set(lines[0]) == {*Verdict.model_fields, "signature_ok"}
    assert lines[1]["digests"] == [None, (b"e" * 32).hex()]
    assert lines[0]["plan"]["members"][0]["peer"] == PEERS[0]
    assert [json.loads(line)["round"] for line in shown(path, as_json=True, last=1).splitlines()] == [4]


def test_a_clock_that_nobody_has_set(tmp_path: Path) -> None:
    text = shown(written(tmp_path, history({"ended_s": 0.0}, {"ended_s": 1e12})))
    assert "1970-01-01" in text
    assert "?" in text


def test_no_round_yet(tmp_path: Path) -> None:
    assert "no round has ended yet" in shown(written(tmp_path, ()))


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    text = shown(written(tmp_path, history({**ABORTED, "reason": "\x1b[2Jgone [bold]x[/]"})))
    assert "\x1b" not in text
    assert "[bold]x[/]" in " ".join(text.split())


# Broken chains ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(CHAIN)))
def test_a_changed_verdict_ends_the_table_in_red(tmp_path: Path, number: int) -> None:
    changed = CHAIN[number].model_copy(update={"tokens_total": 7})
    path = written(tmp_path, (*CHAIN[:number], changed, *CHAIN[number + 1 :]))
    text = shown(path, fails=True)
    assert f"the chain is broken: the verdict of round {number} does not match its own hash" in text
    assert text.count("✓") == number
    assert "\x1b[1;31mthe chain is broken" in in_color(path)
    lines = [json.loads(line) for line in shown(path, fails=True, as_json=True).splitlines()]
    assert [line["signature_ok"] for line in lines] == [True] * number + [False]
    assert lines[-1]["round"] == number


def in_color(path: Path) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="standard")
    with pytest.raises(StateFileError):
        show_log(open_log(str(path)), console, json_lines=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_damaged_file_is_no_whole_history(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(pack_history(ORIGIN, CHAIN[:2]))] = 0xC1
    path.write_bytes(data)
    assert "damaged at offset" in shown(path, fails=True)


def test_a_file_that_is_being_written_is_a_note(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    text = shown(path)
    assert text.count("✓") == 4
    assert "it is being written, or was cut off" in text


def test_only_the_last_rounds_shown_are_checked_from_the_first(tmp_path: Path) -> None:
    changed = CHAIN[0].model_copy(update={"tokens_total": 7})
    assert "round 0 does not match" in shown(written(tmp_path, (changed, *CHAIN[1:])), fails=True, last=1)


def test_a_large_swarm_fits(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    names = (letters[n // 1024] + letters[n // 32 % 32] + letters[n % 32] for n in range(RUN_MEMBERS))
    peers = sorted(name * 5 + "a" for name in names)
    members = tuple(PlanMember(peer=peer, weight_tokens=1) for peer in peers)
    verdicts = history({"plan": PLAN.model_copy(update={"members": members})})
    assert f"{RUN_MEMBERS}: " in shown(written(tmp_path, verdicts))
    assert f"{RUN_MEMBERS} ≤0%" in shown(tmp_path, 80)
