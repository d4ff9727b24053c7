"""Who is named for a round that took longer, in which phase, and why; and that nobody is where all were alike."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median_low

import pytest
from tests.fakes.grids import plan_of

from shoal.compression.formats import named_format_map
from shoal.swarm.coordinator.critical_path import (
    LinkSeen,
    MemberSeen,
    ScopeSeen,
    _above_others,
    critical_path,
    links_seen,
)
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.timing import MemberTimes
from shoal.swarm.protocol.types import Delivery, PhaseTimes, WorkPhase

PEERS = [one * 16 for one in "abcd"]
X = PEERS[2]


def times(compute: float = 40.0, **phases: float) -> MemberTimes:
    whole = PhaseTimes(compute=compute, **phases)
    return MemberTimes(training=whole, exchange=PhaseTimes(packing=whole.packing, exchange=whole.exchange))


def member(peer: str, said: MemberTimes | None = None, heard_s: float = 99.0) -> MemberSeen:
    return MemberSeen(f"name-{peer[0]}", heard_s, joined_s=-50.0, times=said or times())


def quiet() -> ScopeSeen:
    """A round of 100 s: closed at 90, planned at 91, over at 100."""
    return ScopeSeen(
        began_s=0.0,
        closes_s=90.0,
        planned_s=91.0,
        ended_s=100.0,
        heartbeat_s=5.0,
        members={peer: member(peer) for peer in PEERS},
        ready_s={peer: 90.0 + 0.3 * number for number, peer in enumerate(PEERS)},
        reported_s={peer: 99.0 + 0.2 * number for number, peer in enumerate(PEERS)},
        links={peer: LinkSeen(send_s=6.0 + number, send_bps=1e8) for number, peer in enumerate(PEERS)},
        usual_exchange_s=8.0,
    )


def late_ready(said: MemberTimes | None, phase: WorkPhase = "waiting", **changes: float) -> ScopeSeen:
    """``X`` was ready 12 s after the others."""
    one = replace(quiet(), planned_s=103.0, ended_s=112.0)
    late = replace(member(X, said, heard_s=101.0), phase=phase, times=said, **changes)
    members = {peer: replace(of, heard_s=111.0) for peer, of in one.members.items()} | {X: late}
    ready_s = dict(one.ready_s) | {X: 102.3}
    return replace(one, members=members, ready_s=ready_s, reported_s=dict.fromkeys(PEERS, 111.0))


def test_nobody_is_named_in_a_quiet_round() -> None:
    assert critical_path(41, [quiet()]) is None
    assert critical_path(41, [replace(quiet(), members={}, ready_s={}, reported_s={}, links={})]) is None
    assert critical_path(41, []) is None


def test_a_slow_upload_is_named_with_its_rate() -> None:
    links = dict(quiet().links) | {X: LinkSeen(send_s=20.0, send_bps=2e6)}
    path = critical_path(41, [replace(quiet(), ended_s=111.0, reported_s=dict.fromkeys(PEERS, 110.0), links=links)])
    assert path is not None
    assert (path.peer, path.phase, path.cause, path.bps, path.is_claimed) == (X, "exchange", "slow upload", 2e6, False)
    assert path.extra_s == 13.0
    assert path.text == "round 41 took 13 s longer because name-c (cccccccc) sent at 2 Mbit/s"


def test_a_slow_download_is_named_where_others_received_faster_from_the_same_senders() -> None:
    links = {peer: LinkSeen(receive_s=2.0, receive_bps=1e8) for peer in PEERS}
    links[X] = LinkSeen(receive_s=14.0, receive_bps=3e6, receives_slowly=True)
    seen = replace(quiet(), ended_s=111.0, reported_s=dict.fromkeys(PEERS, 110.0), links=links)
    path = critical_path(41, [seen])
    assert path is not None
    assert (path.peer, path.cause, path.extra_s, path.bps) == (X, "slow download", 12.0, 3e6)


def test_a_report_that_comes_last_is_of_a_slow_download() -> None:
    seen = replace(quiet(), ended_s=111.0, reported_s=dict(quiet().reported_s) | {X: 111.0})
    seen = replace(seen, members=dict(seen.members) | {X: member(X, heard_s=110.0)})
    path = critical_path(41, [seen])
    assert path is not None
    assert (path.peer, path.phase, path.cause) == (X, "exchange", "slow download")
    assert path.extra_s == pytest.approx(11.8)


def test_a_relay_is_named_where_a_link_over_it_is_slow() -> None:
    members = dict(quiet().members) | {X: replace(member(X), is_relayed=True)}
    assert critical_path(41, [replace(quiet(), members=members)]) is None
    links = dict(quiet().links) | {X: LinkSeen(send_s=20.0, send_bps=2e6)}
    seen = replace(quiet(), ended_s=111.0, reported_s=dict.fromkeys(PEERS, 110.0), links=links, members=members)
    path = critical_path(41, [seen])
    assert path is not None
    assert (path.peer, path.cause) == (X, "relay")
    assert path.text == "round 41 took 13 s longer because name-c (cccccccc) is reached over a relay at 2 Mbit/s"


@pytest.mark.parametrize(
    ("said", "phase", "cause"),
    [
        (times(compute=53.0), "compute", "slow device"),
        (times(data=12.0), "data", "slow data"),
        (times(packing=11.0), "packing", "slow packing"),
        (times(applying=12.5), "applying", "slow applying"),
        (times(checkpoint=9.0), "checkpoint", "slow checkpoint"),
    ],
)
def test_who_was_ready_late_says_itself_why(said: MemberTimes, phase: str, cause: str) -> None:
    path = critical_path(41, [late_ready(said)])
    assert path is not None
    assert (path.peer, path.phase, path.cause, path.is_claimed) == (X, phase, cause, True)
    assert path.extra_s == pytest.approx(12.0, abs=0.5)


def test_without_an_account_the_last_heartbeat_says_why() -> None:
    path = critical_path(41, [late_ready(None, phase="data")])
    assert path is not None
    assert (path.peer, path.cause, path.is_claimed) == (X, "slow data", True)
    path = critical_path(41, [late_ready(None, phase="waiting")])
    assert path is not None
    assert (path.peer, path.cause, path.is_claimed) == (X, "unknown", False)


def test_what_a_member_says_never_puts_a_delay_on_another() -> None:
    liar = replace(quiet().members[PEERS[0]], times=times(compute=9e8, exchange=9e8))
    assert critical_path(41, [replace(quiet(), members=dict(quiet().members) | {PEERS[0]: liar})]) is None
    seen = late_ready(times(compute=53.0))
    seen = replace(seen, members=dict(seen.members) | {PEERS[0]: liar})
    path = critical_path(41, [seen])
    assert path is not None
    assert (path.peer, path.cause) == (X, "slow device")


def test_who_sends_no_heartbeats_has_stopped() -> None:
    seen = late_ready(None)
    stopped = replace(seen, members=dict(seen.members) | {X: member(X, heard_s=80.0)})
    path = critical_path(41, [stopped])
    assert path is not None
    assert (path.peer, path.cause) == (X, "stopped")
    gone = replace(seen, members=dict(seen.members) | {X: replace(member(X, heard_s=101.0), is_gone=True)})
    path = critical_path(41, [gone])
    assert path is not None
    assert (path.peer, path.cause) == (X, "stopped")


def test_a_member_that_stops_in_the_exchange_costs_all_that_it_took_longer_than_usual() -> None:
    members = {peer: replace(of, heard_s=129.0) for peer, of in quiet().members.items()} | {X: member(X, heard_s=92.0)}
    reported_s = dict.fromkeys(PEERS, 128.0) | {X: 130.0}
    path = critical_path(41, [replace(quiet(), ended_s=130.0, members=members, reported_s=reported_s)])
    assert path is not None
    assert (path.peer, path.phase, path.cause, path.extra_s) == (X, "exchange", "stopped", 31.0)


def test_who_is_there_and_does_not_deliver_cannot_be_reached() -> None:
    members = {peer: replace(of, heard_s=129.0) for peer, of in quiet().members.items()}
    reported_s = dict.fromkeys(PEERS, 129.0)
    seen = replace(quiet(), ended_s=130.0, members=members, reported_s=reported_s, undelivered=(X,))
    path = critical_path(41, [seen])
    assert path is not None
    assert (path.peer, path.cause, path.extra_s) == (X, "unreachable", 31.0)


def test_who_has_joined_in_this_round_joined_late() -> None:
    path = critical_path(41, [late_ready(times(compute=10.0), joined_s=70.0)])
    assert path is not None
    assert (path.peer, path.cause) == (X, "late join")


def test_the_slow_one_of_an_exact_batch_is_named_once_it_is_more_than_a_step() -> None:
    worked_s = dict.fromkeys(PEERS, 80.0) | {X: 89.0}
    assert critical_path(41, [replace(quiet(), worked_s=worked_s)]) is None  # heartbeats come every 5 s
    path = critical_path(41, [replace(quiet(), worked_s=worked_s | {X: 95.0})])
    assert path is not None
    assert (path.peer, path.phase, path.cause, path.extra_s) == (X, "compute", "slow device", 15.0)


def stages(*compute_s: float) -> list[ScopeSeen]:
    """One replica a stage."""
    return [
        replace(
            quiet(),
            stage=stage,
            members={peer: member(peer, times(compute=seconds, waiting=90.0 - seconds))},
            ready_s={peer: 90.0},
            reported_s={peer: 99.0},
            links={},
        )
        for stage, (peer, seconds) in enumerate(zip(PEERS, compute_s, strict=True))
    ]


def test_the_slowest_replica_of_a_pipeline_is_named_with_its_stage() -> None:
    assert critical_path(41, stages(70.0, 65.0, 80.0, 75.0)) is None
    path = critical_path(41, stages(30.0, 35.0, 85.0, 33.0))
    assert path is not None
    assert (path.peer, path.stage, path.phase, path.cause, path.extra_s) == (X, 2, "compute", "slow device", 50.0)
    assert path.text == "round 41 took 50 s longer because in stage 2 name-c (cccccccc) computed slowly"


def test_the_longest_wait_is_named() -> None:
    slow_link = dict(quiet().links) | {PEERS[0]: LinkSeen(send_s=26.0, send_bps=1e6)}
    seen = replace(late_ready(times(compute=53.0)), links=slow_link)
    path = critical_path(41, [replace(seen, ended_s=130.0)])
    assert path is not None
    assert (path.peer, path.cause) == (PEERS[0], "slow upload")


def test_reports_of_deliveries_that_nobody_owed_change_nothing() -> None:
    """Of a grid's other row, and of the reporter itself."""
    plan = plan_of([1] * 6, [range(3), range(3, 6)], 6 * 2**18, chunk=2**18)
    said = tuple(Delivery(member=one, bps=1.0) for one in range(6))
    digests = (None,) * len(plan.parts)
    wild = PeerToCoordinatorRoundReport(round=plan.round, digests=digests, dropped=(), deliveries=said, trouble="")
    links = links_seen(plan, {plan.members[0].peer: wild, "nobody": wild}, named_format_map("float32"))
    assert not any(link.send_s for link in links.values())
    assert not any(link.receives_slowly for link in links.values())


def test_no_rate_that_is_reported_is_too_large_to_tell() -> None:
    seen = replace(quiet(), ended_s=111.0, reported_s=dict(quiet().reported_s) | {X: 111.0})
    seen = replace(
        seen, members=dict(seen.members) | {X: member(X, heard_s=110.0)}, links={X: LinkSeen(receive_bps=9e18)}
    )
    path = critical_path(41, [seen])
    assert path is not None
    assert path.bps == 1e18


def test_what_a_member_takes_longer_is_by_the_median_of_the_others() -> None:
    draw = random.Random(1)
    for size in (1, 2, 3, 4, 7, 8):
        seconds = {str(one): float(draw.randrange(5)) for one in range(size)}
        found = _above_others(seconds)
        for peer, one in seconds.items():
            others = [other for name, other in seconds.items() if name != peer]
            assert found[peer] == (max(0.0, one - median_low(others)) if others else 0.0)
