"""The demo's figures from logs as its processes write them, what is called a failure, and how it is shown."""

import builtins
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.peer.demo.logged import (
    DEATHS,
    FIRST,
    OLD,
    SECOND,
    STAGES_HOST,
    TOGETHER,
    WHOLE_HOST,
    stages_log,
    stages_peers,
    stages_report,
    whole_peers,
    whole_report,
)

from shoal.peer.demo.report import (
    Report,
    float32_ddp_bytes,
    loss_curve,
    make_lines,
    marks,
    measure_memory,
    plot_loss,
    render,
    write_json,
)
from shoal.peer.demo.run_files import ROUNDS_PER_MINUTE, STAGE_MEMORY, pipeline_toml
from shoal.peer.machine_memory import parse_memory
from shoal.peer.recipes import load_recipe
from shoal.peer.recipes.gpt import GptRecipe
from shoal.swarm.errors import StorageError
from shoal.swarm.protocol.run_file import parse_run_file


def troubles(report: Report) -> list[str]:
    return [line.trouble for line in make_lines(report) if line.trouble]


def shown(report: Report, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(report, make_lines(report)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Whole models -----------------------------------------------------------------------------------------------


def test_data_parallel_bytes() -> None:
    # Ring all-reduce: every peer sends (N-1)/N of the vector twice.
    assert float32_ddp_bytes(4, 935_000, 10) == pytest.approx(2 * 3 / 4 * 4 * 935_000 * 10)
    assert float32_ddp_bytes(2, 1000, 1) == 4000
    assert float32_ddp_bytes(1, 1000, 1) == 0


def test_figures_of_whole_models() -> None:
    found = whole_report()
    one, two, three = found.log.peers.values()
    assert (len(found.log.commits), found.log.rounds_aborted, found.log.tokens) == (3, 1, 2000)
    assert [peer.tokens for peer in (one, two, three)] == [1500, 300, 200]  # nothing of the aborted round
    assert [peer.part for peer in (one, two, three)] == ["all along", "killed", "came late"]
    assert one.tokens_per_s == pytest.approx(1500 / 40)
    assert found.float32_bytes(one) == pytest.approx(15 * 4000)
    assert (two.bytes_sent, two.anchors[0][1]) == (300, SECOND)
    assert three.tokens_per_s == pytest.approx(20)
    assert found.as_json() == {
        "initial_loss": 5.5,
        "final_loss": 2.0,
        "tokens": 2000,
        "rounds_committed": 3,
        "rounds_aborted": 1,
        "rounds_undone": 0,
        "round_s": 10.0,
        "bytes_sent_per_peer": 1000,
        "bytes_float32_ddp_per_peer": 60_000,
        "memory": None,
        "moves": 0,
        "deaths": [{"peer": "peer-2", "stage": None, "replicas": 0, "next_round_s": 12.0}],
        "joined": ["peer-3"],
        "parity": True,
        "together": None,
        "seconds": 45.0,
    }
    assert found.ratio == pytest.approx(60)


def test_parity_is_of_the_live_peers() -> None:
    assert whole_report().parity
    assert not whole_report(whole_peers(OLD)).parity
    silent: dict[str, list[dict[str, Any]]] = {"peer-1": [], "peer-2": [], "peer-3": []}
    nothing = whole_report(silent, host=[])
    assert not nothing.parity
    assert (len(nothing.log.commits), nothing.log.tokens, nothing.ratio) == (0, 0, 0.0)


def test_failures_of_whole_models() -> None:
    assert troubles(whole_report()) == []
    assert troubles(whole_report(whole_peers(OLD))) == ["the live peers do not hold the same anchor"]
    late = whole_report({**whole_peers(), "peer-3": []})
    assert troubles(late) == ["the run was over before peer-3 held a state: give it more --minutes"]
    other = whole_report(digest=OLD)
    assert troubles(other) == ["the checkpoints have version 3, and not what the peers held last"]


@pytest.mark.parametrize("width", [80, 120])
def test_table_of_whole_models_fits(width: int) -> None:
    big = whole_report()
    for peer in big.log.peers.values():
        peer.tokens, peer.synced_at, peer.last_at = 123_456, 1000.0, 1036.1
        peer.anchors = {0: (118, FIRST)}
        peer._sent = 24_700_000
    big = replace(big, parameters=210_400, saved=[(118, FIRST)])
    words = shown(big, width)
    assert all(len(line) <= width for line in words.splitlines())
    assert "…" not in words
    for one in ("5.500 → 2.000", "3 committed, 1 aborted", "equal on peer-1, peer-3", "24.7 MB", "1.0 GB", "42×"):
        assert one in words


# Models in stages -------------------------------------------------------------------------------------------


def test_figures_of_stages() -> None:
    found = stages_report()
    log = found.log
    assert (len(log.commits), log.rounds_aborted, log.rounds_undone) == (4, 1, 0)
    assert (log.tokens, log.abort_reasons, found.seconds) == (400, ["the run's time was over"], 46.0)
    peers = log.peers.values()
    assert [peer.is_live for peer in peers] == [True, True, False, True]
    assert [peer.tokens for peer in peers] == [210, 180, 50, 160]  # what was committed, in any stage
    assert [peer.bytes_sent for peer in peers] == [1000, 500, 50, 700]  # those of both processes
    assert [peer.moves for peer in peers] == [0, 0, 0, 1]  # coming back is no move
    assert [log.next_commit_s(death) for death in log.deaths] == [5.0, 15.0]
    assert log.round_s == 2.0  # of the one in which nobody died
    assert found.anchors(0) == {"peer-1": (3, FIRST)}  # the mover is not there any more, nor what it held
    assert found.anchors(1) == {"peer-2": (3, SECOND), "peer-4": (3, SECOND)}
    assert found.parity
    assert troubles(found) == []
    told = found.as_json()
    assert told["deaths"][1] == {"peer": "peer-2", "stage": 1, "replicas": 1, "next_round_s": 15.0}
    assert (told["parity"], told["together"], told["moves"]) == (True, TOGETHER, 1)
    json.dumps(told)


def test_going_back_is_counted() -> None:
    back = {"event": "went_back", "committed": False, "reason": "lost", "from_version": 4, "anchor_version": 1}
    back |= {"time": 1050.0, "round": 5, "tokens_total": 100, "loss": None, "together": TOGETHER}
    log = stages_report(host=[*STAGES_HOST, {**back, "stage": 0}, {**back, "stage": 1}]).log
    assert (log.rounds_undone, log.rounds_aborted, len(log.commits)) == (3, 1, 4)


def test_replicas_that_differ_are_a_failure() -> None:
    found = stages_report(stages_peers(last_digest=FIRST))
    assert not found.parity
    assert found.is_equal(0)
    assert troubles(found) == ["the live replicas of stage 1 do not hold the same anchor"]


def test_stages_of_different_rounds_are_a_failure() -> None:
    peers = stages_peers()
    peers["peer-1"][-2]["anchor_version"] = 2
    found = stages_report(peers)
    assert found.is_equal(0)
    assert found.is_equal(1)
    assert troubles(found) == ["the stages do not stand at the same round"]


def test_verdicts_that_are_not_tied_are_a_failure() -> None:
    host = [*STAGES_HOST, {**STAGES_HOST[-3], "committed": True, "together": OLD}]
    assert not stages_report(host=host).parity


def test_other_failures_of_stages() -> None:
    found = stages_report()
    assert set(troubles(stages_report({}, host=[], deaths=[]))) >= {
        "no round was committed",
        "nobody holds stage 0 in the end",
    }
    assert troubles(replace(found, losses=(5.5, 5.6))) == ["the loss did not fall: 5.500 before, 5.600 after"]
    never = stages_report(deaths=[DEATHS[0], replace(DEATHS[1], killed_at=1041.0)])
    assert troubles(never) == ["no round was committed after the death of peer-2, the only replica of stage 1"]
    for saved in ([(2, FIRST), (2, SECOND)], [(3, FIRST), (3, OLD)]):
        assert "the checkpoints" in troubles(replace(found, saved=saved))[0]


@pytest.mark.parametrize("width", [80, 120])
def test_table_of_stages_fits(width: int) -> None:
    words = shown(stages_report(), width)
    assert all(len(line) <= width for line in words.splitlines())
    assert "…" not in words
    for one in (
        "5.500 → 2.100",
        "4 committed, 1 aborted",
        "the run's time was over",
        "peer-2, the only replica of stage 1: the next round 15.0 s later",
        "peer-3, one of 2 replicas of stage 1: the next round 5.0 s later",
        "v3 cdcdcdcd, equal on peer-2, peer-4",
        "v3 abababab, on peer-1 alone",
        TOGETHER[:16],
        "115.0 MB",
    ):
        assert one in words


def test_failures_are_seen() -> None:
    words = shown(stages_report(stages_peers(last_digest=FIRST)))
    assert "NOT equal on peer-2, peer-4" in words
    assert "the stages do NOT agree" in words


def test_marks_are_in_order() -> None:
    words = ["peer-3 killed, one of 2 replicas of stage 1", "peer-2 killed, the only replica of stage 1"]
    found = [(at_s, words) for at_s, words, _ in marks(stages_report().log)]
    assert found == list(zip((15.0, 25.0, 32.0), [*words, "peer-2 comes back"], strict=True))
    assert [words for _, words, _ in marks(whole_report().log)] == ["peer-2 killed", "peer-3 joins"]


def test_a_peer_can_hold_one_stage_and_no_more() -> None:
    run = parse_run_file(pipeline_toml(3, 3 * ROUNDS_PER_MINUTE))
    recipe = load_recipe(run)
    assert isinstance(recipe, GptRecipe)
    found = measure_memory(run, recipe, (0, 3, 5, 8), Path("/dev/null/measured.json"))
    three_blocks = measure_memory(run, recipe, (0, 2, 5, 8), Path("/dev/null/measured.json"))
    assert max(found.stages) < parse_memory(STAGE_MEMORY) == found.peer < three_blocks.stages[1]
    assert found.model > 2 * parse_memory(STAGE_MEMORY)


# Files ------------------------------------------------------------------------------------------------------


def test_curve_is_drawn(tmp_path: Path) -> None:
    report = whole_report()
    assert loss_curve(report.log) == ([10.0, 32.0, 42.0], [4.0, 3.0, 2.0])
    assert plot_loss(tmp_path / "loss.png", report)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    empty = replace(report, log=stages_log())
    assert plot_loss(tmp_path / "empty.png", empty)
    with pytest.raises(StorageError, match="cannot be written"):
        plot_loss(tmp_path / "missing" / "loss.png", empty)


def test_without_matplotlib_there_is_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert not plot_loss(tmp_path / "loss.png", whole_report())
    assert not (tmp_path / "loss.png").exists()


def test_json_file(tmp_path: Path) -> None:
    figures = whole_report(host=WHOLE_HOST).as_json()
    write_json(tmp_path / "new" / "figures.json", figures)
    assert json.loads((tmp_path / "new" / "figures.json").read_text()) == figures
    with pytest.raises(StorageError):
        write_json(tmp_path, {})
