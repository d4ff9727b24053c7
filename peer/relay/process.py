"""A relay beside a host or a peer, as a process of its own: what it carries must not delay them, nor they it.

The process prints its URL, and then each second what it carries, as JSON. From its standard input it reads the rate
that it may pass on; it ends when that does.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from shoal.swarm.errors import Unreachable
from shoal.swarm.protocol.identity import key_text
from shoal.swarm.protocol.relay_url import RelayUrl
from shoal.swarm.protocol.types import RelayLoad

log = logging.getLogger(__name__)

RELAY_IDENTITY_FILE = "relay-identity"

_START_S, _END_S = 60.0, 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 300.0
"""Time between two starts: doubled each time, as long as none of them lasts."""

_LASTS_S = 60.0
REPORT_EVERY_S = 1.0


class RelayProcess:
    """A relay of this machine: started when somebody needs it, and again when it has ended. ``run`` is for a task."""

    def __init__(self, identity: Path, bind: tuple[str, int], host_key: bytes, bytes_s: float = 0.0) -> None:
        """``identity``: file of its key pair; ``bind``: where to listen; any other port is taken if that one is in use;
        ``host_key``: the host whose runs it serves; ``bytes_s``: the most that it passes on, 0 for no limit."""
        self._identity, self._bind, self._host_key = identity, bind, host_key
        self.bytes_s = bytes_s
        self.load = RelayLoad()
        """What it has said last that it carries."""
        self.on_carried: Callable[[int], None] = lambda size_bytes: None
        """Called with the bytes that it has passed on since the last call."""
        self._url: RelayUrl | None = None
        self._needed = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running_at(self) -> RelayUrl | None:
        """Where it listens; None while it does not run."""
        return self._url

    def url(self) -> RelayUrl | None:
        """Return where it listens; None while it does not run, after which it is started."""
        self._needed.set()
        return self._url

    def set_rate(self, bytes_s: float) -> None:
        """Change the most that it passes on."""
        self.bytes_s = bytes_s
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{bytes_s:.0f}\n".encode())

    async def run(self) -> None:
        """Keep it running from the first need of it on, until cancelled."""
        await self._needed.wait()
        pause_s, loop = _FIRST_PAUSE_S, asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            trouble = await self._run_once()
            if loop.time() - began_s >= _LASTS_S:
                pause_s = _FIRST_PAUSE_S
            level = logging.WARNING if pause_s == _FIRST_PAUSE_S else logging.DEBUG
            log.log(
                level,
                "the relay beside this process has ended (%s): members behind walls may not meet until it is back. It "
                "is started again, with longer and longer pauses",
                trouble,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run_once(self) -> str:
        """Run the process until it ends. Returns why."""
        ports = (self._bind[1], 0) if self._bind[1] else (0,)
        for port in ports:
            try:
                await self._start(port)
            except (Unreachable, OSError) as error:
                if port == ports[-1]:
                    return str(error)
                continue
            finally:
                if self._url is None:
                    await self._stop()
            try:
                await self._follow()
            finally:
                await self._stop()
            break
        return "it was ended"

    async def _start(self, port: int) -> None:
        command = [sys.executable, "-m", "shoal.peer", "relay", "--beside", "--bind", f"{self._bind[0]}:{port}"]
        command += ["--identity", str(self._identity), "--host", key_text(self._host_key)]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self.set_rate(self.bytes_s)
        try:
            async with asyncio.timeout(_START_S):
                url = RelayUrl.parse(await self._line())
        except (TimeoutError, ValueError) as error:
            raise Unreachable("it does not start: its own messages say why") from error
        self.load, self._url = RelayLoad(), url

    async def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode(errors="replace").strip()

    async def _follow(self) -> None:
        """Take over what it says that it carries, until it ends."""
        with suppress(ValidationError):  # it was cut off
            while line := await self._line():
                load = RelayLoad.model_validate_json(line)
                carried_bytes = load.carried_bytes - self.load.carried_bytes
                self.load = load
                if carried_bytes:
                    self.on_carried(carried_bytes)

    async def _stop(self) -> None:
        """End the process, if there is one."""
        process, self._process, self._url = self._process, None, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def serve_orders(read: Callable[[], bytes], set_rate: Callable[[float], None], stop: Callable[[], None]) -> None:
    """Carry out what the process has to read that a relay runs beside: a rate a line; the end ends the relay."""
    data = read()
    if not data:
        stop()
    for line in data.splitlines():
        with suppress(ValueError):
            set_rate(float(line))
