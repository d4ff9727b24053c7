from dataclasses import fields, replace
from typing import Any

import pytest
from tests.fakes.grids import plan_of

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.messages import MadePart, PeerToCoordinatorRoundReady, PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.statements import (
    ContributionStatement,
    PartStatement,
    PlanStatement,
    RoundName,
    check_ready,
    check_report,
    has_signed,
    plan_digest,
    ranges_of,
    unsigned_contributions,
)

NAME = RoundName(bytes(range(32)), None, 3)
STATEMENTS: list[Any] = [
    ContributionStatement(NAME, 7, b"s" * 32, 640, b"norms", b"r" * 32),
    PlanStatement(NAME, b"p" * 32),
    PartStatement(NAME, b"p" * 32, 1, b"d" * 32, ((4, 9),)),
]


def others(one: Any) -> Any:
    """Yield the statement with another value in each field, one at a time."""
    for field in fields(one):
        match getattr(one, field.name):
            case RoundName() as name:
                yield from (replace(one, name=other) for other in (replace(name, stage=0), replace(name, round=4)))
                yield replace(one, name=replace(name, run_hash=bytes(32)))
            case bytes() as value:
                yield replace(one, **{field.name: value[:-1] + b"?"})
            case int() as value:
                yield replace(one, **{field.name: value + 1})
            case tuple() as value:
                yield replace(one, **{field.name: (*value, (11, 12))})


@pytest.mark.parametrize("one", STATEMENTS, ids=lambda one: type(one).__name__)
def test_a_signature_is_for_one_statement_alone(one: Any) -> None:
    me = Identity.generate()
    signature = me.sign(one.bytes_to_sign())
    assert has_signed(me.public_key, me.peer_id, signature, one.bytes_to_sign())
    changed = list(others(one))
    assert len(changed) == len(fields(one)) + 2
    for other in [*changed, *(each for each in STATEMENTS if each is not one)]:
        assert not has_signed(me.public_key, me.peer_id, signature, other.bytes_to_sign())


def test_another_identity_has_not_signed() -> None:
    me, other, data = Identity.generate(), Identity.generate(), STATEMENTS[0].bytes_to_sign()
    assert not has_signed(other.public_key, other.peer_id, me.sign(data), data)
    assert not has_signed(me.public_key, other.peer_id, me.sign(data), data), "a key that is not that peer's"


def signed_plan(identities: list[Identity]) -> RoundPlan:
    plan = plan_of([10, 20, 30], [[0, 1, 2]])
    members = []
    for member, one in zip(plan.members, sorted(identities, key=lambda one: one.peer_id), strict=True):
        named = member.model_copy(update={"peer": one.peer_id, "identity_key": one.public_key, "root": b"r" * 32})
        data = ContributionStatement.of(NAME, plan, named).bytes_to_sign()
        members.append(named.model_copy(update={"signature": one.sign(data)}))
    return plan.model_copy(update={"members": tuple(members)})


@pytest.mark.parametrize(
    "change", [{"root": b"q" * 32}, {"weight_tokens": 11}, {"norms": b"other"}, {"signature": bytes(64)}], ids=str
)
def test_what_a_host_says_for_a_member_has_no_signature(change: dict[str, Any]) -> None:
    plan = signed_plan([Identity.generate() for _ in range(3)])
    assert list(unsigned_contributions(NAME, plan)) == []
    assert list(unsigned_contributions(NAME, plan.model_copy(update={"anchor_version": 2}))) == [0, 1, 2]
    members = list(plan.members)
    members[1] = members[1].model_copy(update=change)
    assert list(unsigned_contributions(NAME, plan.model_copy(update={"members": tuple(members)}))) == [1]


def test_a_contribution_is_signed_unless_it_has_no_weight() -> None:
    me = Identity.generate()
    certificate = me.certify(CurveKeys.fresh())
    ready = PeerToCoordinatorRoundReady(
        round=3, anchor_version=7, state_digest=b"s" * 32, weight_tokens=640, ranges=(), loss=None, root=b"r" * 32
    )
    signed = ready.model_copy(
        update={"signature": me.sign(ContributionStatement.of_ready(NAME, ready).bytes_to_sign())}
    )
    check_ready(NAME, signed, certificate)
    check_ready(NAME, ready.model_copy(update={"weight_tokens": 0}), certificate)
    for other in (ready, signed.model_copy(update={"root": b"q" * 32}), signed.model_copy(update={"weight_tokens": 1})):
        with pytest.raises(WireError, match="signed"):
            check_ready(NAME, other, certificate)


def test_factor_and_row_are_the_plans_own_decisions() -> None:
    """They are made after the members have signed."""
    plan = signed_plan([Identity.generate() for _ in range(3)])
    decided = plan.model_copy(update={"members": tuple(one.model_copy(update={"factor": 0.5}) for one in plan.members)})
    assert list(unsigned_contributions(NAME, decided)) == []
    assert plan_digest(decided) != plan_digest(plan)


def made_part(plan: RoundPlan, part: int, one: Identity, *chunks: tuple[int, int]) -> PeerToCoordinatorRoundReport:
    """A report of all parts by a member that says that it has made those chunks of one."""
    digests = tuple(bytes([number]) * 32 for number in range(len(plan.parts)))
    made = MadePart(part=part, chunks=chunks, signature=bytes(64))
    report = PeerToCoordinatorRoundReport(round=plan.round, digests=digests, dropped=(), trouble="")
    statement = PartStatement.of_report(PlanStatement(NAME, plan_digest(plan)), report, made)
    made = made.model_copy(update={"signature": one.sign(statement.bytes_to_sign())})
    return report.model_copy(update={"made": (made,)})


def test_a_reduced_part_is_signed_by_who_could_have_made_it() -> None:
    identities = sorted((Identity.generate() for _ in range(3)), key=lambda one: one.peer_id)
    plan = signed_plan(identities)
    parts = tuple(one.model_copy(update={"stand_ins": ((one.owner + 1) % 3,)}) for one in plan.parts)
    plan = plan.model_copy(update={"parts": parts})
    statement = PlanStatement(NAME, plan_digest(plan))
    first, stop = parts[1].start // plan.chunk_elements, parts[1].stop // plan.chunk_elements
    owner, stand_in, other = (identities[(parts[1].owner + step) % 3] for step in range(3))

    def check(one: Identity, report: PeerToCoordinatorRoundReport) -> None:
        check_report(statement, plan, report, one.certify(CurveKeys.fresh()))

    check(owner, made_part(plan, 1, owner, (first, stop)))
    check(stand_in, made_part(plan, 1, stand_in, (first, first + 1), (stop - 1, stop)))
    fine = made_part(plan, 1, owner, (first, stop))
    for one, report, why in (
        (other, made_part(plan, 1, other, (first, stop)), "neither"),
        (owner, made_part(plan, 1, owner, (first, stop + 1)), "not the part's"),
        (owner, made_part(plan, 1, owner, (first - 1, stop)), "not the part's"),
        (owner, made_part(plan, 1, owner, (stop - 1, stop), (first, stop)), "not the part's"),
        (owner, made_part(plan, 1, owner, (first, first), (first, stop)), "not the part's"),
        (owner, fine.model_copy(update={"made": fine.made * 2}), "each once"),
        (stand_in, fine, "signed"),
        (owner, fine.model_copy(update={"digests": (b"?" * 32,) * len(parts)}), "signed"),
        (owner, fine.model_copy(update={"digests": (None,) * len(parts)}), "does not have"),
        (owner, fine.model_copy(update={"digests": ()}), "does not have"),
        (owner, fine.model_copy(update={"made": (fine.made[0].model_copy(update={"part": 99}),)}), "does not have"),
    ):
        with pytest.raises(WireError, match=why):
            check(one, report)
    other_plan = plan.model_copy(update={"rho": 1.0})
    with pytest.raises(WireError, match="signed"):
        check_report(PlanStatement(NAME, plan_digest(other_plan)), other_plan, fine, owner.certify(CurveKeys.fresh()))


def test_ranges_of_chunks() -> None:
    assert ranges_of([]) == ()
    assert ranges_of([3, 4, 5, 8, 10, 11]) == ((3, 6), (8, 9), (10, 12))
