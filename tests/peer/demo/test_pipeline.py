"""The figures of the demo in stages from logs as its processes write them, what it calls a failure, whom it kills."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.peer.demo.board import Board, Death, choose_victim, held_now, usual_round_s, whole_run
from shoal.peer.demo.figures import (
    Assembled,
    PipelineFigures,
    Setting,
    make_pipeline_figures,
    pipeline_troubles,
    stages_marks,
    stages_report,
    stages_title,
)
from shoal.peer.demo.run import DemoOptions, run_demo
from shoal.peer.demo.run_files import STAGE_MEMORY, pipeline_rounds, pipeline_run_toml
from shoal.peer.demo.scenarios import memory_needs
from shoal.peer.machine_memory import parse_memory
from shoal.peer.recipes import load_recipe
from shoal.peer.recipes.gpt import GptRecipe
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import parse_run_file

SETTING = Setting(
    stages=2,
    memory_bytes=50_000_000,
    stage_bytes=(38_000_000, 40_000_000),
    model_bytes=115_000_000,
    parameters=1_990_000,
    started=1000.0,
)
ONE, TWO, THREE, FOUR = "a" * 16, "b" * 16, "c" * 16, "d" * 16
FIRST, SECOND, OLD = "ab" * 32, "cd" * 32, "ef" * 32
TOGETHER = "0123456789abcdef" * 4
SAVED = Assembled(3, (FIRST, SECOND))
DEATHS = [Death("peer-3", 1, 2, 1015.0), Death("peer-2", 1, 1, 1025.0, back_at=1032.0)]
"""Of stage 0 there are peer-1 and peer-4, which moves to stage 1 when that has nobody."""

Events = list[dict[str, Any]]


def ends(time: float, number: int, loss: float | None, together: str = TOGETHER) -> Events:
    """A round's end in both stages; aborted without a loss."""
    about = {"event": "verdict", "time": time, "round": number, "members": [ONE], "tokens_total": 100 * (number + 1)}
    about |= {"committed": loss is not None, "reason": "" if loss else "the run's time was over"}
    about |= {"together": together, "anchor_version": number + 1, "chain": "00" * 32}
    return [{**about, "stage": 0, "loss": None}, {**about, "stage": 1, "loss": loss}]


def planned(time: float, number: int, members: list[dict[str, int]]) -> Events:
    about = {"event": "round_planned", "time": time, "round": number, "parts": 1}
    return [
        {**about, "stage": stage, "members": list(tokens), "tokens": list(tokens.values())}
        for stage, tokens in enumerate(members)
    ]


HOST: Events = [
    *({"event": "member_joined", "time": 1001.0, "peer": peer, "name": name, "role": "trainer", "device": "CPU"}
      for name, peer in (("peer-1", ONE), ("peer-2", TWO), ("peer-3", THREE), ("peer-4", FOUR))),
    {"event": "stages_cut", "time": 1002.0, "boundaries": [0, 3, 6]},
    {"event": "span_assigned", "time": 1002.0, "peer": ONE, "first": 0, "last": 0},
    *planned(1009.0, 0, [{ONE: 60, FOUR: 40}, {TWO: 50, THREE: 50}]),
    *ends(1010.0, 0, 4.0),
    {"event": "member_lost", "time": 1018.0, "peer": THREE, "reason": "silent"},
    {"event": "member_lost", "time": 1018.0, "peer": THREE, "reason": "silent", "stage": 1},
    *planned(1019.0, 1, [{ONE: 50, FOUR: 50}, {TWO: 100}]),
    *ends(1020.0, 1, 3.0),
    *ends(1022.0, 2, 2.5),
    *planned(1039.0, 3, [{ONE: 100}, {TWO: 30, FOUR: 70}]),
    *ends(1040.0, 3, 2.0),
    *ends(1045.0, 4, None),
]  # fmt: skip


def joined(time: float, peer: str) -> Events:
    return [{"event": "joined", "time": time, "run": "demo", "peer": peer}]


def holds(time: float, stage: int, version: int, digest: str, sent: int = 0) -> Events:
    """It comes to a stage, and ends there with this."""
    return [
        {"event": "span", "time": time, "first": stage, "last": stage, "stages": 2},
        {"event": "synced", "time": time + 1, "anchor_version": 0, "digest": OLD, "stage": stage},
        {"event": "committed", "time": time + 5, "round": 3, "loss": None, "anchor_version": version, "digest": digest,
         "bytes_sent": sent, "stage": stage},
    ]  # fmt: skip


def make_peers(last_digest: str = SECOND) -> dict[str, Events]:
    return {
        "peer-1": [*joined(1001.0, ONE), *holds(1003.0, 0, 3, FIRST, 1000), {"event": "left", "time": 1046.0}],
        "peer-2": [
            *joined(1001.0, TWO),
            *holds(1003.0, 1, 2, OLD, 300),
            *joined(1033.0, TWO),
            *holds(1034.0, 1, 3, SECOND, 200),
        ],
        "peer-3": [*joined(1001.0, THREE), *holds(1003.0, 1, 1, OLD, 50)],
        "peer-4": [*joined(1001.0, FOUR), *holds(1003.0, 0, 2, OLD), *holds(1027.0, 1, 3, last_digest, 700)],
    }


def figures(last_digest: str = SECOND, host: Events = HOST) -> PipelineFigures:
    return make_pipeline_figures(SETTING, host, make_peers(last_digest), DEATHS, (5.5, 2.1))


def test_figures() -> None:
    found = figures()
    assert (found.rounds_committed, found.rounds_aborted, found.rounds_undone) == (4, 1, 0)
    assert (found.tokens, found.aborts, found.seconds) == (400, ("the run's time was over",), 46.0)
    assert [peer.is_live for peer in found.peers] == [True, True, False, True]
    assert [peer.tokens for peer in found.peers] == [210, 180, 50, 160]  # what was committed, in any stage
    assert [peer.bytes_sent for peer in found.peers] == [1000, 500, 50, 700]  # those of both processes
    assert [peer.moves for peer in found.peers] == [0, 0, 0, 1]  # coming back is no move
    assert [cost.next_s for cost in found.costs] == [5.0, 15.0]
    assert found.round_s == 2.0  # of the one in which nobody died
    assert found.anchors(0) == {"peer-1": (3, FIRST)}  # the mover is not there any more, nor what it held
    assert found.anchors(1) == {"peer-2": (3, SECOND), "peer-4": (3, SECOND)}
    assert found.parity
    assert pipeline_troubles(found, 2, SAVED) == ()
    told = found.as_json()
    assert told["deaths"][1] == {"peer": "peer-2", "stage": 1, "replicas": 1, "next_round_s": 15.0}
    assert (told["parity"], told["together"], told["moves"]) == (True, TOGETHER, 1)


def test_going_back_is_counted() -> None:
    back = {"event": "went_back", "committed": False, "reason": "lost", "from_version": 4, "anchor_version": 1}
    back |= {"time": 1050.0, "round": 5, "tokens_total": 100, "loss": None, "together": TOGETHER}
    found = figures(host=[*HOST, {**back, "stage": 0}, {**back, "stage": 1}])
    assert (found.rounds_undone, found.rounds_aborted, found.rounds_committed) == (3, 1, 4)


def test_replicas_that_differ_are_a_failure() -> None:
    found = figures(last_digest=FIRST)
    assert not found.parity
    assert found.stage_parity(0)
    assert pipeline_troubles(found, 2, SAVED) == ("the live replicas of stage 1 do not hold the same anchor",)


def test_stages_of_different_rounds_are_a_failure() -> None:
    peers = make_peers()
    peers["peer-1"][-2]["anchor_version"] = 2
    found = make_pipeline_figures(SETTING, HOST, peers, DEATHS, (5.5, 2.1))
    assert found.stage_parity(0)
    assert found.stage_parity(1)
    assert pipeline_troubles(found, 2, SAVED) == ("the stages do not stand at the same round",)


def test_verdicts_that_are_not_tied_are_a_failure() -> None:
    host = [*HOST, {**HOST[-3], "committed": True, "together": OLD}]
    assert not figures(host=host).parity


def test_other_failures() -> None:
    found = figures()
    nobody = make_pipeline_figures(SETTING, [], {}, [], (5.5, 5.5))
    assert set(pipeline_troubles(nobody, 2, SAVED)) >= {
        "no round was committed",
        "nobody holds stage 0 in the end",
        "the run was over before everybody was killed who was to be: give it more --minutes",
    }
    assert pipeline_troubles(replace(found, final_loss=5.6), 2, SAVED) == (
        "the loss did not fall: 5.500 before, 5.600 after",
    )
    never = replace(found, costs=(found.costs[0], replace(found.costs[1], next_s=None)))
    assert pipeline_troubles(never, 2, SAVED) == ("no round was committed after the death of peer-2 in stage 1",)
    for other in (replace(SAVED, version=2), replace(SAVED, digests=(FIRST, OLD))):
        assert "the checkpoints" in pipeline_troubles(found, 2, other)[0]


def test_who_holds_what_now() -> None:
    events = make_peers()["peer-4"]
    assert [held_now(events[:count]) for count in (1, 2, 3, 4, 5, 6)] == [(), (), (0,), (0,), (), (1,)]
    assert held_now(joined(0.0, ONE) + holds(0.0, 1, 1, OLD) + joined(5.0, ONE)) == ()


def test_rounds_end_once() -> None:
    both = ends(1010.0, 0, 4.0)
    assert [whole_run(event, 2) for event in both] == [None, {k: v for k, v in both[1].items() if k != "stage"}]
    assert whole_run(HOST[0], 2) is HOST[0]


def test_the_usual_round() -> None:
    assert usual_round_s([10.0, 12.0, 30.0, 33.0, 37.0], [20.0]) == 3.0
    assert usual_round_s([10.0], []) == 0.0


def test_first_a_replica_of_the_middlemost_stage_that_has_several() -> None:
    assert choose_victim({"a": 0, "b": 1, "c": 1, "d": 2, "e": 2}, 3, []) == ("c", 1, 2)
    assert choose_victim({"a": 0, "b": 0, "c": 1, "d": 2}, 3, []) == ("b", 0, 2)
    assert choose_victim({"a": 0, "b": 1, "c": 2}, 3, []) is None


def test_then_the_only_one_of_another_stage() -> None:
    dead = [Death("z", 1, 2, 0.0)]
    assert choose_victim({"a": 0, "b": 1, "c": 2, "d": 2}, 3, dead) == ("a", 0, 1)
    assert choose_victim({"a": 0, "b": 0, "c": 1, "d": 2, "e": 2}, 3, dead) == ("c", 1, 1)  # there is no other one
    assert choose_victim({"a": 0, "b": 1, "c": 1}, 3, dead) is None  # stage 2 is not held yet


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(stages_report(figures()))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown
    for words in (
        "5.500 → 2.100",
        "4 committed, 1 aborted",
        "the run's time was over",
        "peer-2, the only replica of stage 1: the next round 15.0 s later",
        "peer-3, one of 2 replicas of stage 1: the next round 5.0 s later",
        "v3 cdcdcdcd, equal on peer-2, peer-4",
        "v3 abababab, on peer-1 alone",
        TOGETHER[:16],
        "115 MB",
    ):
        assert words in shown


def test_failures_are_seen() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(stages_report(figures(last_digest=FIRST)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "NOT equal on peer-2, peer-4" in shown
    assert "the stages do NOT agree" in shown


def test_marks_are_in_order() -> None:
    words = ["peer-3 killed, one of 2 in stage 1", "peer-2 killed, the only one in stage 1", "peer-2 comes back"]
    marks = stages_marks(figures())
    assert [(mark.at_s, mark.words) for mark in marks] == list(zip((15.0, 25.0, 32.0), words, strict=True))
    assert "4 rounds" in stages_title(figures())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_board(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, height=40, color_system=None)
    with Board(console, 60.0, 50) as board:
        for name, events in make_peers().items():
            board.add(name)
            for event in events:
                board.feed_peer(name, event)
        for event in HOST:
            board.feed_host(event)
        board.refresh()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert ("round 5, 1 aborted" in shown) == is_terminal
    assert (
        shown.count("round 3 committed · loss 2.000") == 1 + is_terminal
    )  # what is live is drawn once more at the end
    assert ("round 1 committed" in shown) != is_terminal  # in a terminal the next one takes its place
    assert shown.count("peer-3 is gone: silent") == 1 + is_terminal  # not once more for the stage


def test_a_peer_can_hold_one_stage_and_no_more() -> None:
    run = parse_run_file(pipeline_run_toml(3, pipeline_rounds(3.0)))
    assert run.pipeline is not None
    assert (run.algorithm, run.run.rounds, run.run.max_s) == ("virtual_batch", 75, 900.0)
    recipe = load_recipe(run)
    assert isinstance(recipe, GptRecipe)
    stages, whole = memory_needs(run, recipe, (0, 3, 5, 8), Path("/dev/null/measured.json"))
    three_blocks, _ = memory_needs(run, recipe, (0, 2, 5, 8), Path("/dev/null/measured.json"))
    assert max(stages) < parse_memory(STAGE_MEMORY) < three_blocks[1]
    assert whole > 2 * parse_memory(STAGE_MEMORY)


def test_options_that_make_no_sense_are_refused() -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(UserError, match="leave out --preset"):
        run_demo(DemoOptions(pipeline=True, preset="diloco"), console)
    with pytest.raises(UserError, match="--peers: expected 5 or more"):
        run_demo(DemoOptions(pipeline=True, peers=4), console)
    with pytest.raises(UserError, match="--minutes: expected 1 or more"):
        run_demo(DemoOptions(pipeline=True, minutes=0.5), console)
