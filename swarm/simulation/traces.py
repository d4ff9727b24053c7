"""Traces: the machines of a simulated run, with their devices, links, prices and the times at which they are there.

A trace is a file (``load_trace``) or one of the named ones (``NAMED``), whose figures are ``docs/scale.md``'s with
their sources. Everything is drawn from a seed: the same seed gives the same machines and the same sessions.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.swarm.errors import UserError
from shoal.swarm.protocol.field_errors import field_errors

MAX_TRACE_BYTES = 64 * 2**20
MAX_TRACE_MEMBERS = 1_000_000
NO_LIMIT_BYTES = 2**48
FLOPS_PER_PARAMETER = 6.0
"""Floating-point operations of forward and backward pass for a token and a parameter (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1)."""


@dataclass(frozen=True)
class Session:
    """Time in which a machine is there. ``says_goodbye``: it leaves the run before it goes, else it falls silent."""

    start_s: float
    stop_s: float = math.inf
    says_goodbye: bool = True


@dataclass(frozen=True)
class Churn:
    """Distribution of the times for which machines are there and away.

    ``there_s``, ``away_s``: means; 0 for ``there_s``: for ever. ``shape``: of a Weibull distribution of the former: 1
    forgets how long a machine has been there, below 1 those that have been there for long stay longer.
    ``silent``: share of the ends without a word."""

    there_s: float = 0.0
    away_s: float = 0.0
    shape: float = 1.0
    silent: float = 0.5

    def sessions(self, draw: random.Random) -> Iterator[Session]:
        """Sessions in order, from time 0 on; at 0 as many machines are there as on average."""
        if not self.there_s:
            yield Session(0.0)
            return
        scale_s = self.there_s / math.gamma(1.0 + 1.0 / self.shape)
        start_s = 0.0
        if draw.random() * (self.there_s + self.away_s) >= self.there_s:
            start_s = draw.expovariate(1.0 / self.away_s)
        while True:
            stop_s = start_s + max(1.0, draw.weibullvariate(scale_s, self.shape))
            yield Session(start_s, stop_s, draw.random() >= self.silent)
            start_s = stop_s + (draw.expovariate(1.0 / self.away_s) if self.away_s else 1.0)


@dataclass(frozen=True)
class Machine:
    """One machine. ``flops``: that it reaches in training; ``tokens_per_s`` instead, where that is known.
    ``device_bytes``: of the GPU's own memory, None for one that computes in the machine's memory, ``host_bytes``; both
    only limit which stages of a pipeline it can hold. ``pack_s``, ``apply_s``: in a plain run, from the last step of a
    round to ``ready``, and from the verdict to the next step; None: by the model's size (``costs.py``).

    ``network``: its IPv4 /24 in admission's eyes; ``up_bps``, ``down_bps``: of its link, ``latency_s``: one way to any
    other machine; ``reachable``: whether others can dial it; ``sessions``: those of a file, ``churn`` else."""

    name: str
    device: str = ""
    flops: float = 0.0
    tokens_per_s: float = 0.0
    device_bytes: int | None = None
    host_bytes: int = NO_LIMIT_BYTES
    pack_s: float | None = None
    apply_s: float | None = None
    up_bps: float = 1e9
    down_bps: float = 1e9
    latency_s: float = 0.001
    reachable: bool = True
    network: str = ""
    price_per_hour: float = 0.0
    sessions: tuple[Session, ...] = ()
    churn: Churn = field(default_factory=Churn)

    def speed(self, elements: int) -> float:
        """Return the tokens a second that it trains a model of so many parameters on."""
        return self.tokens_per_s or self.flops / (FLOPS_PER_PARAMETER * elements)

    def times(self, draw: random.Random) -> Iterator[Session]:
        return iter(self.sessions) if self.sessions else self.churn.sessions(draw)


@dataclass(frozen=True)
class Trace:
    """Source of machines. ``make``: the machine of a number, from random draws of its own; ``host_bps``: the link of
    the coordinator, ``relay_bps``: of all relays together."""

    name: str
    make: Callable[[int, random.Random], Machine]
    members: int | None = None
    """Number of machines that it describes; None for any."""
    host_bps: float = 1e9
    relay_bps: float = 1e9

    def machines(self, members: int, seed: int) -> list[Machine]:
        return [self.make(number, random.Random(f"{seed} machine {number}")) for number in range(members)]


# Named traces -----------------------------------------------------------------------------------------------

_UTILISATION = 0.35
"""Share of a GPU's peak (dense bfloat16, sums in float32) that training reaches: assumed."""

_USABLE = 0.85
"""Share of a machine's memory that a run may take: assumed; the rest is the system's, torch's and other programs'."""

_HOME_GPUS = (
    # name, peak TFLOP/s and memory by the maker's data sheets, share of the machines: assumed
    ("RTX 3060", 51.0, 12, 0.35),
    ("RTX 4060", 60.0, 8, 0.25),
    ("RTX 3090", 71.0, 24, 0.15),
    ("RTX 4070", 117.0, 12, 0.15),
    ("RTX 4090", 165.0, 24, 0.10),
)


def _volunteer(number: int, draw: random.Random) -> Machine:
    device, peak, memory_gb, _ = draw.choices(_HOME_GPUS, [share for *_, share in _HOME_GPUS])[0]
    up_bps = draw.lognormvariate(math.log(20e6), 0.7)
    return Machine(
        name=f"home{number}",
        device=device,
        flops=1e12 * peak * _UTILISATION * draw.uniform(0.7, 1.0),
        device_bytes=round(_USABLE * memory_gb * 2**30),
        host_bytes=round(_USABLE * 32 * 2**30),
        up_bps=min(max(up_bps, 2e6), 1e9),
        down_bps=min(max(5 * up_bps, 10e6), 1e9),
        latency_s=min(max(draw.lognormvariate(math.log(0.025), 0.5), 0.005), 0.2),
        reachable=draw.random() < 0.3,
        network=f"home {number}",
        churn=Churn(there_s=4 * 3600.0, away_s=8 * 3600.0, shape=0.5, silent=0.5),
    )


def _spot(number: int, draw: random.Random) -> Machine:
    return Machine(
        name=f"spot{number}",
        device="T4",
        flops=65e12 * _UTILISATION * draw.uniform(0.9, 1.0),
        device_bytes=round(_USABLE * 16 * 2**30),
        host_bytes=round(_USABLE * 16 * 2**30),
        up_bps=5e9,
        down_bps=5e9,
        latency_s=draw.choice((0.001, 0.015, 0.035)),
        network=f"zone {number // 64}",
        price_per_hour=0.2,
        churn=Churn(there_s=10 * 3600.0, away_s=1800.0, shape=1.0, silent=0.1),
    )


def _cluster(number: int, draw: random.Random) -> Machine:
    return Machine(
        name=f"node{number}",
        device="8 x H100",
        flops=8 * 989e12 * _UTILISATION * draw.uniform(0.98, 1.0),
        device_bytes=round(_USABLE * 8 * 80 * 2**30),
        host_bytes=round(_USABLE * 1024 * 2**30),
        up_bps=25e9,
        down_bps=25e9,
        latency_s=0.0001,
        network=f"rack {number // 16}",
        price_per_hour=16.0,
        churn=Churn(there_s=6300 * 3600.0, away_s=900.0, shape=1.0, silent=1.0),
    )


NAMED: dict[str, Trace] = {
    one.name: one
    for one in (
        Trace("volunteers", _volunteer, host_bps=1e9, relay_bps=1e9),
        Trace("spot", _spot, host_bps=10e9, relay_bps=10e9),
        Trace("cluster", _cluster, host_bps=25e9, relay_bps=25e9),
    )
}


# Files ------------------------------------------------------------------------------------------------------


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SessionRow(_Model):
    """One time of a machine. ``end``: whether it says so when it leaves, or falls silent."""

    start_s: Annotated[float, Field(ge=0)] = 0.0
    stop_s: Annotated[float, Field(gt=0)] | None = None
    end: Literal["leave", "silent"] = "leave"

    @model_validator(mode="after")
    def _forward(self) -> SessionRow:
        if self.stop_s is not None and self.stop_s <= self.start_s:
            raise ValueError("stop_s: expected a moment after start_s")
        return self

    @property
    def session(self) -> Session:
        return Session(self.start_s, math.inf if self.stop_s is None else self.stop_s, self.end == "leave")


class MemberRow(_Model):
    """Machines of a trace file: ``count`` alike. ``device_gb``, ``host_gb``: memory that a run may take; none is no
    limit, or no GPU with a memory of its own."""

    name: Annotated[str, Field(max_length=40)] = ""
    count: Annotated[int, Field(ge=1, le=MAX_TRACE_MEMBERS)] = 1
    device: Annotated[str, Field(max_length=100)] = ""
    tokens_per_s: Annotated[float, Field(gt=0, le=1e12)] | None = None
    tflops: Annotated[float, Field(gt=0, le=1e9)] | None = None
    device_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    host_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    up_mbit: Annotated[float, Field(gt=0, le=1e7)]
    down_mbit: Annotated[float, Field(gt=0, le=1e7)] | None = None
    latency_ms: Annotated[float, Field(ge=0, le=10_000)] = 25.0
    reachable: bool = True
    network: Annotated[str, Field(max_length=64)] = ""
    price_per_hour: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    sessions: Annotated[tuple[SessionRow, ...], Field(max_length=100_000)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> MemberRow:
        if (self.tokens_per_s is None) == (self.tflops is None):
            raise ValueError("expected one of tokens_per_s and tflops (what the device reaches, not its peak)")
        for one, other in itertools.pairwise(self.sessions):
            if one.stop_s is None or other.start_s < one.stop_s:
                raise ValueError("sessions: expected in order, each after the end of the one before")
        return self

    def machine(self, number: int) -> Machine:
        name = self.name or "member"
        return Machine(
            name=name if self.count == 1 and self.name else f"{name}{number}",
            device=self.device,
            flops=1e12 * (self.tflops or 0.0),
            tokens_per_s=self.tokens_per_s or 0.0,
            device_bytes=None if self.device_gb is None else round(1e9 * self.device_gb),
            host_bytes=NO_LIMIT_BYTES if self.host_gb is None else round(1e9 * self.host_gb),
            up_bps=1e6 * self.up_mbit,
            down_bps=1e6 * (self.down_mbit if self.down_mbit is not None else self.up_mbit),
            latency_s=self.latency_ms / 1e3,
            reachable=self.reachable,
            network=self.network or f"network {number}",
            price_per_hour=self.price_per_hour,
            sessions=tuple(one.session for one in self.sessions),
        )


class TraceFile(_Model):
    """A trace file: ``host_mbit`` and ``relay_mbit`` are the links of the coordinator and of all relays together."""

    host_mbit: Annotated[float, Field(gt=0, le=1e7)] = 1000.0
    relay_mbit: Annotated[float, Field(gt=0, le=1e7)] = 1000.0
    member: Annotated[tuple[MemberRow, ...], Field(min_length=1, max_length=MAX_TRACE_MEMBERS)]


def load_trace(path: Path) -> Trace:
    """Read a trace file: TOML, JSON, or CSV, by its ending. Raises ``UserError`` that names file, place and fault."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TRACE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the trace cannot be read: {error}") from error
    if len(data) > MAX_TRACE_BYTES:
        raise UserError(f"{path}: larger than {MAX_TRACE_BYTES} bytes, the most that a trace may have")
    try:
        match path.suffix.lower():
            case ".toml":
                content = tomllib.loads(text)
            case ".json":
                content = json.loads(text)
            case ".csv":
                content = {"member": _csv_rows(text)}
            case ending:
                raise UserError(f"{path}: a trace is a file .toml, .json or .csv, not {ending or 'one without ending'}")
        found = TraceFile.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: " + "; ".join(field_errors(error, TraceFile))) from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{path}: not a valid trace: {error}") from error
    rows = [row for row in found.member for _ in range(min(row.count, MAX_TRACE_MEMBERS))][: MAX_TRACE_MEMBERS + 1]
    if len(rows) > MAX_TRACE_MEMBERS:
        raise UserError(f"{path}: more than {MAX_TRACE_MEMBERS} members")
    return Trace(
        path.name, _DrawnRows(rows), len(rows), host_bps=1e6 * found.host_mbit, relay_bps=1e6 * found.relay_mbit
    )


@dataclass(frozen=True)
class _DrawnRows:
    """The machines of a file in their order; of more than it has, any of them again, in a network of its own."""

    rows: Sequence[MemberRow]

    def __call__(self, number: int, draw: random.Random) -> Machine:
        if number < len(self.rows):
            return self.rows[number].machine(number)
        machine = draw.choice(self.rows).machine(number)
        return replace(machine, name=f"again{number}", network=f"network {number}")


def _csv_rows(text: str) -> list[dict[str, Any]]:
    """Rows of a CSV file. Columns are those of ``MemberRow``, and ``start_s``, ``stop_s`` and ``end`` of one session;
    rows with the same name are sessions of one machine."""
    rows: dict[str, dict[str, Any]] = {}
    reader = csv.DictReader(io.StringIO(text))
    for number, cells in enumerate(reader):
        if None in cells:
            raise ValueError(f"line {number + 2}: more cells than the first line has")
        given = {key: cell.strip() for key, cell in cells.items() if cell is not None and cell.strip()}
        session = {key: given.pop(key) for key in ("start_s", "stop_s", "end") if key in given}
        name = given.get("name") or f"line {number + 2}"
        row = rows.setdefault(name, given | {"sessions": []})
        if {**row, "sessions": 0} != given | {"sessions": 0}:
            raise ValueError(f"line {number + 2}: {name!r} has other values than in its first line")
        if session:
            row["sessions"].append(session)
    return list(rows.values())


def trace_of(text: str) -> Trace:
    """Return the trace of this name, or of this file. Raises ``UserError``."""
    if text in NAMED:
        return NAMED[text]
    path = Path(text)
    if not path.suffix and not path.exists():
        raise UserError(f"--trace {text}: expected {', '.join(NAMED)}, or a file .toml, .json or .csv")
    return load_trace(path)
