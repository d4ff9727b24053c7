"""From which size on, and how, a round's members make a grid."""

from tests.swarm.coordinator.world import CPU, INITIAL, entry, peer_name

from shoal.swarm.coordinator.grouping import Rules, lay_out, plan_round
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import MAX_MEMBERS, MAX_STAND_INS
from shoal.swarm.protocol.wire import MAX_MESSAGE_BYTES, _packb


def plan(
    members: int, group_size: int, number: int = 3, seed: int = 0, slow: frozenset[int] = frozenset()
) -> RoundPlan:
    ready = PeerToCoordinatorRoundReady(
        round=number, anchor_version=2, state_digest=INITIAL, weight_tokens=10, ranges=(), loss=None
    )
    known = {peer_name(one): Member(entry(one), CPU, 0.0, barred_rounds=int(one in slow)) for one in range(members)}
    made = plan_round(number, 2, 2_000_000, dict.fromkeys(known, ready), known, Rules(group_size, seed))
    assert made is not None
    return made


def rows(made: RoundPlan) -> list[int]:
    return [member.row for member in made.members]


def test_up_to_the_group_size_one_flat_group() -> None:
    made = plan(16, 16)
    assert set(rows(made)) == {0}
    assert made.columns == ()
    assert len(made.parts) == 16
    assert all(len(part.stand_ins) == MAX_STAND_INS for part in made.parts)


def test_one_that_claims_next_to_nothing_does_not_shrink_everybodys_chunks() -> None:
    def chunk(*mbps: float) -> int:
        return lay_out(2**26, [1e6 * one for one in mbps], [True] * len(mbps), Rules(16, 0)).chunk_elements

    fast = chunk(1000, 1000, 1000, 1000)
    assert chunk(1000, 1000, 1000, 1e-6) == chunk(1000, 1e-6) == fast
    assert chunk(1000, 1000, 1000, 60) < fast
    assert chunk(10, 10, 10, 10) < chunk(1000, 1000, 1000, 60)


def test_what_a_codec_packs_into_a_chunk_is_one() -> None:
    able = [True] * 4
    assert lay_out(2**27, [1e9] * 4, able, Rules(16, 0)).chunk_elements == 2**20
    assert lay_out(2**27, [1e9] * 4, able, Rules(16, 0, 2**22)).chunk_elements == 2**22
    assert lay_out(2**27, [4e8] * 4, able, Rules(16, 0, 2**22)).chunk_elements <= 2**20, "a link is busy with it"


def test_more_make_a_grid_whose_stand_ins_are_the_other_row_reducers() -> None:
    made = plan(17, 16)
    assert sorted(rows(made).count(row) for row in range(4)) == [4, 4, 4, 5]
    assert len(made.columns) == 5
    assert RoundPlan.model_validate(made.model_dump()) == made
    for part in made.parts:
        assert {part.owner, *part.stand_ins} == set(made.row_reducers(part))
    assert made.parts[0].start == 0
    assert made.parts[-1].stop == 2_000_000


def test_any_two_runs_of_the_planner_agree_and_every_round_has_another_grid() -> None:
    assert plan(16, 8) == plan(16, 8)
    assert len({str(rows(plan(16, 8, number=number))) for number in range(20)}) == 20
    assert len({str(rows(plan(16, 8, seed=seed))) for seed in range(20)}) == 20


def test_who_cannot_deliver_reduces_no_row() -> None:
    for seed in range(10):
        made = plan(12, 4, seed=seed, slow=frozenset((0, 1, 2, 3)))
        slow = {index for index, member in enumerate(made.members) if member.peer in map(peer_name, range(4))}
        assert not slow & {row_reducer for column in made.columns for row_reducer in column}
        assert not slow & {part.owner for part in made.parts}


def test_the_largest_plans_can_be_sent() -> None:
    """Also where groups are so small that columns are far longer than rows."""
    for group_size in (2, 3, 5, 31, 32):
        made = lay_out(2**30, [None] * MAX_MEMBERS, [True] * MAX_MEMBERS, Rules(group_size, 0))
        columns = _packb([list(column) for column in made.columns])
        parts = _packb([part.model_dump() for part in made.parts])
        assert len(made.parts) <= 2 * MAX_MEMBERS
        assert len(columns) + len(parts) < MAX_MESSAGE_BYTES / 20
