"""Events in words and as JSON, the live panel and the status table, with and without a terminal."""

import io
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from shoal.peer.session import Session
from shoal.peer.terminal import reporter as progress
from shoal.peer.terminal.bars import amount_text, sparkline
from shoal.peer.terminal.events import count_text, duration_text, sentence
from shoal.peer.terminal.reporter import (
    JsonLines,
    Reporter,
    setup_logging,
    status_table,
)
from shoal.peer.terminal.snapshot import Snapshot
from shoal.peer.terminal.views import metric_text, session_panel, status_line
from shoal.swarm.errors import StorageError, Unreachable
from shoal.swarm.protocol.json_values import status_json
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, Verdict
from shoal.swarm.protocol.types import CostStatus, Coverage, DeviceInfo, DeviceUse, MemberStatus, PathReport

PEERS = ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb")
DEVICE = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 4090", memory_bytes=24 * 2**30)
PLAN = RoundPlan(
    round=3,
    anchor_version=3,
    state_digest=bytes(32),
    chunk_elements=10,
    members=tuple(PlanMember(peer=peer, weight_tokens=100 + index) for index, peer in enumerate(PEERS)),
    parts=(Part(owner=0, start=0, stop=10), Part(owner=1, start=10, stop=20)),
)
VERDICT = Verdict(
    round=3,
    committed=True,
    reason="",
    anchor_version=4,
    plan=PLAN,
    digests=(bytes(32), bytes(32)),
    tokens=201,
    tokens_total=1_234_567,
    loss=2.3456,
    ended_s=1.7e9,
    sent_bytes=0,
    previous_chain=bytes(32),
    chain=bytes(range(32)),
    signature=b"",
)

SNAPSHOT = Snapshot(
    run="whale",
    peer=PEERS[0],
    device="cuda:0",
    round=7,
    anchor_version=7,
    phase="closing",
    activity="ready",
    coordinator_is_away=False,
    loss=2.5,
    tokens_per_s=4321.0,
    tokens_done=15_000,
    tokens_in_round=43_000,
    tokens_target=61_440,
    tokens_committed=430_000,
    members=4,
    bytes_sent=12_300_000,
    bytes_received=4_500,
    compression=3.94,
    closes_in_s=2.4,
)


def make_status() -> CoordinatorToPeerStatus:
    members = tuple(
        MemberStatus(
            peer=peer,
            name=name,
            device=DEVICE,
            activity="waiting for verdict" if alive else "gone",
            alive=alive,
            synced=alive,
            reachable=False,
            tokens_per_s=123_456.0,
            tokens_committed=600_000,
            share=0.5,
            credit=1.0 if alive else 0.0,
            loss=2.3,
            bytes_sent=123_456_789,
            bytes_received=987_654_321,
        )
        for peer, name, alive in zip(PEERS, ("a-rather-long-machine-name", "orca"), (True, False), strict=True)
    )
    return CoordinatorToPeerStatus(
        run="whale",
        run_hash=bytes(range(32)),
        round=7,
        phase="averaging",
        closes_in_s=None,
        anchor_version=7,
        rounds_committed=7,
        rounds_aborted=1,
        tokens_committed=1_200_000,
        tokens_in_round=1000,
        loss=2.3,
        chain=bytes(32),
        state_digest=None,
        elapsed_s=3725.0,
        members=members,
    )


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, record=True, color_system=None)


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def output(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


class FakeSession:
    """As much of a session as a reporter looks at."""

    def __init__(self, snapshot: Snapshot = SNAPSHOT) -> None:
        self.value: Snapshot | Exception = snapshot
        self.asked = 0

    def snapshot(self) -> Snapshot:
        self.asked += 1
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def watch(reporter: Reporter, session: FakeSession) -> None:
    reporter.watch(cast(Session, session))


# Words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        {"event": "joined", "run": "whale", "peer": PEERS[0], "reachable": False},
        {"event": "synced", "anchor_version": 3, "digest": "ab" * 32},
        {"event": "state_fetched", "anchor_version": 3, "chunks": 1, "resumed": 1, "donors": {}, "seconds": 1.2},
        {"event": "donor_refused", "donor": PEERS[0], "anchor_version": 3, "reason": "why"},
        {"event": "committed", "round": 1, "loss": None, "tokens": 5, "members": 1, "digest": "ab" * 32},
        {"event": "aborted", "round": 1, "reason": "why"},
        {"event": "resync", "reason": "why"},
        {"event": "left", "bytes_sent": 5, "digest": None, "anchor_version": None, "tokens_trained": 0},
        {"event": "something of a later release", "x": 1},
        {},
    ],
)
def test_every_event_has_words(event: dict[str, Any]) -> None:
    assert len(sentence(event)) > 0


def test_what_was_fetched_is_told_in_words() -> None:
    fetched = {"event": "state_fetched", "anchor_version": 3, "chunks": 9, "resumed": 0, "seconds": 4.2}
    fetched["donors"] = {PEERS[0]: 8, PEERS[1]: 1}
    assert sentence(fetched) == "fetched version 3 of the state · 9 chunks from 2 peers in 4 s"
    assert sentence(fetched | {"resumed": 5}).endswith(" · 5 were kept from an earlier download")
    refused = {"event": "donor_refused", "donor": PEERS[0], "anchor_version": 3, "reason": "a wrong chunk"}
    assert sentence(refused) == f"no more of the state is fetched from {PEERS[0]}: a wrong chunk"


def test_numbers_for_people() -> None:
    assert [count_text(number) for number in (0.4, 999, 61_440, 1_230_000)] == ["0", "999", "61.4k", "1.2M"]
    amounts = (0.4, 999, 4_050_000, 20_000_000, 61_440, 999_700)
    assert [amount_text(number) for number in amounts] == ["0", "999", "4.05M", "20M", "61.4k", "1000k"]
    assert [duration_text(seconds) for seconds in (0.2, 59.4, 185, 7385)] == ["0 s", "59 s", "0:03:05", "2:03:05"]
    assert sparkline([3, 2, 1], 2) == "█▁"
    assert sparkline([1, 1], 5) == "▁▁"
    assert sparkline([], 5) == ""


# Reporter ---------------------------------------------------------------------------------------------------


def test_events_are_lines_of_json_and_of_text(tmp_path: Path) -> None:
    console, path = plain(), tmp_path / "new" / "events.jsonl"
    with Reporter(console, path) as reporter:
        reporter.on_event({"event": "joined", "time": 1.0, "run": "[red]whale", "peer": PEERS[0]})
        reporter.record({"event": "aborted", "time": 2.0, "round": 1, "reason": Path("odd")})
        assert len(path.read_text().splitlines()) == 2  # flushed, not only at the end
    with Reporter(console, path) as reporter:
        reporter.on_event({"event": "resync", "time": 3.0, "reason": "why"})
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["joined", "aborted", "resync"]
    lines = output(console).splitlines()
    assert len(lines) == 2
    assert "joined [red]whale" in lines[0]


def test_events_of_many_threads_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Reporter(plain(), path) as reporter:

        def work(number: int) -> None:
            for index in range(50):
                reporter.on_event({"event": "x", "number": number, "index": index, "long": "y" * 500})

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 200


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="events cannot be logged"), Reporter(plain(), tmp_path):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    lines = JsonLines(Path("/dev/full"))
    for _ in range(3):
        lines.write({"event": "x"})
    lines.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_live_view_of_a_session() -> None:
    console, session = terminal(), FakeSession()
    with Reporter(console, None) as reporter:
        watch(reporter, session)
        reporter.on_event({"event": "committed", "time": 1.0, "round": 6, "loss": 2.6, "members": 4})
        session.value = replace(SNAPSHOT, round=8, loss=2.4, coordinator_is_away=True)
    shown = output(console)
    for words in (
        "whale",
        "round 8",
        "12.3 MB",
        "4.5 kB",
        "43k of 61.4k tokens",
        "closes in 2 s",
        "the coordinator is away",
    ):
        assert words in shown
    assert "round 6 committed" in shown


def test_what_it_goes_on_from_stays_above_the_panel() -> None:
    console = terminal()
    with Reporter(console, None) as reporter:
        watch(reporter, FakeSession())
        reporter.on_event({"event": "synced", "time": 1.0, "anchor_version": 95, "digest": "ab" * 32, "checkpoint": 94})
        for number in range(9):
            reporter.on_event({"event": "committed", "time": 1.0, "round": number, "loss": 2.6, "members": 4})
        panel = Console(file=io.StringIO(), width=100)
        panel.print(reporter.render())
    assert "holds version 95 of the anchor · abababab · with the checkpoint of round 94" in output(console)
    assert "round 8 committed" in output(panel)
    assert "holds version" not in output(panel)


def test_a_failed_session_keeps_its_last_view_and_is_not_asked_again() -> None:
    console, session = terminal(), FakeSession()
    with Reporter(console, None) as reporter:
        watch(reporter, session)
        reporter.render()
        session.value = Unreachable("gone")
        reporter.render()
        asked = session.asked
        reporter.render()
        assert session.asked == asked
    assert "whale" in output(console)


def test_an_error_of_any_kind_does_not_come_out_of_the_end() -> None:
    session = FakeSession()
    reporter = Reporter(terminal(), None)
    watch(reporter, session)
    reporter.render()
    session.value = KeyError("a bug elsewhere")
    with pytest.raises(KeyError):
        reporter.render()
    with reporter:
        pass


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.01)
    console, session = plain(), FakeSession()
    reporter = Reporter(console, None)
    with reporter:
        watch(reporter, session)
        while session.asked < 3:
            pass
    first = output(console).splitlines()[0]
    assert first.endswith(status_line(SNAPSHOT))
    assert "round 7 closing · ready · 43.0k/61.4k tokens" in first


@pytest.mark.parametrize("width", [40, 80, 120])
def test_panel_fits(width: int) -> None:
    console = terminal(width)
    console.print(session_panel(SNAPSHOT, [3.0, 2.5, 2.6], ["a line " * 30]))
    assert all(len(line) <= width for line in output(console).splitlines())


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("loss", [None, 2.0])
def test_panel_shows_what_is_not_known_yet(away: bool, loss: float | None) -> None:
    console = terminal()
    early = replace(SNAPSHOT, loss=loss, coordinator_is_away=away, closes_in_s=None, tokens_target=0)
    console.print(session_panel(early, [], []))
    assert ("the coordinator is away" in output(console)) == away


@pytest.mark.parametrize("leaving", [False, True])
def test_the_panel_says_at_once_that_this_peer_leaves(leaving: bool) -> None:
    console = terminal()
    console.print(session_panel(replace(SNAPSHOT, leaving=leaving), [], []))
    assert ("Ctrl-C again leaves at once" in output(console)) == leaving


# Status -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_status_table_fits_and_keeps_its_numbers(width: int) -> None:
    console = terminal(width)
    console.print(status_table(make_status()))
    shown = output(console)
    assert all(len(line) <= width for line in shown.splitlines())
    for words in (
        "whale",
        "7 averaging",
        "7 committed, 1 aborted",
        "2.300",
        "1:02:05",
        "123.5k",
        "50%",
        "123.5 MB",
        "987.7 MB",
    ):
        assert words in shown


@pytest.mark.parametrize("width", [80, 120])
def test_status_says_who_could_not_go_on_and_what_to_do(width: int) -> None:
    def left(name: str, trouble: str, *, alive: bool = False) -> MemberStatus:
        one = make_status().members[1]
        return one.model_copy(update={"name": name, "left": "diverged", "trouble": trouble, "alive": alive})

    members = (
        left("orca", "lower \x1b[2J the rate"),
        left("seal", "lower \x1b[2J the rate"),
        left("eel", "another reason"),
        left("cod", "was mended", alive=True),
    )
    console = terminal(width)
    console.print(status_table(make_status().model_copy(update={"members": members})))
    shown = " ".join(output(console).split())
    ident = members[0].peer[:8]
    assert f"orca {ident}, seal {ident} left (diverged): lower ·[2J the rate" in shown
    assert f"eel {ident} left (diverged): another reason" in shown
    assert "was mended" not in shown


def test_status_says_how_members_are_met_that_nobody_can_dial() -> None:
    met = [PathReport(peer=PEERS[0], kind=kind) for kind in ("punched", "relayed", "punched")]
    ways = ({}, {"relayed": True}, {"relayed": True, "paths": tuple(met)})
    one = make_status().members[0].model_copy(update={"alive": True, "left": "", "reachable": False})
    members = tuple(one.model_copy(update={"name": f"m{number}", **way}) for number, way in enumerate(ways))
    console = terminal(160)
    console.print(status_table(make_status().model_copy(update={"members": members})))
    shown = output(console)
    assert [words in shown for words in ("unreachable", "relayed", "2 punched, 1 relayed")] == [True] * 3


@pytest.mark.parametrize("width", [80, 120])
def test_status_says_what_the_run_costs_and_on_whose_word(width: int) -> None:
    console = terminal(width)
    costs = CostStatus(members=3, priced_members=2, cost=30.0, million_tokens_cost=0.0421, currency="EUR")
    provider = {"provider": "Nimbus\x1b[2J", "provider_cost": 1234.5, "provider_unlisted_device_s": 7200.0}
    console.print(status_table(make_status().model_copy(update={"costs": costs.model_copy(update=provider)})))
    shown = " ".join(output(console).split())
    assert "30.00 EUR as members say, 2 of 3; 0.042 EUR per million tokens" in shown
    assert "1,234.50 EUR at the prices of Nimbus·[2J, without 2:00:00 of devices" in shown


@pytest.mark.parametrize("width", [80, 120])
def test_status_says_what_energy_the_run_took_and_how_busy_devices_are(width: int) -> None:
    console, made = terminal(width), make_status()
    costs = CostStatus(members=3, metered_members=2, energy_j=4.5e6, round_energy_j=90_000.0, token_energy_j=0.25)
    uses = [
        DeviceUse(cpu=0.25, memory_used_bytes=1, gpu=0.9, power_w=700.0),
        DeviceUse(cpu=0.75, memory_used_bytes=1, gpu=0.7, power_w=650.0),
        None,
    ]
    one = made.members[0].model_copy(update={"alive": True})
    members = tuple(one.model_copy(update={"use": use}) for use in uses)
    console.print(status_table(made.model_copy(update={"costs": costs, "members": members})))
    shown = " ".join(output(console).split())
    assert "1.25 kWh as members say, 2 of 3; 25 Wh in the last round; 0.25 J a token" in shown
    assert "2 GPUs 80% busy, 1.35 kW, processors 50% busy, as 2 members say" in shown


def test_status_says_nothing_of_energy_that_nobody_measures() -> None:
    console = terminal(120)
    console.print(status_table(make_status()))
    assert not {"energy", "devices", "Wh"} & set(output(console).split())


def test_amounts_have_the_prefix_that_suits() -> None:
    told = [metric_text(amount, "W") for amount in (0, 0.0042, 250, 999.9, 1000, 12_345, 4e7)]
    assert told == ["0 W", "0.0042 W", "250 W", "1 kW", "1 kW", "12.3 kW", "40 MW"]


def test_status_of_an_empty_run() -> None:
    console = terminal()
    console.print(status_table(make_status().model_copy(update={"members": ()})))
    assert "nobody has joined yet" in output(console)


def test_status_shows_each_epoch_that_is_not_covered_and_what_the_run_waits_for() -> None:
    coverage = (
        Coverage(epoch=1, samples=1000, committed=1000, leased=0, returned=0),
        Coverage(epoch=2, samples=1000, committed=936, leased=0, returned=64),
        Coverage(epoch=3, samples=1000, committed=250, leased=120, returned=30),
    )
    more = {"coverage": coverage, "rounds_undone": 2, "outlook": "nobody here holds version 7: \x1b[2J"}
    status = make_status().model_copy(update=more)
    console = terminal(120)
    console.print(status_table(status))
    shown = console.export_text()
    assert "7 committed, 1 aborted, 2 undone" in shown
    assert "2  64 samples are not committed yet" in shown
    assert "3  25% of 1.0k samples committed, 120 leased, 30 returned, 600 not given out" in shown
    assert shown.count("epoch") == 2
    assert "nobody here holds version 7: ·[2J" in shown
    assert status_json(status)["coverage"][1] == {
        "epoch": 2,
        "samples": 1000,
        "committed": 936,
        "leased": 0,
        "returned": 64,
    }


def test_status_as_json() -> None:
    plain_status = status_json(make_status())
    assert json.loads(json.dumps(plain_status)) == plain_status
    assert plain_status["run_hash"] == bytes(range(32)).hex()
    assert plain_status["state_digest"] is None
    assert [member["peer"] for member in plain_status["members"]] == list(PEERS)


# Logging ----------------------------------------------------------------------------------------------------


@pytest.fixture
def root_handlers() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("shoal")
    handlers, level = list(root.handlers), ours.level
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)


@pytest.mark.usefixtures("root_handlers")
@pytest.mark.parametrize("make_console", [plain, terminal])
def test_log_records_go_to_the_console_once(make_console: Any) -> None:
    console = make_console()
    setup_logging(console, verbose=True)
    setup_logging(console, verbose=False)
    logging.getLogger("shoal.peer").info("hello [/] there")
    logging.getLogger("shoal.peer").debug("too much")
    logging.getLogger("another.library").info("not ours")
    shown = output(console)
    assert shown.count("hello [/] there") == 1
    assert "too much" not in shown
    assert "not ours" not in shown


@pytest.mark.usefixtures("root_handlers")
def test_log_records_stand_above_the_live_view() -> None:
    console = terminal()
    setup_logging(console, verbose=False)
    with Reporter(console, None) as reporter:
        watch(reporter, FakeSession())
        logging.getLogger("shoal.peer").warning("look here")
    shown = output(console)
    assert shown.index("look here") < shown.rindex("whale")
