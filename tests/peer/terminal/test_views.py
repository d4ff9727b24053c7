"""A pipeline's stages in a terminal: the drawing of all of them, and what a peer's own view says of its own."""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.peer.terminal.test_reporter import PEERS, SNAPSHOT, VERDICT, make_status

from shoal.peer.terminal.bars import Lines
from shoal.peer.terminal.events import sentence
from shoal.peer.terminal.reporter import status_table
from shoal.peer.terminal.snapshot import Flow, HeldStages, held_stages, with_stages
from shoal.peer.terminal.views import (
    alone_text,
    empty_text,
    farewell,
    flow_text,
    held_out_text,
    held_text,
    relay_text,
    session_panel,
    stages_drawing,
    status_line,
)
from shoal.swarm.protocol.evaluations import ClaimedLoss, EvaluationStatus, HeldOutFigure
from shoal.swarm.protocol.json_values import status_json
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.types import AssignedSpan, PipelineView, RelayLoad, RelayStatus, StageStatus

WAITS = "waits for a peer that can hold it: nobody can hold stage 2, \x1b[2Jwhich takes 3,200.0 MB"
STAGES = (
    StageStatus(
        first_layer=0,
        stop_layer=3,
        parameters_bytes=17_300_000,
        replicas=PEERS,
        tokens_per_s=3000.0,
        capacity_tokens_per_s=6000.0,
        queue=12,
        state_digest=bytes(range(32)),
        is_bottleneck=False,
    ),
    StageStatus(
        first_layer=3,
        stop_layer=4,
        parameters_bytes=1_730_000_000,
        replicas=PEERS[:1],
        coming=PEERS[1:],
        tokens_per_s=3100.0,
        capacity_tokens_per_s=3000.0,
        queue=112,
        state_digest=bytes(range(1, 33)),
        is_bottleneck=True,
    ),
    StageStatus(
        first_layer=4,
        stop_layer=9,
        parameters_bytes=1_730_000,
        replicas=(),
        tokens_per_s=0.0,
        queue=0,
        outlook=WAITS,
        is_bottleneck=False,
    ),
)
NAMES = dict(zip(PEERS, ("ant", "be\x1be"), strict=True))
HELD = HeldStages(
    first=2,
    last=3,
    stages=6,
    first_layer=4,
    stop_layer=8,
    replicas=2,
    flow=Flow(in_flight=3, max_in_flight=4, forwards=1234, backwards=1230),
)


def console(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, record=True)


def drawn(stages: tuple[StageStatus, ...], width: int = 80) -> list[str]:
    shown = console(width)
    shown.print(stages_drawing(stages, NAMES))
    return shown.export_text().splitlines()


def staged_status() -> CoordinatorToPeerStatus:
    status = make_status()
    spans = ((0, 1), None)
    members = [member.model_copy(update={"stages": span}) for member, span in zip(status.members, spans, strict=True)]
    return status.model_copy(update={"stages": STAGES, "members": tuple(members)})


# All stages -------------------------------------------------------------------------------------------------


def test_stages_flow_one_into_the_next() -> None:
    lines = drawn(STAGES)
    assert len(lines) == 3 * len(STAGES)
    boxes = ["╭───╮", "│ 0 │", "╰─┬─╯", "╭─▼─╮", "│ 1 │", "╰─┬─╯", "╭─▼─╮", "│ 2 │", "╰───╯"]
    assert [line[:5] for line in lines] == boxes


def test_boxes_of_many_stages_are_as_wide_as_their_numbers() -> None:
    lines = drawn(STAGES[:1] * 12)
    assert lines[0].startswith("╭────╮ layers 0 to 2")
    assert lines[1].startswith("│  0 │")
    assert lines[-2].startswith("│ 11 │")
    assert lines[-1].startswith("╰────╯")
    arrows = {line.index("▼") for line in lines if "▼" in line} | {line.index("┬") for line in lines if "┬" in line}
    assert len(arrows) == 1, "one line down"


def test_a_stage_says_what_it_is_what_comes_through_and_who_holds_it() -> None:
    first, flow, holders, second = drawn(STAGES)[:4]
    assert "layers 0 to 2 · 17.3 MB of parameters · 2 replicas" in first
    assert first.endswith("state 00010203")
    assert "3.0k of 6.0k tok/s" in flow
    assert flow.endswith("queue 12")
    assert "● ant aaaaaaaa  ● be·e bbbbbbbb" in holders
    assert "layer 3 · 1.7 GB of parameters · 1 replica " in second


def test_bars_are_as_long_as_what_could_be_and_as_full_as_what_is() -> None:
    lines = drawn(STAGES)
    half, full, none = (line[6:30] for line in (lines[1], lines[4], lines[7]))
    assert half == "━" * 12 + "╌" * 12
    assert full == "━" * 12 + " " * 12
    assert none == " " * 24
    assert "bottleneck" in lines[4]
    assert sum("bottleneck" in line for line in lines) == 1


def test_a_stage_that_nobody_holds_says_what_it_waits_for() -> None:
    head, flow, holders = drawn(STAGES, 120)[6:]
    assert "0 replicas" in head
    assert head.endswith("state not agreed yet")
    assert "0 tok/s" in flow
    assert "nobody can hold stage 2, ·[2Jwhich takes 3,200.0 MB" in holders
    assert "○ be·e bbbbbbbb" in drawn(STAGES)[5], "and who is coming"


def test_a_stage_with_one_replica_says_so() -> None:
    assert drawn(STAGES, 120)[5].rstrip().endswith("one replica: nobody checks it")
    assert sum("nobody checks" in line for line in drawn(STAGES, 120)) == 1
    assert alone_text(HELD) == ""
    assert alone_text(replace(HELD, alone=(5,))) == "stage 5 has one replica: nobody checks it"
    assert alone_text(replace(HELD, alone=(0, 5))) == "stages 0, 5 have one replica each: nobody checks them"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_status_of_a_pipeline_fits(width: int) -> None:
    shown = console(width)
    shown.print(status_table(staged_status()))
    lines = shown.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    assert any(line.startswith("anchor") and "agreed on in 2 of 3 stages" in line for line in lines)


def test_members_stand_with_their_stages_and_without_a_loss() -> None:
    shown = console()
    shown.print(status_table(staged_status()))
    lines = shown.export_text().splitlines()
    head = next(line for line in lines if line.lstrip().startswith("peer"))
    assert head.split() == ["peer", "device", "reach", "tok/s", "share", "stage", "sent"]
    alive, gone = (next(line for line in lines if line.lstrip().startswith(name)) for name in ("a-ra", "orca"))
    assert "0–1" in alive
    assert "0–1" not in gone


def test_all_of_it_is_in_the_json() -> None:
    found = status_json(staged_status())
    assert found["stages"][1]["coming"] == [PEERS[1]]
    assert found["stages"][0]["state_digest"] == bytes(range(32)).hex()
    assert found["stages"][2]["outlook"] == WAITS
    assert [member["stages"] for member in found["members"]] == [[0, 1], None]


# A peer's own -----------------------------------------------------------------------------------------------


def test_a_peers_view_says_what_it_holds_and_what_goes_through() -> None:
    assert held_text(HELD) == "stages 2 to 3 of 6, layers 4 to 7, 2 replicas"
    alone = replace(HELD, last=2, stop_layer=5, replicas=1)
    assert held_text(alone) == "stage 2 of 6, layer 4, 1 replica"
    assert flow_text(HELD.flow) == "1,234 forward, 1,230 backward, 3 of 4 in flight"


def test_what_a_peer_holds_as_the_view_has_it() -> None:
    spans = (AssignedSpan(peer=PEERS[0], first=0, last=2), AssignedSpan(peer=PEERS[1], first=2, last=2))
    view = PipelineView(boundaries=(0, 1, 4, 5, 8), spans=spans, version=1)
    held = held_stages(view, (0, 2), HELD.flow)
    assert (held.first, held.last, held.stages) == (0, 2, 4)
    assert (held.first_layer, held.stop_layer) == (0, 5)
    assert held.replicas == 1, "of the stage that fewest hold"
    assert held_stages(view, (2, 2), HELD.flow).replicas == 2
    assert held.empty == (3,)


@dataclass
class StageMember:
    """As much of a member of a stage as a snapshot looks at."""

    client: Any
    activity: str = "averaging"
    compression: float = 3.9


@pytest.mark.parametrize(("own", "rounds", "shown"), [(2.0, 2.5, 2.0), (None, 2.5, 2.5), (None, None, None)])
def test_who_has_no_loss_of_its_own_shows_the_rounds(own: float | None, rounds: float | None, shown: float) -> None:
    verdict = None if rounds is None else VERDICT.model_copy(update={"loss": rounds})
    first: Any = StageMember(SimpleNamespace(view=SimpleNamespace(verdict=verdict)))
    seen = with_stages(replace(SNAPSHOT, loss=own), first, HELD)
    assert seen.loss == shown
    assert (seen.activity, seen.compression, seen.held) == ("averaging", 3.9, HELD)


def test_a_peers_view_says_which_stages_nobody_holds() -> None:
    assert empty_text(HELD) == ""
    assert empty_text(replace(HELD, empty=(5,))) == "stage 5: nobody holds it, training waits"
    assert empty_text(replace(HELD, empty=(0, 5))) == "stages 0, 5: nobody holds them, training waits"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_panel_of_a_pipelines_peer_fits(width: int) -> None:
    shown = console(width)
    shown.print(session_panel(replace(SNAPSHOT, held=replace(HELD, empty=(5,))), [3.0, 2.5], ["a line " * 30]))
    text = shown.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    assert "stages 2 to 3 of 6" in text
    if width >= 80:
        for words in ("layers 4 to 7, 2 replicas", "forward 1.2k", "backward 1.2k", "in flight 3 of 4", "stage 5: "):
            assert words in text


def test_the_plain_line_of_a_pipelines_peer() -> None:
    line = status_line(replace(SNAPSHOT, held=replace(HELD, empty=(5,))))
    words = line.split(" · ")
    assert words[:4] == ["round 7 closing", "ready", held_text(HELD), flow_text(HELD.flow)]
    assert words[-1] == empty_text(replace(HELD, empty=(5,)))


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            {"event": "span", "first": 1, "last": 2, "stages": 3, "first_layer": 2, "stop_layer": 6}
            | {"parameters_bytes": 2_300_000},
            "in stages 1 to 2 of 3: layers 2 to 5, 2.3 MB of parameters",
        ),
        (
            {"event": "left", "anchor_version": 7, "tokens_trained": 3200, "bytes_sent": 1000}
            | {"held": [{"stage": 1, "anchor_version": 7, "digest": "ab" * 32}]},
            "left at version 7 · 3.2k tokens trained · 1.0 kB sent · stage 1 abababab",
        ),
        ({"event": "left", "anchor_version": None, "held": []}, "left before it held a state"),
    ],
    ids=["span", "left", "left_early"],
)
def test_events_in_words(event: dict[str, object], words: str) -> None:
    assert sentence(event) == words


def test_a_relay_is_named_with_whose_it_is_and_what_it_carries() -> None:
    load = RelayLoad(busy=0.25, clients=3, links=7, carried_bytes=4_200_000)
    own = RelayStatus(host="192.0.2.1", port=7708, load=load)
    assert relay_text(own, {}) == "192.0.2.1:7708: 7 connections of 3 members, 4.2 MB so far, 25% busy"
    gone = RelayStatus(host="2001:db8::1", port=443, peer=PEERS[0], load=None)
    assert relay_text(gone, {PEERS[0]: "ann\x1b"}).startswith("[2001:db8::1]:443 of ann")
    assert relay_text(gone, {}).endswith("it does not answer")
    shown = Console(file=io.StringIO(), width=120)
    shown.print(status_table(make_status().model_copy(update={"relays": (own, gone)})))
    assert "7 connections of 3 members" in shown.file.getvalue()  # type: ignore[attr-defined]


def test_who_leaves_is_told_how_to_come_back_and_where_the_model_is(tmp_path: Path) -> None:
    assert farewell("reef", tmp_path, ended=False, has_model=True) == (
        f"Left reef. The same command goes on where this was: its state is in {tmp_path}"
    )
    assert f"shoal export {tmp_path} --out" in farewell("reef", tmp_path, ended=True, has_model=True)
    assert "export" not in farewell("reef", tmp_path, ended=True, has_model=False)


@pytest.mark.parametrize(
    ("standing", "loss", "words"),
    [
        ("claim", 2.4131, "2.413 at version 40, accuracy 41.0%, the claim of one validator, aaaaaaaaaaaaaaaa"),
        ("agreed", 2.4131, "2.413 at version 40, accuracy 41.0%, agreed on by 2 validators"),
        ("disputed", None, "version 40: validators disagree (2.413 by aaaaaaaaaaaaaaaa and 2.900 by bbbbbbbbbbbbbbbb)"),
    ],
)
def test_the_status_says_the_held_out_loss_and_on_whose_word(standing: Any, loss: float | None, words: str) -> None:
    claims = (ClaimedLoss(validator="a" * 16, loss=2.4131), ClaimedLoss(validator="b" * 16, loss=2.9))
    figure = HeldOutFigure(
        version=40,
        round=39,
        tokens=1,
        at_s=1.0,
        loss=loss,
        standing=standing,
        counts=False,
        claims=claims[: 1 if standing == "claim" else 2],
        accuracy=0.41,
    )
    assert words in held_out_text(figure).plain
    shown = Console(file=io.StringIO(), width=120)
    told = {"evaluation": EvaluationStatus(figures=(figure,)), "stopping": "the held-out loss is low\x1b[31m"}
    shown.print(status_table(make_status().model_copy(update=told)))
    text = " ".join(shown.file.getvalue().split())  # type: ignore[attr-defined]
    assert words in text
    assert "the run ends with this round: the held-out loss is low·[31m" in text


def test_lines_that_are_too_long_lose_their_last_parts_and_not_half_of_one() -> None:
    line = "08:34:37  round 29 committed · loss 1.527 · 1 peer · 1.2M tokens · anchor 3fa2bbcc"
    for width, shown in ((90, line), (76, line.removesuffix(" · anchor 3fa2bbcc")), (10, "08:34:37 …")):
        console = Console(file=io.StringIO(), width=width)
        console.print(Lines([line]))
        assert console.file.getvalue().rstrip() == shown  # type: ignore[attr-defined]
