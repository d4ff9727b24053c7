"""A run without a single machine that can be reached: two members behind NATs, a host behind a third, and a relay."""

from __future__ import annotations

import pytest
from tests.integration.harness import CALM, ROUNDS_S, SHOAL, START_S, Host, Swarm, eventually, finish, run_toml
from tests.integration.nat_lab import Kind, NatLab, nat_lab
from tests.integration.test_pipeline import MEMORY, STAGES, TOML, check, launcher, span
from tests.integration.test_relays import relay_url

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PUNCHED = "directly, through the walls between"


BEHIND = ("--bind", "0.0.0.0:0", "--no-port-mapping")


def hosting(swarm: Swarm, lab: NatLab, toml: str) -> Host:
    """A relay on port 443, and a host behind a NAT that is reached over it."""
    place = ("--bind", f"{lab.address('relay')}:443", "--identity", str(swarm.folder / "relay-key"))
    relay = swarm.command("relay", *lab.inside("relay"), *SHOAL, "relay", *place)
    via = ("--via", relay_url(relay))
    host = swarm.host(toml, launcher=(*lab.inside("host"), *SHOAL), bind="0.0.0.0:0", extra=via)
    assert f"via={lab.address('relay')}:443" in host.invite
    return host


@pytest.mark.parametrize(("kind", "is_punched"), [(Kind.PORT_RESTRICTED, True), (Kind.SYMMETRIC, False)])
def test_members_and_host_behind_nats_complete_rounds(swarm: Swarm, kind: Kind, is_punched: bool) -> None:
    with nat_lab({"relay": Kind.PUBLIC, "host": Kind.SYMMETRIC, "ann": kind, "bob": kind}) as lab:
        host = hosting(swarm, lab, run_toml())
        members = [swarm.member(host.invite, name, (*lab.inside(name), *CALM), extra=BEHIND) for name in ("ann", "bob")]
        for member in members:
            assert member.event("joined", START_S)["reachable"] is False
            member.says(f"over the relay {lab.address('relay')}:443", START_S)
        for member in members:
            member.committed(after=1, within_s=START_S + ROUNDS_S)
        if is_punched:
            eventually("a direct path", lambda: any(PUNCHED in one.text() for one in members), START_S, swarm.tails)
            for member in members:
                member.committed(after=member.last_round())
            lab.part("ann", "bob")  # the direct path drops in use; the relay stays
            lab.part("bob", "ann")
            last = max(member.last_round() for member in members)
            for member in members:
                member.committed(after=last + 2)
        else:
            assert not any(PUNCHED in one.text() for one in members)
        finish(host, members)


def test_a_pipeline_of_three_stages_behind_nats_equals_one_process(swarm: Swarm) -> None:
    """Each stage's micro-batches pass to the next one over the relay."""
    names = ("ann", "bob", "cat")
    with nat_lab({"relay": Kind.PUBLIC, "host": Kind.SYMMETRIC} | dict.fromkeys(names, Kind.SYMMETRIC)) as lab:
        host = hosting(swarm, lab, TOML)
        extra = ("--max-memory", MEMORY, *BEHIND)
        members = [swarm.member(host.invite, name, (*lab.inside(name), *launcher()), extra=extra) for name in names]
        assert sorted(span(member)[0] for member in members) == list(range(STAGES))
        check(host, members)
        assert not host.events("member_lost", reason="silent")
