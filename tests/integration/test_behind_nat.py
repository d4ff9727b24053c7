"""Members behind real NATs: roles follow who can meet whom, and everybody is told at once what does not work."""

from __future__ import annotations

import pytest
from tests.integration.harness import CALM, ROUNDS_S, SHOAL, START_S, Host, Member, Swarm, eventually, run_toml
from tests.integration.nat_lab import Kind, NatLab, nat_lab
from tests.integration.test_relays import relay_url

pytestmark = [pytest.mark.integration, pytest.mark.slow]

AT_ONCE_S = 20.0
"""For what is said as soon as it is known, within a heartbeat or two."""


def hosting(swarm: Swarm, lab: NatLab, toml: str) -> Host:
    """A host without a relay: what cannot be met directly is not met."""
    launcher, bind = (*lab.inside("host"), *SHOAL), f"{lab.address('host')}:0"
    return swarm.host(toml, launcher=launcher, bind=bind, extra=("--no-relay",))


def joined(swarm: Swarm, lab: NatLab, host: Host, name: str, *, port: int = 0, advertise: str = "") -> Member:
    """``port``: its control port, for ports that are forwarded."""
    extra = ["--bind", f"0.0.0.0:{port}"]
    extra += ["--advertise", advertise] if advertise else []
    return swarm.member(host.invite, name, (*lab.inside(name), *CALM), extra=extra)


def test_two_behind_nats_and_then_one_that_can_be_reached(swarm: Swarm) -> None:
    """Alone behind walls, one goes on and both are told why; a public member brings them together. The router of
    "half" forwards the first of two ports only."""
    kinds = {"host": Kind.PUBLIC, "ann": Kind.SYMMETRIC, "half": Kind.PORT_RESTRICTED, "pub": Kind.PUBLIC}
    with nat_lab(kinds) as lab:
        lab.forward("half", 6000)
        host = hosting(swarm, lab, run_toml(max_s=2.0, patience_s=6.0))
        half = joined(swarm, lab, host, "half", port=6000, advertise=f"{lab.outside('half')}:6000")
        assert half.event("joined", START_S)["reachable"] is False
        half.says("its control port answers, but its data port", AT_ONCE_S)
        half.committed()
        ann = joined(swarm, lab, host, "ann")
        assert ann.event("joined", START_S)["reachable"] is False
        host.says("none of the 2 members can be reached from outside", AT_ONCE_S)
        ann.says("this machine cannot take part now: it cannot connect to any of the members", AT_ONCE_S)
        half.committed(after=half.last_round() + 1)
        assert not host.events("verdict", committed=False)
        assert not host.events("member_lost")
        pub = joined(swarm, lab, host, "pub")
        assert pub.event("joined", START_S)["reachable"] is True

        def together() -> bool:
            return bool(ann.events("committed", included=True, members=3))

        eventually("all three take part", together, START_S + ROUNDS_S, swarm.tails)
        lost = [one["reason"] for one in host.events("member_lost")]
        assert set(lost) <= {"starts afresh"}, "nobody is removed; whoever is rounds behind rejoins by itself"


def doctor(swarm: Swarm, lab: NatLab, machine: str, *arguments: str) -> str:
    command = (*lab.inside(machine), "env", "COLUMNS=200", *SHOAL, "doctor", *arguments)
    process = swarm.command(f"doctor-{machine}", *command)
    assert process.exit_code(2 * START_S) == 0, process.tail()
    return " ".join(process.text().split())


def test_the_doctor_tells_which_step_works_with_an_invite(swarm: Swarm) -> None:
    kinds = {"host": Kind.PUBLIC, "pub": Kind.PUBLIC, "ann": Kind.SYMMETRIC, "half": Kind.PORT_RESTRICTED}
    kinds["wall"] = Kind.INBOUND_BLOCKED
    with nat_lab(kinds) as lab:
        lab.forward("half", 6000)
        host = hosting(swarm, lab, run_toml(max_s=0.5, patience_s=4.0))
        alone = ("--no-port-mapping",)
        assert "both ports are reached from outside" in doctor(swarm, lab, "pub", host.invite, *alone)
        ann = doctor(swarm, lab, "ann", host.invite, *alone)
        assert f"192.168.1.10; from outside {lab.outside('ann')}" in ann
        assert "only over connections that this machine opens" in ann
        assert f"--advertise {lab.outside('ann')}:PORT" in ann
        half = doctor(swarm, lab, "half", host.invite, "--bind", "0.0.0.0:6000", *alone)
        assert "One port is open and the other is not" in half
        assert "A firewall keeps others out" in doctor(swarm, lab, "wall", host.invite, *alone)
        assert not host.events("member_joined"), "guests are not recorded"


NAT_TYPES = {
    Kind.FULL_CONE: ("endpoint-independent mapping", "lets in everybody"),
    Kind.RESTRICTED: ("endpoint-independent mapping", "a restricted cone"),
    Kind.PORT_RESTRICTED: ("endpoint-independent mapping", "(port-restricted)"),
    Kind.CGNAT: ("endpoint-independent mapping", "(port-restricted)"),
    Kind.SYMMETRIC: ("a symmetric NAT", "(port-restricted)"),
    Kind.INBOUND_BLOCKED: ("behind a firewall", "(port-restricted)"),
}


def test_the_doctor_tells_the_type_of_the_nat(swarm: Swarm) -> None:
    """By what the coordinator, the relay beside it and one elsewhere see; without an invite by two relays."""
    machines = {"host": Kind.PUBLIC, "relay": Kind.PUBLIC} | {str(kind): kind for kind in NAT_TYPES}
    with nat_lab(machines) as lab:
        launcher, bind = (*lab.inside("host"), *SHOAL), f"{lab.address('host')}:0"
        host = swarm.host(run_toml(max_s=0.5, patience_s=4.0), launcher=launcher, bind=bind)
        urls = []
        for port in (443, 444):
            place = ("--bind", f"{lab.address('relay')}:{port}", "--identity", str(swarm.folder / f"key-{port}"))
            relay = swarm.command(f"relay-{port}", *lab.inside("relay"), *SHOAL, "relay", *place)
            urls += ["--relay", relay_url(relay)]
        for kind, words in NAT_TYPES.items():
            said = doctor(swarm, lab, kind, host.invite, "--no-port-mapping", *urls[:2])
            assert all(one in said for one in words), f"{kind}: {said}"
        said = doctor(swarm, lab, Kind.SYMMETRIC, str(swarm.run_file(run_toml())), "--no-port-mapping", *urls)
        assert NAT_TYPES[Kind.SYMMETRIC][0] in said, said
