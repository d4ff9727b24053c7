"""A stranger who floods a port: ``flooding_stranger.py KIND HOST PORT KEY COUNT SECONDS [INVITE]``.

- ``messages``: so many strangers send the largest messages that the protocol knows, as fast as they can
- ``frames``: the same in the largest messages that a caller may send
- ``parts``: the same with messages of very many frames
- ``small``: the same with pings
- ``connections``: so many open TCP connections, opened again when they are closed
- ``slow``: the same, each sending a byte of a handshake a second
- ``idle``: so many prove a key and say nothing; prints a JSON line with the seconds until each was hung up on
- ``joins``: so many at a time join by ``INVITE``, with its token, each time under a new identity

``KEY``: the victim's CURVE key, in hex.
"""

from __future__ import annotations

import errno
import json
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

import zmq
from zmq.utils import z85

from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import PROTOCOL_VERSION, PeerToCoordinatorJoinRun
from shoal.swarm.protocol.types import Address, DeviceInfo
from shoal.swarm.protocol.wire import Envelope, encode

made = 0
"""Messages that were given to libzmq, connections, or joins that were answered; printed every second."""

reached = 0
"""Connections that the victim has answered: by a handshake, by a refusal of it, or by closing them."""

_ANSWERS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

LARGE_BYTES = 8 * 2**20
FRAME_BYTES = 2**15
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48)


def dealer(context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, key: bytes) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = z85.encode(key)
    socket.sndhwm, socket.sndtimeo = 4, 500
    socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 100
    socket.connect(f"tcp://{host}:{port}")
    return socket


def frames_of(kind: str) -> list[bytes]:
    # An envelope that begins as one of this version does: what follows is as costly to decode as can be.
    head = b"\x97" + bytes([PROTOCOL_VERSION]) + b"\x00\x01\x00\xa0\xbePeerToCoordinatorDescribeModel"
    body = head + b"\x81\xa6layout\xdd\x00\x00\x00\x7f" + (b"\xdd\x00\x01\x00\x00" + b"\x80" * 65536) * 127
    match kind:
        case "messages":
            return [body[:LARGE_BYTES]]
        case "frames":
            return [body[start : start + FRAME_BYTES] for start in range(0, 2**20, FRAME_BYTES)]
        case "one-part":
            return [bytes(FRAME_BYTES)] * 6000
    return [b"\x97" + bytes([PROTOCOL_VERSION]) + b"\x02\x00\x00\xa0\xaePeerToPeerPing\x80"]


def flood(kind: str, host: str, port: int, key: bytes, until_s: float) -> None:
    """Flood as one stranger, with a new key every second."""
    global made, reached
    frames, context = frames_of(kind), zmq.Context()
    while time.monotonic() < until_s:
        with dealer(context, host, port, key) as socket, socket.get_monitor_socket(_ANSWERS) as monitor:
            again_s = until_s if kind == "one-part" else min(until_s, time.monotonic() + 1.0)
            while time.monotonic() < again_s:
                with suppress(zmq.Again):
                    if kind == "one-part":
                        socket.send_multipart(frames)
                    else:
                        for frame in frames:
                            socket.send(frame)
                    made += 1
                while monitor.poll(0):
                    monitor.recv_multipart()
                    reached += 1
                    if reached == 1:  # at once: this process may be ended by what it does next
                        say()
            socket.disable_monitor()
    context.destroy(linger=0)


def connect(host: str, port: int, count: int, until_s: float, *, slowly: bool) -> None:
    """Keep so many connections open."""
    global made, reached
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    here: dict[int, tuple[socket.socket, int]] = {}
    poll, next_byte_s = select.poll(), 0.0
    while time.monotonic() < until_s:
        for _ in range(min(50, count - len(here))):
            one = socket.socket()
            one.setblocking(False)
            if one.connect_ex((host, port)) not in (0, errno.EINPROGRESS):
                one.close()
                break
            here[one.fileno()] = (one, 0)
            poll.register(one, select.POLLIN)
            made += 1
        for descriptor, _ in poll.poll(10):
            one, _ = here[descriptor]
            try:
                gone = not one.recv(4096)
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                reached += 1
                poll.unregister(one)
                del here[descriptor]
                one.close()
        if slowly and time.monotonic() > next_byte_s:
            next_byte_s = time.monotonic() + 1.0
            for descriptor, (one, sent) in here.items():
                with suppress(OSError):
                    one.send(GREETING[sent % len(GREETING) :][:1])
                    here[descriptor] = (one, sent + 1)


def idle(host: str, port: int, key: bytes, count: int, until_s: float) -> list[float]:
    """Return the seconds from each handshake until the victim closed the connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lasted: list[float] = []

    def watch() -> None:
        socket = dealer(context, host, port, key)
        socket.reconnect_ivl = -1
        monitor = socket.get_monitor_socket()
        monitor.rcvtimeo, began_s = 200, 0.0
        while time.monotonic() < until_s:
            with suppress(zmq.Again):
                event = struct.unpack("=Hi", monitor.recv_multipart()[0])[0]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    began_s = time.monotonic()
                elif event == zmq.EVENT_DISCONNECTED and began_s:
                    lasted.append(time.monotonic() - began_s)
                    break
        socket.disable_monitor()
        socket.close()

    in_parallel(watch, count)
    return lasted


def join(host: str, port: int, key: bytes, invite: Invite, until_s: float) -> None:
    """Join under one new identity after the other."""
    global made, reached
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    while time.monotonic() < until_s:
        with dealer(context, host, port, key) as socket:
            identity, keys = Identity.generate(), CurveKeys.fresh()
            socket.setsockopt(zmq.RCVTIMEO, 3000)
            socket.disconnect(f"tcp://{host}:{port}")
            socket.curve_publickey, socket.curve_secretkey = z85.encode(keys.public), z85.encode(keys.secret)
            socket.connect(f"tcp://{host}:{port}")
            ask = PeerToCoordinatorJoinRun(
                run=invite.run,
                certificate=identity.certify(keys),
                name="nobody",
                role="trainer",
                device=DeviceInfo(kind="cpu", name="none", memory_bytes=0),
                addresses=(Address(host="", control_port=1, data_port=2),),
                token=invite.token,
            )
            with suppress(zmq.Again):
                socket.send(encode(Envelope("request", 1, ask, run=invite.run)))
                socket.recv()
                made += 1
                reached += 1
    context.destroy(linger=0)


def in_parallel(work: object, count: int, *arguments: object) -> None:
    threads = [threading.Thread(target=work, args=arguments) for _ in range(count)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def say() -> None:
    print(json.dumps({"made": made, "reached": reached}), flush=True)


def report() -> None:
    while True:
        time.sleep(1.0)
        say()


def main() -> None:
    kind, host, port, key = sys.argv[1], sys.argv[2], int(sys.argv[3]), bytes.fromhex(sys.argv[4])
    count, until_s = int(sys.argv[5]), time.monotonic() + float(sys.argv[6])
    print("begins", flush=True)
    if kind != "idle":
        threading.Thread(target=report, daemon=True).start()
    match kind:
        case "parts":
            # libzmq ends its process when it is cut off in the middle of a message of many frames.
            while time.monotonic() < until_s:
                subprocess.run([sys.executable, __file__, "one-part", *sys.argv[2:6], "5.0"], stderr=subprocess.DEVNULL)
        case "connections" | "slow":
            connect(host, port, count, until_s, slowly=kind == "slow")
        case "idle":
            print(json.dumps({"lasted_s": idle(host, port, key, count, until_s)}), flush=True)
        case "joins":
            in_parallel(join, count, host, port, key, Invite.parse(sys.argv[7]), until_s)
        case _:
            in_parallel(flood, count, kind, host, port, key, until_s)


if __name__ == "__main__":
    main()
