"""``shoal trace``: one round over all members as a trace in the trace event format, which Chrome and Perfetto show.

The coordinator asks each member what it did and puts that on its own clock, so that what is told of one member fits
what is told of the others, to within half of the time that an answer took."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.peer.terminal.events import printable
from shoal.swarm.aio import task_scope
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.client.observer import observe, observe_stages
from shoal.swarm.durable import put
from shoal.swarm.errors import LinkError, StorageError, UserError
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerSpans,
    CoordinatorToPeerStatus,
    CoordinatorToPeerTimings,
    PeerToCoordinatorGetSpans,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetTimings,
)
from shoal.swarm.protocol.timing import PhaseSpan, RoundTiming
from shoal.swarm.system import run_loop

_AT_ONCE = 8
"""Members that are asked at the same time."""

_TRACKS = ("training", "exchange")

_EARLY_SHARE = 0.25
"""Share of a round by which a member's part of it may begin before the round does."""


@dataclass(frozen=True)
class TracedMember:
    """Spans of a member's round, on the coordinator's clock, to within ``error_s``. ``stage``: of a pipeline."""

    peer: str
    name: str
    spans: tuple[PhaseSpan, ...]
    error_s: float = 0.0
    stage: int | None = None

    @property
    def label(self) -> str:
        stage = "" if self.stage is None else f", stage {self.stage}"
        return f"{printable(self.name)} ({self.peer[:8]}){stage}"


@dataclass(frozen=True)
class WrittenTrace:
    """A trace that was written. ``silent``: members that do not know that round, or did not answer."""

    path: Path
    round: int
    members: int
    error_s: float
    silent: tuple[str, ...]


def write_trace(invite: Invite, number: int | None, out: Path | None) -> WrittenTrace:
    """Write the trace of a round. Raises ``UserError`` for a round that is not known any more, ``StorageError``, and
    the errors of a join."""
    timing, members = run_loop(_ask(invite, number))
    path = out or Path(f"{invite.run}-round-{timing.round}.trace.json")
    told = [one for one in members if one.spans]
    try:
        put(path, json.dumps(trace_of(invite.run, timing, told), separators=(",", ":")).encode())
    except OSError as error:
        raise StorageError(f"the trace cannot be written to {path}: {error.strerror or error}") from error
    silent = tuple(one.label for one in members if not one.spans)
    error_s = max((one.error_s for one in told), default=0.0)
    return WrittenTrace(path, timing.round, len(told), error_s, silent)


async def _ask(invite: Invite, number: int | None) -> tuple[RoundTiming, list[TracedMember]]:
    async with observe(invite) as client:
        answer = await client.ask(PeerToCoordinatorGetTimings(first=0), CoordinatorToPeerTimings)
        rounds = {one.round: one for one in answer.rounds}
        if not rounds or (number is not None and number not in rounds):
            known = f"it knows rounds {min(rounds)} to {max(rounds)}" if rounds else "it knows none that has ended"
            asked = "its last round" if number is None else f"round {number}"
            raise UserError(f"the coordinator of {invite.run!r} does not know where the time of {asked} went: {known}")
        timing = rounds[max(rounds) if number is None else number]
        status = await client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
        async with observe_stages(client, len(status.stages)) as stages:
            limit = asyncio.Semaphore(_AT_ONCE)
            async with task_scope() as tasks:
                asking = [
                    tasks.create_task(_ask_member(scope, limit, member.peer, member.name, timing.round, stage))
                    for member in status.members
                    if member.alive
                    for stage, scope in (enumerate(stages) if stages else [(None, client)])
                    if stage is None or (member.stages and member.stages[0] <= stage <= member.stages[1])
                ]
    return timing, [task.result() for task in asking]


async def _ask_member(
    client: CoordinatorClient, limit: asyncio.Semaphore, peer: str, name: str, number: int, stage: int | None
) -> TracedMember:
    async with limit:
        try:
            told = await client.ask(PeerToCoordinatorGetSpans(peer=peer, round=number), CoordinatorToPeerSpans)
        except LinkError:
            return TracedMember(peer, name, (), stage=stage)
    return TracedMember(peer, name, told.spans, told.error_s, stage)


# The trace event format ---------------------------------------------------------------------------------------


def _within(spans: Sequence[PhaseSpan], from_s: float, to_s: float) -> tuple[PhaseSpan, ...]:
    """Clip spans, which are a member's word, to a time."""
    clipped = []
    for span in spans:
        start_s, end_s = max(span.start_s, from_s), min(span.start_s + span.seconds, to_s)
        if start_s < end_s:
            clipped.append(span.model_copy(update={"start_s": start_s, "seconds": end_s - start_s}))
    return tuple(clipped)


def trace_of(run: str, timing: RoundTiming, members: Sequence[TracedMember]) -> dict[str, Any]:
    """Return a trace as JSON: the coordinator as process 0, each member as a process with a thread for each track.

    Times are in microseconds from the first event on. Members' spans are cut to the round: they begin with the member's
    report of the round before, a little earlier than that round's verdict, and are no more than a member's word."""
    began_s = timing.ended_s - timing.wall_s
    early_s = _EARLY_SHARE * timing.wall_s
    members = [
        replace(one, spans=_within(one.spans, began_s - early_s - one.error_s, timing.ended_s + one.error_s))
        for one in members
    ]
    first_s = min([began_s, *(span.start_s for one in members for span in one.spans)])
    events = _names(0, "coordinator", ("round",))
    at_s = began_s
    for name, seconds in (("work", timing.work_s), ("gathering", timing.gather_s), ("exchange", timing.exchange_s)):
        events.append(_event(name, "round", 0, 0, at_s - first_s, seconds))
        at_s += seconds
    for number, one in enumerate(members, 1):
        events += _names(number, one.label, _TRACKS)
        for span in one.spans:
            thread = _TRACKS.index(span.track)
            events.append(_event(span.phase, span.track, number, thread, span.start_s - first_s, span.seconds))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run,
            "round": timing.round,
            "waited for": timing.path.text if timing.path is not None else "",
            "clock error in seconds": {one.label: round(one.error_s, 6) for one in members},
        },
    }


def _names(process: int, name: str, threads: Sequence[str]) -> list[dict[str, Any]]:
    """Return the metadata that names a process and its threads."""
    base = {"ph": "M", "ts": 0, "pid": process}
    return [
        {**base, "name": "process_name", "tid": 0, "args": {"name": name}},
        *({**base, "name": "thread_name", "tid": thread, "args": {"name": of}} for thread, of in enumerate(threads)),
    ]


def _event(name: str, category: str, process: int, thread: int, at_s: float, seconds: float) -> dict[str, Any]:
    """Return a complete event."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": round(1e6 * max(0.0, at_s), 1),
        "dur": round(1e6 * seconds, 1),
        "pid": process,
        "tid": thread,
    }
