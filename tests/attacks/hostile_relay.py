"""A relay that is the run's and works against it: it delays, cuts, changes, repeats, reorders or records the bytes.

    python hostile_relay.py HOW PORT_FILE HOST_KEY

``HOW``: one of ``FAULTS``. It writes its URL to ``PORT_FILE``, and what it has recorded to ``PORT_FILE.recorded``.
"""

import asyncio
import random
import sys
from pathlib import Path

from shoal.swarm.protocol.identity import Identity, parse_key
from shoal.swarm.protocol.relay_url import RelayUrl
from shoal.swarm.transport.relay import server as relay_server
from shoal.swarm.transport.relay.books import RelayBooks, RelayLimits
from shoal.swarm.transport.relay.server import HostPolicy, RelayServer
from shoal.swarm.transport.tcp import splice
from shoal.swarm.transport.tcp.sockets import listen

FAULTS = ("delay", "cut", "change", "repeat", "reorder", "record")
_QUIET_BYTES = 30_000
"""So many bytes of each direction pass untouched: handshakes, so that the rest is tried, too."""
_OFTEN, _MOST = 0.05, 6


class Hostile(splice._CopyingBuffer):
    """Bytes of one direction, worked on now and then."""

    how = "record"
    rng = random.Random(1)
    recorded = bytearray()
    passed = faults = 0

    def drain(self, to: object) -> None:
        held = bytearray(self._rest)
        Hostile.passed += len(held)
        if held and Hostile.passed > _QUIET_BYTES and Hostile.faults < _MOST and self.rng.random() < _OFTEN:
            Hostile.faults += 1
            if self.how == "change":
                held[self.rng.randrange(len(held))] ^= 1 << self.rng.randrange(8)
            elif self.how == "repeat":
                held += held[-1000:]
            elif self.how == "reorder":
                half = len(held) // 2
                held = held[half:] + held[:half]
            elif self.how == "cut":
                held = held[: len(held) // 2]
        if self.how == "record" and len(self.recorded) < 2**24:
            self.recorded.extend(held)
        self._rest = memoryview(held)
        super().drain(to)  # type: ignore[arg-type]


async def main(how: str, out: Path, host_key: str) -> None:
    Hostile.how = how
    splice._buffers.take = Hostile  # type: ignore[method-assign, assignment]
    splice._buffers.give_back = lambda buffer: None  # type: ignore[method-assign]
    if how == "delay":
        passing = RelayBooks.pass_on

        def slowly(*args: object, **kwargs: object) -> float:
            return passing(*args, **kwargs) + Hostile.rng.uniform(0.0, 0.05)  # type: ignore[arg-type]

        RelayBooks.pass_on = slowly  # type: ignore[method-assign, assignment]
    identity = Identity.generate()
    server = RelayServer(identity, HostPolicy([parse_key(host_key)]), RelayBooks(RelayLimits()))
    listener = listen("127.0.0.1", 0)
    relay_server.log.setLevel("DEBUG")
    partial = out.with_suffix(".partial")
    partial.write_text(str(RelayUrl("127.0.0.1", listener.getsockname()[1], identity.public_key)))
    partial.rename(out)
    serving = asyncio.create_task(server.serve(listener))
    while not serving.done():
        await asyncio.sleep(0.5)
        out.with_suffix(".recorded").write_bytes(Hostile.recorded)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
