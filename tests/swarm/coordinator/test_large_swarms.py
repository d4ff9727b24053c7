"""What is remembered for the sake of large swarms is forgotten as soon as it is wrong; and what is not said twice."""

from tests.swarm.coordinator.test_round_rules import CPU
from tests.swarm.coordinator.world import World, entry, run_file

from shoal.swarm.coordinator.events import MemberJoined, MemberLost
from shoal.swarm.coordinator.membership import Membership
from shoal.swarm.coordinator.round_scope import COUNTED_S, EXACT_MEMBERS, CachedSum, KnownWalls
from shoal.swarm.protocol.messages import CoordinatorToPeerView, PeerToCoordinatorHeartbeat
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, RunView, Verdict
from shoal.swarm.protocol.wire import Envelope, decode, encode

_LETTERS = str.maketrans("0189", "ghij")


def beat(version: int, digest: bytes) -> PeerToCoordinatorHeartbeat:
    return PeerToCoordinatorHeartbeat(
        round=0,
        activity="training",
        anchor_version=version,
        state_digest=digest,
        tokens_done=0,
        tokens_per_s=0.0,
        step_s=0.0,
        loss=None,
        chunks_moved=0,
        bytes_sent=0,
        bytes_received=0,
        bandwidth_bps=0.0,
        roster_version=0,
    )


def test_comings_and_goings_are_seen_at_once() -> None:
    members = Membership()
    for number in range(3):
        members.join(MemberJoined(entry=entry(number), device=CPU), 0.0, 0)
        assert len(members.trainers()) == len(members.roster()) == number + 1
    assert members.roster() is members.roster(), "nobody came or went: not made anew"
    gone = entry(1).peer
    members.lose(MemberLost(peer=gone, reason="silent"))
    assert gone not in members.trainers()
    assert [one.peer for one in members.roster()] == [entry(0).peer, entry(2).peer]
    members.join(MemberJoined(entry=entry(1, 9), device=CPU), 0.0, 0)
    assert members.trainers()[gone] is members.members[gone]


def test_keys_are_looked_up_as_they_are_now() -> None:
    members = Membership()
    ours, theirs = entry(0, 1), entry(1, 1)
    for one in (ours, theirs):
        members.join(MemberJoined(entry=one, device=CPU), 0.0, 0)
    assert members.holder(theirs.certificate.curve_key) == theirs.peer
    assert members.holder(entry(2, 1).certificate.curve_key) is None
    members.lose(MemberLost(peer=theirs.peer, reason="silent"))
    assert members.holder(theirs.certificate.curve_key) is None
    assert members.holder(ours.certificate.curve_key) == ours.peer
    again = entry(1, 2)
    members.join(MemberJoined(entry=again, device=CPU), 0.0, 0)
    assert members.holder(again.certificate.curve_key) == theirs.peer
    assert members.holder(theirs.certificate.curve_key) is None


def test_states_are_seen_at_once() -> None:
    members = Membership()
    peers = [entry(number).peer for number in range(3)]
    for number in range(3):
        members.join(MemberJoined(entry=entry(number), device=CPU), 0.0, 0)
    assert members.common_digest(4) is None
    members.hear(peers[0], beat(4, b"a" * 32), 0, 1.0)
    assert list(members.synced(4, None)) == peers[:1]
    assert members.common_digest(4) == b"a" * 32
    for peer in peers[1:]:
        members.hear(peer, beat(4, b"b" * 32), 0, 1.0)
    assert members.common_digest(4) == b"b" * 32
    assert list(members.synced(4, b"a" * 32)) == peers[:1]
    members.hear(peers[0], beat(5, b"a" * 32), 0, 2.0)
    assert list(members.synced(4, None)) == peers[1:]
    members.lose(MemberLost(peer=peers[2], reason="silent"))
    assert list(members.synced(4, None)) == peers[1:2]


def test_a_tally_is_exact_in_small_swarms_and_recent_in_large_ones() -> None:
    small, large = CachedSum(), CachedSum()
    for tokens in (1, 2, 3):
        assert small.take(0, 10.0, EXACT_MEMBERS, lambda tokens=tokens: tokens) == tokens
        assert large.take(0, 10.0, EXACT_MEMBERS + 1, lambda tokens=tokens: tokens) == 1
    assert large.take(0, 10.0 + COUNTED_S, EXACT_MEMBERS + 1, lambda: 4) == 4
    assert large.take(1, 10.0 + COUNTED_S, EXACT_MEMBERS + 1, lambda: 0) == 0, "another round"
    assert large.take(1, 5.0, EXACT_MEMBERS + 1, lambda: 7) == 7, "a clock that was set back"


def test_walls_are_looked_for_at_once_in_small_swarms_and_now_and_then_in_large_ones() -> None:
    few, many = KnownWalls(), KnownWalls()
    for number in range(3):
        found = {str(number): "no way"}
        assert few.take(10.0, False, lambda found=found: found) == found
        assert many.take(10.0, True, lambda found=found: found) == {"0": "no way"}
    assert many.take(10.0 + COUNTED_S, True, dict) == {}
    assert many.take(5.0, True, lambda: {"7": "no way"}) == {"7": "no way"}, "a clock that was set back"


def test_a_verdict_that_a_member_knows_is_not_told_again() -> None:
    world = World(run_file(), members=2)
    while world.scope.verdict is None:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    machine, peer, newest = world.machine, world.workers[0].peer, world.scope.verdict.chain

    def told(chain: bytes | None) -> RunView:
        return machine.scope.view(peer, world.now_s, machine.scope.membership.roster_version, chain)

    for chain in (None, b"o" * 32):
        assert told(chain).verdict is machine.scope.verdict
    known = told(newest)
    assert (known.verdict, known.verdict_chain) == (None, newest)
    assert told(None).model_copy(update={"verdict": None}) == known


def test_what_a_known_verdict_of_a_thousand_members_saves() -> None:
    peers = sorted(f"{index:016x}".translate(_LETTERS) for index in range(1000))
    members = tuple(PlanMember(peer=peer, weight_tokens=10**6) for peer in peers)
    parts = tuple(Part(owner=at, stand_ins=(1, 2, 3), start=at * 4096, stop=at * 4096 + 4096) for at in range(1000))
    world = World(run_file(), members=1)
    view = world.scope.view(world.workers[0].peer, world.now_s, world.scope.membership.roster_version)
    plan = RoundPlan(
        round=0, anchor_version=0, state_digest=bytes(32), chunk_elements=4096, members=members, parts=parts
    )
    verdict = Verdict(
        round=0,
        committed=True,
        reason="",
        anchor_version=1,
        plan=plan,
        digests=(bytes(32),) * 1000,
        tokens=10**9,
        tokens_total=10**9,
        loss=1.0,
        ended_s=1.7e9,
        sent_bytes=0,
        previous_chain=bytes(32),
        chain=bytes(32),
        signature=bytes(64),
    )
    told = CoordinatorToPeerView(view=view.model_copy(update={"verdict": verdict, "verdict_chain": verdict.chain}))
    known = CoordinatorToPeerView(view=view.model_copy(update={"verdict_chain": verdict.chain}))
    assert len(encode(Envelope("reply", 1, told))) > 100_000
    assert len(encode(Envelope("reply", 1, known))) < 1_000


def test_members_that_are_told_the_same_share_the_bytes() -> None:
    """A plan waits in memory once for all that it is pushed to; whoever is told anything else gets bytes of its own."""
    world = World(run_file(), members=3)
    scope, peers = world.scope, [worker.peer for worker in world.workers[:3]]

    def told(peer: str, roster_version: int = scope.membership.roster_version) -> bytes:
        view = CoordinatorToPeerView(view=scope.view(peer, world.now_s, roster_version))
        data = encode(Envelope("notice", 0, view))
        assert decode(data).message == view
        return data

    first = told(peers[0])
    assert told(peers[1]) is first
    assert told(peers[0], 1) != first, "another roster"
    world.beat(world.workers[2], anchor_version=7)
    assert told(peers[2]) != first, "it must resync"
    assert told(peers[1]) == first
    scope.log.announcements += 1
    assert told(peers[1]) != first
