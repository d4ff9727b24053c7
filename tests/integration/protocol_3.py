"""``shoal`` as it was with protocol version 3, whose digests of parts are SHA-256: ``protocol_3.py join INVITE …``."""

import hashlib
from collections.abc import Iterable

from slow_member import slow_down

from shoal.peer.cli import main
from shoal.swarm import wire
from shoal.swarm.averaging import results


def sha256(chunks: Iterable[memoryview]) -> bytes:
    return hashlib.sha256(b"".join(chunks)).digest()


if __name__ == "__main__":
    slow_down(0.02)
    wire.PROTOCOL_VERSION, results.part_digest = 3, sha256
    main()
