from tests.peer.demo.logged import OLD, ONE, STAGES_HOST, ends, holds, joined, stages_log, stages_peers

from shoal.peer.demo.run_log import PeerLog, usual_round_s
from shoal.peer.event_schema import Event


def held(events: list[Event]) -> tuple[int, ...]:
    peer = PeerLog()
    for event in events:
        peer.feed(event)
    return tuple(peer.anchors)


def test_stages_that_a_peer_holds_now() -> None:
    events = stages_peers()["peer-4"]
    assert [held(events[:count]) for count in (1, 2, 3, 4, 5, 6)] == [(), (), (0,), (0,), (), (1,)]
    assert held(joined(0.0, ONE) + holds(0.0, 1, 1, OLD) + joined(5.0, ONE)) == ()


def test_states_of_a_peer() -> None:
    events, peer = stages_peers()["peer-1"], PeerLog()
    seen = [peer.state]
    for event in events:
        peer.feed(event)
        seen.append(peer.state)
    assert seen == ["starting", "syncing", "syncing", "training", "training", "done"]
    peer.state = "killed"
    peer.feed(events[1])
    assert peer.state == "killed", "what it logged before its death may be read after it"


def test_rounds_end_once() -> None:
    log = stages_log()
    for event in STAGES_HOST[:5]:
        assert log.feed_host(event) is event
    both = ends(1010.0, 0, 4.0)
    assert [log.feed_host(event) for event in both] == [None, {k: v for k, v in both[1].items() if k != "stage"}]
    assert log.done == (1, 50)


def test_the_usual_round() -> None:
    assert usual_round_s([10.0, 12.0, 30.0, 33.0, 37.0], [20.0]) == 3.0
    assert usual_round_s([10.0], []) == 0.0
