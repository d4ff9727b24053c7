"""Shared parts of the benchmarks: the machine's description, the JSON that they write, and whole runs on loopback."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from shoal.peer.demo.processes import Child
from shoal.peer.offline.export import export_model
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.types import Address, RosterEntry
from shoal.swarm.transport.node import Node

T = TypeVar("T")

# A pipe or a file has no width of its own; rich would take 80 columns.
console = Console(width=None if sys.stdout.isatty() else 152)


def parser(about: str | None) -> argparse.ArgumentParser:
    """With the option that every benchmark has."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--json", type=Path, help="write machine, rows and ratios to this file")
    return made


def entry_of(node: Node, identity: Identity, keys: CurveKeys) -> RosterEntry:
    """Return the roster entry by which others find this node on loopback."""
    return RosterEntry(
        peer=identity.peer_id,
        certificate=identity.certify(keys),
        name="bench",
        role="trainer",
        addresses=(Address(host="127.0.0.1", control_port=node.control_port, data_port=node.data_port),),
        reachable=True,
    )


def machine() -> dict[str, Any]:
    """Describe the machine on which the figures were measured."""
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": time.strftime("%Y-%m-%d"),
    }


def end_on_sigterm() -> None:
    """Exit on SIGTERM by an exception, so that processes and namespaces are cleaned up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def comma(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An option's type: values with commas between them."""

    def parse(text: str) -> list[T]:
        return [kind(one.strip()) for one in text.split(",") if one.strip()]

    parse.__name__ = "list"  # what argparse calls it in its errors
    return parse


def elements_of(size: str) -> int:
    """Of a size as people write it: ``10M``, ``2.5M``, ``500k``, or a plain number. Raises ``ValueError``."""
    factor = {"k": 10**3, "M": 10**6}.get(size[-1:], 1)
    elements = float(size[:-1] if factor > 1 else size) * factor
    if elements < 1 or elements != int(elements):
        raise ValueError(f"{size}: expected a whole number of elements")
    return int(elements)


def size_of(elements: int) -> str:
    """Format a number of elements: 10_000_000 is ``10M``."""
    return f"{elements / 1e6:g}M" if elements >= 10**5 else f"{elements}"


def over(one: float | None, other: float | None) -> float | None:
    """Their ratio, None without either."""
    return None if one is None or not other else one / other


def publish(
    title: str, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float | None], path: Path | None
) -> None:
    """Print the table and the ratios; write them as JSON where asked for. None: it could not be measured here."""
    for _, alike in groupby(rows, key=tuple):
        console.print(table_of(title, list(alike)))
    for name, ratio in ratios.items():
        console.print(f"{name} = {'not measured' if ratio is None else f'{ratio:.5g}'}", highlight=False)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "rows": list(rows), "ratios": dict(ratios)}
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One that has a column for each key."""
    columns, table = list(dict.fromkeys(column for row in rows for column in row)), Table(title=title)
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in rows)
        table.add_column(
            column.removesuffix("_GBps").replace("_", " "), justify="left" if is_text else "right", no_wrap=is_text
        )
    for row in rows:
        table.add_row(*(in_words(row.get(column)) for column in columns))
    return table


def in_words(value: Any) -> str:
    """One field of a table."""
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value}"


@dataclass(frozen=True)
class Trained:
    """Outcome of a run on loopback: its exported model, committed tokens and rounds, bytes that each peer sent."""

    model: Path
    tokens: int
    rounds: int
    bytes_sent: list[int]
    seconds: float
    parity: bool


def train_swarm(run_toml: str, peers: int, folder: Path, limit_s: float) -> Trained:
    """Host the run and train it with so many peers, all processes of this machine, until it ends by itself.

    Raises ``RuntimeError`` with the end of the log of a process that failed.
    """
    folder.mkdir(parents=True)
    run_file = folder / "run.toml"
    run_file.write_text(run_toml)
    host = Child(
        "host", folder / "host", ["host", str(run_file), "--bind", "127.0.0.1:0", "--no-supervisor", "--no-keep-model"]
    )
    members: list[Child] = []
    started = time.monotonic()
    try:
        invite = await_invite(host, started + 60)
        for number in range(peers):
            arguments = ["join", invite, "--name", f"peer-{number}", "--bind", "127.0.0.1", "--threads", "1"]
            members.append(Child(f"peer-{number}", folder / f"peer-{number}", [*arguments, "--device", "cpu"]))
        while any(member.is_running for member in members):
            if time.monotonic() > started + limit_s:
                raise RuntimeError(f"the run did not end within {limit_s:.0f} s")
            time.sleep(0.2)
        for member in members:
            if member.process.returncode:
                raise RuntimeError(f"{member.name} failed:\n{member.log.read_text()[-2000:]}")
    finally:
        for child in [*members, host]:
            child.ask_to_end()
            child.end()
    host.take_events()
    left = [event for member in members for event in member.take_events() if event["event"] == "left"]
    verdicts = [event for event in host.events if event["event"] == "verdict" and event["committed"]]
    model = folder / "model.safetensors"
    export_model(folder / "peer-0" / "state", model)
    return Trained(
        model=model,
        tokens=int(verdicts[-1]["tokens_total"]),
        rounds=len(verdicts),
        bytes_sent=[int(event["bytes_sent"]) for event in left],
        seconds=float(verdicts[-1]["elapsed_s"]),
        parity=len({event["digest"] for event in left}) == 1,
    )


def await_invite(host: Child, deadline: float) -> str:
    """Wait for the invite of a host that was started. Raises ``RuntimeError`` with the end of its log."""
    while time.monotonic() < deadline and host.is_running:
        if invite := host.invite():
            return invite
        time.sleep(0.1)
    raise RuntimeError(f"the coordinator gave no invite:\n{host.log.read_text()[-2000:]}")
