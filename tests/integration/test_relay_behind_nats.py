"""A run without a single machine that can be reached: two members behind NATs, a host behind a third, and a relay."""

from __future__ import annotations

import pytest
from tests.integration.harness import CALM, ROUNDS_S, SHOAL, START_S, Swarm, eventually, finish, run_toml
from tests.integration.nat_lab import Kind, nat_lab
from tests.integration.test_relays import relay_url

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PUNCHED = "directly, through the walls between"


@pytest.mark.parametrize(("kind", "is_punched"), [(Kind.PORT_RESTRICTED, True), (Kind.SYMMETRIC, False)])
def test_members_and_host_behind_nats_complete_rounds(swarm: Swarm, kind: Kind, is_punched: bool) -> None:
    with nat_lab({"relay": Kind.PUBLIC, "host": Kind.SYMMETRIC, "ann": kind, "bob": kind}) as lab:
        place = ("--bind", f"{lab.address('relay')}:443", "--identity", str(swarm.folder / "relay-key"))
        relay = swarm.command("relay", *lab.inside("relay"), *SHOAL, "relay", *place)
        via = ("--via", relay_url(relay))
        host = swarm.host(run_toml(), launcher=(*lab.inside("host"), *SHOAL), bind="0.0.0.0:0", extra=via)
        assert f"via={lab.address('relay')}:443" in host.invite
        extra = ("--bind", "0.0.0.0:0", "--no-port-mapping")
        members = [swarm.member(host.invite, name, (*lab.inside(name), *CALM), extra=extra) for name in ("ann", "bob")]
        for member in members:
            assert member.event("joined", START_S)["reachable"] is False
            member.says(f"over the relay {lab.address('relay')}:443", START_S)
        for member in members:
            member.committed(after=1, within_s=START_S + ROUNDS_S)
        if is_punched:
            eventually("a direct path", lambda: any(PUNCHED in one.text() for one in members), START_S, swarm.tails)
        else:
            assert not any(PUNCHED in one.text() for one in members)
        finish(host, members)
