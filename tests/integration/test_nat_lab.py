"""Each NAT of the lab does what its name says; tried with plain sockets, before anything of Shoal is put behind it."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.harness import eventually
from tests.integration.nat_lab import BEHIND_NAT, Kind, NatLab, nat_lab

pytestmark = pytest.mark.integration

WAIT_S = 5.0
"""For what must come. It comes in milliseconds."""

NEVER_S = 0.3
"""For a dial that must not be answered."""

WITH_UDP = [kind for kind in BEHIND_NAT if kind not in (Kind.UDP_BLOCKED, Kind.ONLY_443)]


@pytest.fixture(scope="module")
def lab() -> Iterator[NatLab]:
    """Two public machines, and one of each kind that bears its kind's name."""
    machines = {"near": Kind.PUBLIC, "far": Kind.PUBLIC}
    machines |= {str(kind): kind for kind in Kind if kind != Kind.PUBLIC}
    with nat_lab(machines) as built:
        yield built


def hears(listener: socket.socket) -> tuple[bytes, tuple[str, int]]:
    listener.settimeout(WAIT_S)
    return listener.recvfrom(100)


def listening(lab: NatLab, machine: str, port: int = 0) -> socket.socket:
    listener = lab.tcp(machine, port)
    listener.settimeout(WAIT_S)
    listener.listen()
    return listener


def dial(lab: NatLab, machine: str, host: str, port: int, from_port: int = 0, within_s: float = NEVER_S) -> bool:
    with closing(lab.tcp(machine, from_port)) as dialler:
        dialler.settimeout(within_s)
        try:
            dialler.connect((host, port))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("kind", WITH_UDP)
def test_mapping(lab: NatLab, kind: Kind) -> None:
    """One socket sends to two machines: from one outer port, except through a symmetric NAT."""
    sender = lab.udp(kind)
    seen = []
    for machine in ("near", "far"):
        receiver = lab.udp(machine)
        sender.sendto(b"here", (lab.address(machine), receiver.getsockname()[1]))
        _, (host, port) = hears(receiver)
        assert host == lab.outside(kind) != lab.address(kind)
        seen.append(port)
    assert (seen[0] == seen[1]) == (kind != Kind.SYMMETRIC)


@pytest.mark.parametrize("kind", WITH_UDP)
def test_filtering(lab: NatLab, kind: Kind) -> None:
    """What is not asked for is sent first: whatever of it has not come when the answer comes never does."""
    sender, asked, same_address, stranger = lab.udp(kind), lab.udp("near"), lab.udp("near"), lab.udp("far")
    sender.sendto(b"here", (lab.address("near"), asked.getsockname()[1]))
    _, outer = hears(asked)
    stranger.sendto(b"stranger", outer)
    same_address.sendto(b"same address", outer)
    asked.sendto(b"answer", outer)
    came = set()
    while b"answer" not in came:
        came.add(hears(sender)[0])
    more = {Kind.FULL_CONE: {b"stranger", b"same address"}, Kind.RESTRICTED: {b"same address"}}
    assert came == {b"answer"} | more.get(kind, set())


@pytest.mark.parametrize("kind", BEHIND_NAT)
def test_tcp(lab: NatLab, kind: Kind) -> None:
    """A machine behind a NAT dials out; it is dialled only through a full cone, at a port it has dialled from."""
    at_home = listening(lab, kind)
    port = at_home.getsockname()[1]
    public = listening(lab, "near", 443)
    assert dial(lab, kind, lab.address("near"), 443, from_port=port, within_s=WAIT_S)
    _, (host, outer) = public.accept()
    assert host == lab.outside(kind)
    assert dial(lab, "far", host, outer) == (kind == Kind.FULL_CONE)
    public.close()


def test_forwarded_ports_let_strangers_in(lab: NatLab) -> None:
    machine = Kind.PORT_RESTRICTED
    first, second = listening(lab, machine), listening(lab, machine)
    lab.forward(machine, first.getsockname()[1])
    assert dial(lab, "far", lab.outside(machine), first.getsockname()[1], within_s=WAIT_S)
    assert not dial(lab, "far", lab.outside(machine), second.getsockname()[1])


def test_behind_a_carrier_there_are_two_nats(lab: NatLab) -> None:
    gateway = lab.udp(lab.gateway(Kind.CGNAT))
    gateway.connect((lab.address("near"), 9))
    assert gateway.getsockname()[0].startswith("100.64.")
    with pytest.raises(ValueError, match="carrier"):
        lab.forward(Kind.CGNAT, 1)


def test_inbound_blocked(lab: NatLab) -> None:
    listener, public = listening(lab, Kind.INBOUND_BLOCKED), listening(lab, "near")
    assert lab.address(Kind.INBOUND_BLOCKED) == lab.outside(Kind.INBOUND_BLOCKED)
    assert dial(lab, Kind.INBOUND_BLOCKED, lab.address("near"), public.getsockname()[1], within_s=WAIT_S)
    assert not dial(lab, "near", lab.outside(Kind.INBOUND_BLOCKED), listener.getsockname()[1])


@pytest.mark.parametrize("kind", [Kind.UDP_BLOCKED, Kind.ONLY_443])
def test_udp_is_blocked(lab: NatLab, kind: Kind) -> None:
    """Nothing has come when a packet comes that was sent after it, from where packets come through."""
    receiver, sender, through = lab.udp("near"), lab.udp(kind), lab.udp("far")
    for one in (sender, through):
        one.sendto(b"here", (lab.address("near"), receiver.getsockname()[1]))
    assert hears(receiver)[1][0] == lab.address("far")


def test_only_443_goes_out(lab: NatLab) -> None:
    allowed, other = listening(lab, "near", 443), listening(lab, "near")
    address = lab.address("near")
    assert dial(lab, Kind.ONLY_443, address, 443, within_s=WAIT_S)
    assert not dial(lab, Kind.ONLY_443, address, other.getsockname()[1])
    assert dial(lab, Kind.UDP_BLOCKED, address, other.getsockname()[1], within_s=WAIT_S)
    allowed.close()


@pytest.mark.parametrize(("other", "met"), [(Kind.RESTRICTED, True), (Kind.CGNAT, True), (Kind.SYMMETRIC, False)])
def test_two_that_dial_at_once_meet_where_mappings_are_endpoint_independent(
    lab: NatLab, other: Kind, met: bool
) -> None:
    """TCP simultaneous open, each to the outer port that it takes the other to have."""
    kinds = (Kind.PORT_RESTRICTED, other)
    ends = [lab.tcp(kind) for kind in kinds]
    outer = [(lab.outside(kind), end.getsockname()[1]) for kind, end in zip(kinds, ends, strict=True)]
    for end, target in zip(ends, reversed(outer), strict=True):
        end.setblocking(False)
        end.connect_ex(target)
    if met:
        eventually("both are connected", lambda: all(map(is_connected, ends)), WAIT_S)
    else:
        select.select([], ends, [], NEVER_S)
        assert not any(map(is_connected, ends))


def is_connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


def test_neighbours_share_a_gateway_and_meet_at_home() -> None:
    machines = dict.fromkeys(("ann", "ben"), Kind.SYMMETRIC) | dict.fromkeys(("cat", "dan"), Kind.CGNAT)
    with nat_lab({**machines, "near": Kind.PUBLIC}, together=[("ann", "ben"), ("cat", "dan")]) as lab:
        listener = listening(lab, "ben")
        assert dial(lab, "ann", lab.address("ben"), listener.getsockname()[1], within_s=WAIT_S)
        assert lab.outside("cat") == lab.outside("dan")
        assert lab.gateway("ann") == lab.gateway("ben")
        assert lab.gateway("cat") != lab.gateway("dan")
        assert lab.address("cat") == lab.address("dan")
        public = listening(lab, "near")
        assert all(dial(lab, one, lab.address("near"), public.getsockname()[1], within_s=WAIT_S) for one in machines)


@pytest.mark.parametrize("kind", [Kind.PORT_RESTRICTED, Kind.CGNAT, Kind.PUBLIC])
def test_an_unplugged_gateway_comes_back_without_its_mappings(kind: Kind) -> None:
    with nat_lab({"ann": kind, "near": Kind.PUBLIC}) as lab:
        sender, receiver = lab.udp("ann"), lab.udp("near")
        target = (lab.address("near"), receiver.getsockname()[1])
        sender.sendto(b"before", target)
        _, outer = hears(receiver)
        lab.unplug("ann")
        assert not dial(lab, "ann", *target, within_s=NEVER_S)
        lab.plug_in("ann")
        receiver.sendto(b"unasked", outer)
        sender.sendto(b"after", target)
        assert hears(receiver)[0] == b"after"
        receiver.sendto(b"answer", outer)
        expected = b"unasked" if kind == Kind.PUBLIC else b"answer"
        assert hears(sender)[0] == expected


def test_a_shaped_link_is_slow_both_ways() -> None:
    with nat_lab({"ann": Kind.PORT_RESTRICTED, "near": Kind.PUBLIC}) as lab:
        lab.shape("ann", 8.0)
        listener, dialler = listening(lab, "near"), lab.tcp("ann")
        dialler.settimeout(WAIT_S)
        dialler.connect((lab.address("near"), listener.getsockname()[1]))
        accepted, _ = listener.accept()
        accepted.settimeout(WAIT_S)
        for sender, receiver in ((dialler, accepted), (accepted, dialler)):
            assert _seconds_for(sender, receiver, 300_000) > 0.5 * 300_000 * 8 / 8e6
        accepted.close()


def _seconds_for(sender: socket.socket, receiver: socket.socket, size: int) -> float:
    began = time.monotonic()
    thread = threading.Thread(target=sender.sendall, args=(bytes(size),))
    thread.start()
    left = size
    while left:
        left -= len(receiver.recv(min(left, 1 << 16)))
    thread.join()
    return time.monotonic() - began


def test_nothing_is_left_after_a_test_that_fails() -> None:
    holders: list[int] = []

    def test() -> None:
        with nat_lab({"ann": Kind.CGNAT, "near": Kind.PUBLIC}) as lab:
            holders.extend(lab.spaces.holder(name) for name in lab.spaces.names)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        test()
    assert len(holders) == 5
    assert not [pid for pid in holders if Path(f"/proc/{pid}").exists()]


def test_a_machine_without_the_means_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match=r"root.*the command ip.*the command nft"):
        nat_lab({"ann": Kind.PUBLIC})
