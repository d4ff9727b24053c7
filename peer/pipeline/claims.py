"""Requests of a pipeline's peer to the coordinator: claims of samples whose gradients count here, samples to drive.

Both run on the event loop and wait while the coordinator is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import FINAL_ERRORS, LinkError
from shoal.swarm.pipeline.engine.effects import AskToDrive, Claim, Release, as_range
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerClaimed,
    CoordinatorToPeerLease,
    PeerToCoordinatorClaim,
    PeerToCoordinatorDrive,
    PeerToCoordinatorRelease,
)
from shoal.swarm.sample_ranges import Ranges, count, from_wire, merge, overlap, subtract, to_wire

log = logging.getLogger(__name__)

_CLAIMS_AT_ONCE = 64


class ClaimQueue:
    """Queue of one stage's claims and releases, sent in order; consecutive claims share a request."""

    def __init__(self, client: CoordinatorClient, answered: Callable[[Claim, Ranges], None]) -> None:
        """``client``: the stage's; ``answered``: called once for each claim with the part of its samples granted."""
        self._client = client
        self._answered = answered
        self._waiting: asyncio.Queue[Claim | Release] = asyncio.Queue()

    def put(self, asked: Claim | Release) -> None:
        """Append a claim or release."""
        self._waiting.put_nowait(asked)

    async def send_queued(self) -> None:
        """Send the queued claims and releases, until cancelled."""
        following: Claim | Release | None = None
        while True:
            first = following or await self._waiting.get()
            following = None
            if isinstance(first, Release):
                await self._release(first)
                continue
            together = [first]
            while not self._waiting.empty() and len(together) < _CLAIMS_AT_ONCE:
                following = self._waiting.get_nowait()
                if not isinstance(following, Claim) or not _fits(following, together):
                    break
                together.append(following)
                following = None
            await self._claim(together)

    async def _claim(self, claims: list[Claim]) -> None:
        wanted = merge(one for claim in claims for one in as_range(claim.micro_batch))
        ask = PeerToCoordinatorClaim(
            round=claims[0].micro_batch.round,
            ranges=tuple(one for claim in claims for one in to_wire(as_range(claim.micro_batch))),
        )
        granted: Ranges = []
        try:
            answer = await self._client.ask(ask, CoordinatorToPeerClaimed)
            granted = overlap(wanted, merge(from_wire(answer.ranges)))
        except FINAL_ERRORS:
            raise
        except LinkError as error:  # this peer is no member of the stage any more, so its work on the round is lost
            log.debug("the claim of samples of round %d was refused: %s", ask.round, error)
        for claim in claims:
            self._answered(claim, overlap(as_range(claim.micro_batch), granted))

    async def _release(self, release: Release) -> None:
        ranges = to_wire(merge(release.ranges))
        try:
            await self._client.ask(PeerToCoordinatorRelease(round=release.round, ranges=ranges), Acknowledged)
        except FINAL_ERRORS:
            raise
        except LinkError as error:  # the samples are not this peer's any more
            log.debug("the release of samples of round %d was refused: %s", release.round, error)


def _fits(claim: Claim, others: list[Claim]) -> bool:
    mine = as_range(claim.micro_batch)
    return claim.micro_batch.round == others[0].micro_batch.round and not any(
        overlap(mine, as_range(other.micro_batch)) for other in others
    )


class DriveRequests:
    """Requests for samples to drive. The coordinator answers with all of them, the engine gets only the new ones."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._round = -1
        self._held: Ranges = []

    async def request_samples(self, ask: AskToDrive) -> Ranges:
        """Return further sample ranges to drive, perhaps none, beside those that are in flight."""
        if ask.round != self._round:
            self._round, self._held = ask.round, []
        under_way = subtract(self._held, merge(ask.done))
        samples = ask.samples + count(under_way)
        message = PeerToCoordinatorDrive(round=ask.round, samples=samples, done=to_wire(merge(ask.done)))
        try:
            answer = await self._client.ask(message, CoordinatorToPeerLease)
        except FINAL_ERRORS:
            raise
        except LinkError as error:
            log.debug("the request for samples to drive in round %d was refused: %s", ask.round, error)
            self._held = []
            return []
        self._held = merge(from_wire(answer.ranges))
        return subtract(self._held, under_way)
