"""Traces by the rules of the trace event format."""

from __future__ import annotations

import json

from tests.swarm.web.samples import member, timing

from shoal.peer.cli.trace import TracedMember, trace_of
from shoal.swarm.protocol.timing import PhaseSpan

ROUND = timing(41, late=2, text="round 41 took 12 s longer because b sent at 2 Mbit/s").model_copy(
    update={"ended_s": 520.0}
)


def spans() -> tuple[PhaseSpan, ...]:
    return (
        PhaseSpan(track="training", phase="compute", start_s=499.5, seconds=12.5),
        PhaseSpan(track="training", phase="exchange", start_s=512.0, seconds=8.0),
        PhaseSpan(track="exchange", phase="exchange", start_s=512.0, seconds=8.0),
    )


def test_a_trace_has_complete_events_and_names_for_all_processes_and_threads() -> None:
    members = [
        TracedMember(member(1).peer, "a\x1b[31m", spans(), 0.5),
        TracedMember(member(2).peer, "b", spans(), 0.0),
    ]
    trace = json.loads(json.dumps(trace_of("reef", ROUND, members)))
    events = trace["traceEvents"]
    complete = [one for one in events if one["ph"] == "X"]
    metadata = [one for one in events if one["ph"] == "M"]
    assert len(complete) + len(metadata) == len(events)
    for one in complete:
        assert set(one) == {"name", "cat", "ph", "ts", "dur", "pid", "tid"}
        assert one["ts"] >= 0
        assert one["dur"] > 0
    named = {(one["pid"], one["tid"]) for one in metadata if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in complete} <= named
    processes = {one["pid"]: one["args"]["name"] for one in metadata if one["name"] == "process_name"}
    assert processes[0] == "coordinator"
    assert processes[2] == f"b ({member(2).peer[:8]})"
    assert "\x1b" not in processes[1]
    assert [(one["name"], one["ts"], one["dur"]) for one in complete if one["pid"] == 0] == [
        ("work", 500_000, 12_000_000),
        ("gathering", 12_500_000, 1_000_000),
        ("exchange", 13_500_000, 7_000_000),
    ]
    assert [(one["name"], one["tid"], one["ts"]) for one in complete if one["pid"] == 1] == [
        ("compute", 0, 0),
        ("exchange", 0, 12_500_000),
        ("exchange", 1, 12_500_000),
    ]
    assert trace["otherData"]["waited for"] == "round 41 took 12 s longer because b sent at 2 Mbit/s"
    assert trace["otherData"]["clock error in seconds"][processes[1]] == 0.5


def test_spans_beyond_the_round_are_cut() -> None:
    """The round lasted from 500 to 520; a member may have begun it a quarter of that before."""
    told = (
        PhaseSpan(track="training", phase="data", start_s=0.0, seconds=10.0),
        PhaseSpan(track="training", phase="compute", start_s=100.0, seconds=405.0),
        PhaseSpan(track="exchange", phase="exchange", start_s=510.0, seconds=1e6),
        PhaseSpan(track="exchange", phase="packing", start_s=521.0, seconds=1.0),
    )
    events = trace_of("reef", ROUND, [TracedMember(member(1).peer, "a", told, 0.5)])["traceEvents"]
    mine = [(one["name"], one["ts"], one["dur"]) for one in events if one["ph"] == "X" and one["pid"] == 1]
    assert mine == [("compute", 0, 10_500_000), ("exchange", 15_500_000, 10_500_000)]
