"""Records that are checked beyond the ranges of their fields."""

import pytest
from pydantic import TypeAdapter, ValidationError

from shoal.swarm.protocol.types import Address, Addresses, ClaimedAddresses, MemberStatus


def test_a_newcomer_may_leave_the_host_of_its_address_to_the_coordinator() -> None:
    claimed: TypeAdapter[tuple[Address, ...]] = TypeAdapter(ClaimedAddresses)
    member: TypeAdapter[tuple[Address, ...]] = TypeAdapter(Addresses)
    hostless = (Address(host="", control_port=1, data_port=2),)
    assert claimed.validate_python(hostless) == hostless
    with pytest.raises(ValidationError, match="has a host"):
        member.validate_python(hostless)


def test_a_peer_has_a_data_port() -> None:
    for kind in (ClaimedAddresses, Addresses):
        with pytest.raises(ValidationError, match="has a data port"):
            TypeAdapter(kind).validate_python((Address(host="host", control_port=1),))


def test_an_address_is_written_as_host_and_control_port() -> None:
    assert str(Address(host="::1", control_port=1, data_port=2)) == "[::1]:1"


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_no_record_holds_numbers_that_are_not_finite(number: float) -> None:
    with pytest.raises(ValidationError):
        MemberStatus.model_validate({"share": number})
