"""Chain of a run's verdicts, checked from the first one on, and the format in which files keep it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgpack
from pydantic import Field

from shoal.swarm.errors import LinkError, RunFileError, StateFileError, WireError
from shoal.swarm.protocol.identity import verify_certificate
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import MAX_RUN_FILE_BYTES, parse_run_file
from shoal.swarm.protocol.types import Certificate, Record, Scope
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis, pack_verdict, unpack_maps
from shoal.swarm.protocol.verdict_chain import unpack_verdicts as unpack_each_verdict


class Origin(Record):
    """The head of a history's file: whose it is. The run file's text has the run's name and hash; the certificate the
    identity that signs the verdicts, and the key that invites name. ``scope``: whose rounds, the run's or a stage's."""

    format: Literal[1] = 1
    run_toml: str = Field(max_length=MAX_RUN_FILE_BYTES)
    coordinator: Certificate
    scope: Scope = 0

    @property
    def run(self) -> str:
        return parse_run_file(self.run_toml).run.name

    @property
    def run_hash(self) -> bytes:
        return parse_run_file(self.run_toml).hash


# The chain --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """Summary of a checked chain. ``first`` and ``rounds``: of the first verdict, and after the last one;
    ``anchor_version`` and ``tokens_total`` as of the last one, which may have gone back."""

    first: int
    rounds: int
    committed: int
    aborted: int
    anchor_version: int
    tokens_total: int
    chain: bytes


class ChainCheck:
    """Takes verdicts of one scope one by one, oldest first. ``whole``: from the run's first round on; otherwise the
    first verdict is believed on its signature alone."""

    def __init__(self, run_hash: bytes, coordinator_key: bytes, *, scope: int = 0, whole: bool = True) -> None:
        self.chain = Chain(0, 0, 0, 0, 0, 0, genesis(run_hash, scope))
        self._key = coordinator_key
        self._begins_anywhere = not whole

    def take(self, verdict: Verdict) -> None:
        """Raises ``StateFileError`` naming the round, and has taken nothing then."""
        before = self.chain
        starts_here = self._begins_anywhere and verdict.round > 0
        expected = verdict.round if starts_here else before.rounds
        if verdict.round != expected:
            raise StateFileError(f"the verdict of round {expected} is missing: that of round {verdict.round} is there")
        if verdict.previous_chain != before.chain and not starts_here:
            raise StateFileError(
                f"the verdict of round {verdict.round} does not go on from the one before: the chain is broken there"
            )
        try:
            check_verdict(verdict, self._key)
        except WireError as error:
            raise StateFileError(str(error)) from error
        self.chain = Chain(
            first=verdict.round if starts_here else before.first,
            rounds=verdict.round + 1,
            committed=before.committed + verdict.committed,
            aborted=before.aborted + (not verdict.committed),
            anchor_version=verdict.anchor_version,
            tokens_total=verdict.tokens_total,
            chain=verdict.chain,
        )
        self._begins_anywhere = False


def check_chain(
    verdicts: Iterable[Verdict], run_hash: bytes, coordinator_key: bytes, *, scope: int = 0, whole: bool = True
) -> Chain:
    """Every hash, every signature (Ed25519, RFC 8032), every link, from the run's beginning (unless not ``whole``).

    Raises ``StateFileError`` naming the first round that is wrong."""
    check = ChainCheck(run_hash, coordinator_key, scope=scope, whole=whole)
    for verdict in verdicts:
        check.take(verdict)
    return check.chain


# Bytes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """Offset from which a file cannot be read. ``is_end``: a writer is in the midst of a record, or was killed."""

    offset: int
    is_end: bool
    reason: str


@dataclass(frozen=True)
class Unpacked:
    """Verdicts, nothing of them checked; ``ends``: the offset after each; ``damage``: what ends them."""

    verdicts: tuple[Verdict, ...]
    ends: tuple[int, ...]
    damage: Damage | None


@dataclass(frozen=True)
class Kept(Unpacked):
    """Contents of a history file, of which only the head has been checked."""

    origin: Origin
    head_bytes: int


def pack_history(origin: Origin, verdicts: Iterable[Verdict]) -> bytes:
    """The head and the verdicts, one msgpack map after the other."""
    return b"".join([pack_head(origin), *map(pack_verdict, verdicts)])


def pack_head(origin: Origin) -> bytes:
    data: bytes = msgpack.packb(origin.model_dump())
    return data


def unpack_history(data: bytes, place: str) -> Kept:
    """Unpack the output of ``pack_history`` where possible. Raises ``StateFileError`` for the head of no history."""
    try:
        body, head_bytes = next(unpack_maps(data))
        origin = Origin.model_validate(body)
        verify_certificate(origin.coordinator)
        parse_run_file(origin.run_toml, place)
    except RunFileError as error:
        raise StateFileError(f"{place}: field run_toml: {error}") from error
    except (ValueError, TypeError, StopIteration, LinkError) as error:
        raise StateFileError(f"{place}: its head is not that of a run's history: {type(error).__name__}") from error
    rest = unpack_verdicts(data, head_bytes)
    return Kept(rest.verdicts, rest.ends, rest.damage, origin, head_bytes)


def unpack_verdicts(data: bytes, start: int = 0) -> Unpacked:
    """The verdicts from offset ``start`` on, as far as they can be read."""
    verdicts: list[Verdict] = []
    ends = [start]
    damage = None
    try:
        for verdict, end in unpack_each_verdict(data, start):
            verdicts.append(verdict)
            ends.append(end)
        if ends[-1] < len(data):
            damage = Damage(ends[-1], is_end=True, reason="its last record is not whole")
    except WireError as error:
        damage = Damage(ends[-1], is_end=False, reason=str(error))
    return Unpacked(tuple(verdicts), tuple(ends[1:]), damage)
