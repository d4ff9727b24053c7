from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError
from tests.fakes.grids import plan_of
from tests.swarm.samples import records

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import chain_hash, check_verdict, genesis, signed_bytes

SIGNER = Identity.generate()


def signed(verdict: Verdict) -> Verdict:
    chain = chain_hash(verdict)
    return verdict.model_copy(update={"chain": chain, "signature": SIGNER.sign(signed_bytes(chain))})


VERDICT = signed(
    Verdict(
        round=3,
        committed=False,
        reason="nobody came",
        anchor_version=2,
        plan=None,
        digests=(),
        tokens=0,
        tokens_total=50,
        loss=None,
        ended_s=1.7e9,
        sent_bytes=0,
        previous_chain=genesis(b"r" * 32),
        chain=bytes(32),
        signature=b"",
    )
)


def test_makers_are_members_of_the_plan() -> None:
    plan, maker = plan_of([1, 1], [[0, 1]]), {"member": 1, "chunks": ((0, 1),), "signature": bytes(64)}
    committed = VERDICT.model_dump() | {"plan": plan.model_dump(), "digests": (bytes(32),)}
    assert Verdict.model_validate(committed | {"makers": (maker,)}).makers[0] is not None
    for makers in ((maker, maker), (maker | {"member": 2},)):
        with pytest.raises(ValidationError, match="members of the plan"):
            Verdict.model_validate(committed | {"makers": makers})


@given(records(Verdict))
def test_signed_verdicts_pass(verdict: Verdict) -> None:
    check_verdict(signed(verdict), SIGNER.public_key)


@pytest.mark.parametrize(
    "change",
    [
        {"round": 4},
        {"committed": True},
        {"reason": ""},
        {"anchor_version": 3},
        {"digests": (bytes(32),)},
        {"tokens": 1},
        {"tokens_total": 51},
        {"loss": 0.0},
        {"ended_s": 1.7e9 + 1},
        {"sent_bytes": 1},
        {"previous_chain": bytes(32)},
        {"chain": bytes(32)},
    ],
)
def test_every_field_is_in_the_hash(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=r"round \d does not match its own hash"):
        check_verdict(VERDICT.model_copy(update=change), SIGNER.public_key)


@pytest.mark.parametrize(
    "signature",
    [b"", bytes(64), Identity.generate().sign(signed_bytes(VERDICT.chain))],
    ids=["none", "zeros", "a stranger's"],
)
def test_only_the_coordinator_signs(signature: bytes) -> None:
    with pytest.raises(WireError, match="round 3 is not signed by the coordinator"):
        check_verdict(VERDICT.model_copy(update={"signature": signature}), SIGNER.public_key)


def test_the_signature_is_over_more_than_the_hash() -> None:
    with pytest.raises(WireError):
        check_verdict(VERDICT.model_copy(update={"signature": SIGNER.sign(VERDICT.chain)}), SIGNER.public_key)


def test_runs_have_their_own_beginning() -> None:
    assert genesis(b"a" * 32) != genesis(b"b" * 32)
    assert len(genesis(b"a" * 32)) == 32
