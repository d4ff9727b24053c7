"""The demo's figures from logs as its processes write them, and how they are shown."""

import builtins
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.peer.demo.board import Board
from shoal.peer.demo.figures import (
    Curve,
    Figures,
    Mark,
    Plan,
    float32_ddp_bytes,
    loss_curve,
    make_figures,
    plot_loss,
    report,
    write_json,
)
from shoal.peer.demo.processes import EventFile, fresh_folder
from shoal.peer.demo.run import DemoOptions, run_demo
from shoal.peer.demo.run_files import demo_run_toml
from shoal.peer.demo.scenarios import troubles_of
from shoal.swarm.errors import StorageError, UserError
from shoal.swarm.protocol.run_file import parse_run_file

PLAN = Plan(
    peers=2,
    parameters=1000,
    tokens_per_step=100,
    killed="peer-2",
    joined="peer-3",
    started=1000.0,
    killed_at=1020.0,
    joined_at=1030.0,
)
ONE, TWO, THREE = "a" * 16, "b" * 16, "c" * 16


def planned(time: float, number: int, tokens: dict[str, int]) -> dict[str, Any]:
    peers = {"members": list(tokens), "tokens": list(tokens.values()), "parts": len(tokens)}
    return {"event": "round_planned", "time": time, "round": number, **peers}


def verdict(time: float, number: int, total: int, loss: float | None) -> dict[str, Any]:
    outcome = {"committed": loss is not None, "reason": "" if loss else "why", "loss": loss}
    return {"event": "verdict", "time": time, "round": number, "tokens_total": total, "members": [], **outcome}


def joined_host(name: str, peer: str) -> dict[str, Any]:
    return {"event": "member_joined", "time": 1001.0, "peer": peer, "name": name, "role": "trainer", "device": "CPU"}


HOST = [
    joined_host("peer-1", ONE),
    joined_host("peer-2", TWO),
    planned(1009.0, 0, {ONE: 500, TWO: 300}),
    verdict(1010.0, 0, 800, 4.0),
    planned(1021.0, 1, {ONE: 500, TWO: 500}),
    verdict(1025.0, 1, 800, None),
    {"event": "member_lost", "time": 1026.0, "peer": TWO, "reason": "silent"},
    planned(1031.0, 2, {ONE: 700}),
    verdict(1032.0, 2, 1500, 3.0),
    planned(1041.0, 3, {ONE: 300, THREE: 200}),
    verdict(1042.0, 3, 2000, 2.0),
]


def peer_events(peer: str, began: float, ended: float, sent: int, digest: str, left: bool) -> list[dict[str, Any]]:
    about = {"digest": digest, "anchor_version": 3, "bytes_sent": sent, "bytes_received": 1}
    return [
        {"event": "joined", "time": began - 1, "run": "demo", "peer": peer},
        {"event": "synced", "time": began, "anchor_version": 0, "digest": "00"},
        {"event": "committed", "time": ended, "round": 3, "loss": 2.0, "members": 2, **about},
        *([{"event": "left", "time": ended, "tokens_trained": 5000, **about}] if left else []),
    ]


def make_peers(last_digest: str = "ab" * 32) -> dict[str, list[dict[str, Any]]]:
    return {
        "peer-1": peer_events(ONE, 1005.0, 1045.0, 1000, "ab" * 32, left=True),
        "peer-2": peer_events(TWO, 1005.0, 1010.0, 300, "cd" * 32, left=False),
        "peer-3": peer_events(THREE, 1035.0, 1045.0, 400, last_digest, left=True),
    }


def figures() -> Figures:
    return make_figures(PLAN, HOST, make_peers(), (5.5, 2.0))


def test_data_parallel_bytes() -> None:
    # Ring all-reduce: every peer sends (N-1)/N of the vector twice.
    assert float32_ddp_bytes(4, 935_000, 10) == pytest.approx(2 * 3 / 4 * 4 * 935_000 * 10)
    assert float32_ddp_bytes(2, 1000, 1) == 4000
    assert float32_ddp_bytes(1, 1000, 1) == 0


def test_figures() -> None:
    found = figures()
    assert (found.rounds_committed, found.rounds_aborted, found.tokens) == (3, 1, 2000)
    one, two, three = found.peers
    assert [peer.tokens for peer in found.peers] == [1500, 300, 200]  # nothing of the aborted round
    assert [peer.part for peer in found.peers] == ["all along", "killed", "came late"]
    assert one.tokens_per_s == pytest.approx(1500 / 40)
    assert one.bytes_float32_ddp == pytest.approx(15 * 4000)
    assert (two.bytes_sent, two.digest) == (300, "cd" * 32)
    assert three.tokens_per_s == pytest.approx(20)
    assert found.as_json() == {
        "initial_loss": 5.5,
        "final_loss": 2.0,
        "tokens": 2000,
        "rounds_committed": 3,
        "rounds_aborted": 1,
        "bytes_sent_per_peer": 1000,
        "bytes_float32_ddp_per_peer": 60_000,
        "parity": True,
        "killed": "peer-2",
        "joined": "peer-3",
        "seconds": 45.0,
    }
    assert found.ratio == pytest.approx(60)


def test_parity_is_of_the_live_peers() -> None:
    assert figures().parity
    assert not make_figures(PLAN, HOST, make_peers("ef" * 32), (5.5, 2.0)).parity
    silent: dict[str, list[dict[str, Any]]] = {"peer-1": [], "peer-2": [], "peer-3": []}
    nothing = make_figures(PLAN, [], silent, (5.5, 5.5))
    assert not nothing.parity
    assert (nothing.rounds_committed, nothing.tokens, nothing.ratio) == (0, 0, 0.0)


def test_what_is_called_a_failure() -> None:
    assert troubles_of(figures()) == ()
    differs = make_figures(PLAN, HOST, make_peers("ef" * 32), (5.5, 2.0))
    assert troubles_of(differs) == ("the live peers do not hold the same anchor",)
    late = make_figures(PLAN, HOST, {**make_peers(), "peer-3": []}, (5.5, 2.0))
    assert troubles_of(late) == ("the run was over before peer-3 held a state: give it more --minutes",)


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    big = tuple(
        replace(peer, tokens=123_456, tokens_per_s=3420.0, version=118, bytes_float32_ddp=1.04e9, bytes_sent=24_700_000)
        for peer in figures().peers
    )
    console.print(report(replace(figures(), peers=big)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    assert "…" not in shown
    for words in ("5.500 → 2.000", "3 committed, 1 aborted", "equal on all 2 live peers", "24.7 MB", "1.04 GB", "42×"):
        assert words in shown


def curve(moments_s: list[float], losses: list[float]) -> Curve:
    marks = [Mark(20.0, "peer-2 killed", "#c1121f"), Mark(30.0, "peer-3 joins", "#2a9d5c")]
    return Curve("2 peers", moments_s, losses, (5.5, 2.0), 45.0, marks if moments_s else [])


def test_curve_is_drawn(tmp_path: Path) -> None:
    assert loss_curve(HOST, 1000.0) == ([10.0, 32.0, 42.0], [4.0, 3.0, 2.0])
    assert plot_loss(tmp_path / "loss.png", curve(*loss_curve(HOST, 1000.0)))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert plot_loss(tmp_path / "empty.png", curve([], []))
    with pytest.raises(StorageError, match="cannot be written"):
        plot_loss(tmp_path / "missing" / "loss.png", curve([], []))


def test_without_matplotlib_there_is_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert not plot_loss(tmp_path / "loss.png", curve([], []))
    assert not (tmp_path / "loss.png").exists()


def test_json_file(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "figures.json", figures().as_json())
    assert json.loads((tmp_path / "new" / "figures.json").read_text()) == figures().as_json()
    with pytest.raises(StorageError):
        write_json(tmp_path, {})


def test_a_line_without_its_end_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    assert file.new() == []
    path.write_bytes(b'{"event": "a"}\n{"event"')
    assert file.new() == [{"event": "a"}]
    assert file.new() == []
    with path.open("ab") as more:
        more.write(b': "b"}\n')
    assert file.new() == [{"event": "b"}]


def test_folders_are_new_each_time(tmp_path: Path) -> None:
    assert fresh_folder(tmp_path / "out") != fresh_folder(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        fresh_folder(tmp_path / "file")


def test_the_run_file_is_valid() -> None:
    run = parse_run_file(demo_run_toml("diloco", 4, 3.0))
    assert (run.algorithm, run.averaging.codec, run.inner.lr, run.outer.lr) == ("diloco", "int8", 2e-3, 0.7)
    assert (run.run.max_s, run.round.tokens, run.schedule.warmup_tokens) == (180.0, 61_440, 81_920)


def test_the_sparseloco_preset_has_the_published_settings() -> None:
    run = parse_run_file(demo_run_toml("sparseloco", 4, 3.0))
    assert (run.algorithm, run.averaging.residual_decay) == ("sparseloco", 0.95)
    assert run.averaging.codec == {"name": "topk", "k": 64, "values": "2bit", "chunk": 4096}
    assert (run.outer.optimizer, run.outer.lr) == ("sgd", 1.0)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UserError, match=r"--preset: expected one of diloco, sparseloco, not 'adam'"):
        run_demo(DemoOptions(preset="adam"), Console(file=io.StringIO()))


def test_one_peer_is_too_few() -> None:
    with pytest.raises(UserError, match="--peers"):
        run_demo(DemoOptions(peers=1), Console(file=io.StringIO()))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_board(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, height=40, color_system=None)
    with Board(console, 60.0) as board:
        board.start_clock()
        for name, events in make_peers().items():
            board.add(name)
            for event in events:
                board.feed_peer(name, event)
        board.add("peer-4", "joined half way")
        board.mark("peer-2", "killed", "SIGKILL")
        for event in HOST:
            board.feed_host(event)
            board.refresh()
        board.say("done")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "round 3 committed · loss 2.000" in shown
    assert "peer-2 is gone: silent" in shown
    assert ("SIGKILL" in shown) == is_terminal
