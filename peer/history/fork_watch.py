"""Watch for a coordinator that gives members different verdicts of one round, and the proof that it did.

Members compare the hashes of verdicts with each other. Where two differ, each side shows its verdict: two verdicts of
one round with the coordinator's signature prove that it forked the run, to anybody who has the run's invite. Nothing
less stops a peer, so no member can stop another by its word alone.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from shoal.peer.history.history_file import HistoryOrigin, pack_origin, unpack_history
from shoal.peer.regular_file import read_regular
from shoal.swarm import durable
from shoal.swarm.aio import in_thread
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import CoordinatorForked, LinkError, NotAdmitted, StateFileError, WireError
from shoal.swarm.protocol.messages import (
    Acknowledged,
    PeerToPeerCompareVerdict,
    PeerToPeerOtherVerdict,
    PeerToPeerShowVerdict,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import Message
from shoal.swarm.protocol.verdict_chain import check_verdict, pack_verdict
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.node import Node

log = logging.getLogger(__name__)

PROOF_SUFFIX = ".fork"
"""Ending of the names of files with a proof."""

KEPT_VERDICTS = 32
"""Newest verdicts that are compared: members lag behind each other by a few rounds."""

_FALSE_PROOFS = 3
"""Verdicts without a valid signature that one sender may show before its messages are not looked at any more."""


@dataclass(frozen=True)
class ForkProof:
    """Two different verdicts of one round, with the run and the coordinator that they are of."""

    origin: HistoryOrigin
    first: Verdict
    second: Verdict

    def check(self) -> None:
        """Raise ``WireError`` unless the coordinator has signed both, and they are different ones of one round."""
        if self.first.round != self.second.round or self.first.chain == self.second.chain:
            raise WireError("the verdicts are not two different ones of one round")
        stage = self.origin.scope - 1 if self.origin.scope else None
        for verdict in (self.first, self.second):
            if (verdict.run_hash, verdict.stage) != (self.origin.run_hash, stage):
                raise WireError("one of the verdicts is of another run or stage")
            check_verdict(verdict, self.origin.coordinator.identity_key)

    def write(self, folder: Path) -> Path:
        """Write the proof into ``folder`` and return its path. Raises ``OSError``."""
        scope = f"-stage-{self.origin.scope - 1}" if self.origin.scope else ""
        path = folder / f"round-{self.first.round}{scope}{PROOF_SUFFIX}"
        durable.put(path, b"".join((pack_origin(self.origin), pack_verdict(self.first), pack_verdict(self.second))))
        return path


def read_proof(path: Path) -> ForkProof:
    """Read a proof and check it. Raises ``StateFileError`` for a file that proves nothing, and says why."""
    try:
        found = unpack_history(read_regular(path), str(path))
    except OSError as error:
        raise StateFileError(f"{path}: cannot be read: {error}") from error
    if len(found.verdicts) != 2 or found.damage is not None:
        raise StateFileError(f"{path}: expected two verdicts, found {len(found.verdicts)}")
    proof = ForkProof(found.origin, *found.verdicts)
    try:
        proof.check()
    except WireError as error:
        raise StateFileError(f"{path}: proves nothing: {error}") from error
    return proof


class ForkWatch:
    """Comparison of a member's verdicts with those of other members; ``run`` it in a task group.

    ``random``: chooses the members to ask; nobody else may be able to foresee it."""

    def __init__(
        self, client: CoordinatorClient, node: Node, folder: Path, chooser: random.Random | None = None
    ) -> None:
        """``folder``: where a proof is written."""
        self._client = client
        self._node = node
        self._folder = folder
        self._random = chooser or random.SystemRandom()
        self._verdicts: dict[int, Verdict] = {}
        self._false_proofs: Counter[bytes] = Counter()
        self._proof: ForkProof | None = None
        node.control.handle(PeerToPeerCompareVerdict, self._on_compare, client.scope)
        node.control.handle(PeerToPeerShowVerdict, self._on_show, client.scope)

    async def run(self) -> None:
        """Compare each verdict with another member's. Raises ``CoordinatorForked`` when two of one round differ."""
        while True:
            view = await self._client.wait_for(
                lambda view: self._proof is not None or (view.verdict is not None and self._is_new(view.verdict))
            )
            if self._proof is None and view.verdict is not None:
                await self._take(view.verdict)
            if self._proof is not None:
                raise CoordinatorForked(await in_thread(self._report, self._proof))

    def _is_new(self, verdict: Verdict) -> bool:
        kept = self._verdicts.get(verdict.round)
        return kept is None or kept.chain != verdict.chain

    async def _take(self, verdict: Verdict) -> None:
        if verdict.round in self._verdicts:  # told to ourselves: each was checked as it came
            await self._prove(self._verdicts[verdict.round], verdict)
            return
        self._verdicts[verdict.round] = verdict
        for number in sorted(self._verdicts)[:-KEPT_VERDICTS]:
            del self._verdicts[number]
        await self._compare(verdict)

    async def _compare(self, verdict: Verdict) -> None:
        """Ask a member that nobody can foresee for its verdict of the round; show it ours if it has another one."""
        others = [peer for peer in self._node.trainers(self._client.scope) if peer != self._client.peer]
        if not others:
            return
        peer, wait_s, scope = self._random.choice(others), self._client.deadlines.request_s, self._client.scope
        ask = PeerToPeerCompareVerdict(round=verdict.round, chain=verdict.chain)
        try:
            other = (await self._node.ask(peer, ask, PeerToPeerOtherVerdict, wait_s, scope)).verdict
            if other is not None:
                await self._prove(verdict, other)
                await self._node.ask(peer, PeerToPeerShowVerdict(verdict=verdict), Acknowledged, wait_s, scope)
        except WireError as error:
            log.warning("%s claims another verdict of round %d and cannot show it: %s", peer, verdict.round, error)
        except LinkError as error:
            log.debug("the verdict of round %d was not compared with %s: %s", verdict.round, peer, error)

    async def _prove(self, ours: Verdict, other: Verdict) -> None:
        """Keep the proof that the two are, which ``run`` raises then. Raises ``WireError`` if they prove nothing."""
        client = self._client
        origin = HistoryOrigin(run_toml=client.run_toml, coordinator=client.coordinator, scope=client.scope)
        proof = ForkProof(origin, ours, other)
        await in_thread(proof.check)
        self._proof = self._proof or proof
        client.wake()

    async def _on_compare(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerCompareVerdict)
        self._check_sender(channel)
        ours = self._verdicts.get(message.round)
        return PeerToPeerOtherVerdict(verdict=None if ours is None or ours.chain == message.chain else ours)

    async def _on_show(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerShowVerdict)
        self._check_sender(channel)
        ours = self._verdicts.get(message.verdict.round)
        if ours is None or ours.chain == message.verdict.chain:
            return Acknowledged()
        if self._false_proofs[channel.remote_key] >= _FALSE_PROOFS:
            raise WireError("too many verdicts without a valid signature came from here")
        try:
            await self._prove(ours, message.verdict)
        except WireError:
            self._false_proofs[channel.remote_key] += 1
            raise
        return Acknowledged()

    def _check_sender(self, channel: Channel) -> None:
        if not self._node.knows_key(channel.remote_key):
            raise NotAdmitted("only members of the run compare verdicts with each other")

    def _report(self, proof: ForkProof) -> str:
        """Write the proof and return the error's message. For a worker thread."""
        try:
            where = f"Both are in {proof.write(self._folder)}: `shoal verify` shows that file to anybody"
        except OSError as error:
            where = f"They could not be written to {self._folder}: {error}"
        return (
            f"the coordinator has signed two verdicts of round {proof.first.round}, chain "
            f"{proof.first.chain.hex()[:8]} and {proof.second.chain.hex()[:8]}, so members train different models. "
            f"{where}. This peer stops, and keeps its checkpoints; ask the run's host"
        )
