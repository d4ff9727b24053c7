"""A coordinator whose members show it evidence, called as its sockets would call it."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fakes.audits import ELEMENTS, HOST, MEMBERS, change_a_bit, committed_round
from tests.fakes.hosts import serve
from tests.fakes.virtual_clock import run_virtual
from tests.swarm.coordinator.world import CPU, entry, heartbeat

from shoal.compression.registry import get_codec
from shoal.swarm.coordinator.events import JournalEvent
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.protocol.evidence import evidence_id
from shoal.swarm.protocol.messages import (
    EVIDENCE_PIECE_BYTES,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorShowEvidence,
)
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import TensorSpec

TOML = '[run]\nname = "tiny"\n[recipe]\nname = "own"\n[access]\nadmission = "open"\n[round]\ntokens = 100000\n'
RUN = parse_run_file(TOML)
MODEL = PeerToCoordinatorDescribeModel(
    layout=(TensorSpec(name="w", shape=(ELEMENTS,)),), corpus_digest=b"c" * 32, tokens_per_sample=10, samples=64
)
LIAR = MEMBERS[1].peer_id


def evidence_of(liar: int | None, chunk: int = 2, change: Callable[[memoryview], None] = change_a_bit) -> bytes:
    """Return evidence on a chunk of the second member's part: the third or fourth of the round."""

    async def main() -> bytes:
        return await (await committed_round(liar=liar, run_hash=RUN.hash, change=change)).evidence(1, chunk)

    return run_virtual(main())


def negate(mean: memoryview) -> None:
    """Make the opposite of a mean: a lie beyond the bound."""
    codec, values = get_codec("int8"), min(4096, len(mean))
    while codec.packed_bytes(values) != len(mean) - 1:
        values -= 1
    mean[1:] = memoryview(codec.encode(-codec.decode(mean[1:], values)).numpy())


GUILTY, INNOCENT = evidence_of(1), evidence_of(None)


def serving(
    folder: Path, test: Callable[[CoordinatorService, LocalJournal], Coroutine[Any, Any, None]]
) -> list[JournalEvent]:
    """Run a test with a coordinator that has two members and an observer; return what it has journaled."""

    async def main() -> list[JournalEvent]:
        journal = LocalJournal(folder, RUN.hash, TOML)
        try:
            async with serve(TOML, RUN, HOST, ("127.0.0.1", 0), journal, journal.lease()) as service:
                for number in (1, 2):
                    service.scope.admission.join(entry(number), CPU, service.run.log.now_s)
                    service.handlers[0].rounds.describe_model(entry(number).peer, MODEL)  # type: ignore[union-attr]
                    service.scope.heartbeat(entry(number).peer, heartbeat(), service.run.log.now_s)
                service.scope.admission.join(entry(3, role="observer"), CPU, service.run.log.now_s)
                await test(service, journal)
            return journal.read(0)
        finally:
            journal.close()

    return asyncio.run(main())


async def show(service: CoordinatorService, number: int, data: bytes, size: int = EVIDENCE_PIECE_BYTES) -> str:
    """Show evidence as this member; returns the last receipt's judgement."""
    channel: Any = SimpleNamespace(remote_key=entry(number).certificate.curve_key)
    judgement = ""
    for start in range(0, len(data), size):
        message = PeerToCoordinatorShowEvidence(
            evidence=evidence_id(data), size_bytes=len(data), start=start, data=data[start : start + size]
        )
        receipt: Any = await service.handlers[0]._show_evidence(channel, message)
        assert receipt.evidence == evidence_id(data)
        judgement = receipt.judgement
        assert judgement == "incomplete" or start + size >= len(data)
    return str(judgement)
