"""Faults as a process inflicts them on itself: signals, connections that end or fall silent, wrong bytes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.swarm.transport.bulk.io_thread import FrameReceiver, IoThread
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.control import ControlPlane

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
_AGAIN_S = 0.05


def cut(seconds: float, is_meant: Callable[[int, int], bool]) -> None:
    """End the TCP connections with these (own, other) ports now, and for so long whatever is connected anew."""
    _cut_once(is_meant)
    if seconds:
        threading.Thread(target=_keep_cutting, args=(time.monotonic() + seconds, is_meant), daemon=True).start()


def _keep_cutting(until_s: float, is_meant: Callable[[int, int], bool]) -> None:
    while time.monotonic() < until_s:
        time.sleep(_AGAIN_S)
        _cut_once(is_meant)


def _cut_once(is_meant: Callable[[int, int], bool]) -> None:
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile
            # Files are left alone: to close a copy of the journal's descriptor would end the locks on it.
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                _cut_socket(socket.socket(fileno=os.dup(int(name))), is_meant)


def _cut_socket(copy: socket.socket, is_meant: Callable[[int, int], bool]) -> None:
    with copy, suppress(OSError):  # not connected
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and is_meant(copy.getsockname()[1], copy.getpeername()[1]):
            copy.shutdown(socket.SHUT_RDWR)


class Silence:
    """Connections that stay open and carry nothing, in either direction: by the CURVE key at their other end."""

    def __init__(self) -> None:
        self._muted: Callable[[bytes], bool] = lambda key: False

    def mute(self, seconds: float, is_meant: Callable[[bytes], bool]) -> None:
        self._muted = is_meant
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        self._muted = lambda key: False

    def install(self) -> None:
        """Around the planes' ways in and out, above the connections themselves: TCP sees nothing."""
        send, dispatch = Channel.send, ControlPlane._dispatch
        send_chunk, grant = IoThread.send, IoThread.grant
        send_control, receive = IoThread.send_stream_control, FrameReceiver.receive

        async def quiet_send(channel: Any, *rest: Any) -> None:
            if not self._muted(channel.remote_key):
                await send(channel, *rest)

        async def quiet_dispatch(plane: Any, channel: Any, data: Any) -> None:
            if not self._muted(channel.remote_key):
                await dispatch(plane, channel, data)

        def quiet_send_chunk(pump: Any, link: Any, *rest: Any, **more: Any) -> None:
            if not self._muted(link.remote_key):
                send_chunk(pump, link, *rest, **more)

        def quiet_grant(pump: Any, link: Any, *rest: Any) -> None:
            if not self._muted(link.remote_key):
                grant(pump, link, *rest)

        def quiet_send_control(pump: Any, link: Any, *rest: Any) -> None:
            if not self._muted(link.remote_key):
                send_control(pump, link, *rest)

        def quiet_receive(receiver: Any, link: Any, *rest: Any) -> None:
            if not self._muted(link.remote_key):
                receive(receiver, link, *rest)

        Channel.send = quiet_send  # type: ignore[method-assign]
        ControlPlane._dispatch = quiet_dispatch  # type: ignore[method-assign]
        IoThread.send = quiet_send_chunk  # type: ignore[method-assign]
        IoThread.grant = quiet_grant  # type: ignore[method-assign]
        IoThread.send_stream_control = quiet_send_control  # type: ignore[method-assign]
        FrameReceiver.receive = quiet_receive  # type: ignore[method-assign]


class Corruption:
    """Of what is sent in one round, before it is sealed: a member that lies, not a wire that errs."""

    def __init__(self) -> None:
        self._round = -1
        self._is_meant: Callable[[bytes], bool] = lambda key: False

    def begin(self, round_number: int, is_meant: Callable[[bytes], bool]) -> None:
        """``is_meant``: of the receivers' keys."""
        self._round, self._is_meant = round_number, is_meant

    def changed(self, kind: str, round_number: int, to: bytes, payload: memoryview) -> memoryview:
        """Contributions that are no numbers; results with other values in them."""
        if round_number != self._round or not self._is_meant(to) or not payload:
            return payload
        if kind == "contribution":
            return memoryview(b"\xff" * len(payload))
        return memoryview(bytes(payload[:-4]) + bytes(one ^ 1 for one in payload[-4:]))


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone. Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
