"""The chain of verdicts: what is hashed and signed, and how anybody checks it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgpack

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import verify_signature
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import MAX_TENSORS
from shoal.swarm.protocol.wire import MAX_MESSAGE_BYTES

_CONTEXT = b"shoal verdict, version 1\0"


_TOGETHER = b"shoal verdicts of all stages, version 1\0"


def genesis(run_hash: bytes, scope: int = 0) -> bytes:
    """The chain before the first round: of the run, or of its stage ``scope - 1``."""
    stage = b"stage" + (scope - 1).to_bytes(4, "big") if scope else b""
    return hashlib.sha256(b"shoal chain, version 1\0" + run_hash + stage).digest()


def chain_hash(verdict: Verdict) -> bytes:
    """SHA-256 over the previous chain and everything the verdict says, but for its own hash and signature."""
    content = verdict.model_dump(exclude={"chain", "signature"})
    packed: bytes = msgpack.packb([sorted(content), [content[key] for key in sorted(content)]])
    return hashlib.sha256(_CONTEXT + packed).digest()


def tied_together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of all stages on one round, in their order, each with ``together``: SHA-256 over what all of them
    say. So each one's signature covers the others."""
    together = _together(verdicts)
    return [verdict.model_copy(update={"together": together}) for verdict in verdicts]


def are_all_stages(verdicts: Sequence[Verdict]) -> bool:
    """Whether these are the verdicts of all stages on one round, in their order: as each of them says."""
    together = _together(verdicts)
    return bool(verdicts) and all(verdict.together == together for verdict in verdicts)


def _together(verdicts: Sequence[Verdict]) -> bytes:
    bare = [verdict.model_copy(update={"together": None}) for verdict in verdicts]
    return hashlib.sha256(_TOGETHER + b"".join(chain_hash(verdict) for verdict in bare)).digest()


def signed_bytes(chain: bytes) -> bytes:
    """What the coordinator signs: the chain hash covers the rest."""
    return _CONTEXT + chain


def pack_verdict(verdict: Verdict) -> bytes:
    """Encode a verdict for a file: msgpack of all its fields. Several are written one after the other."""
    data: bytes = msgpack.packb(verdict.model_dump())
    return data


def unpack_verdicts(data: bytes | memoryview, start: int = 0) -> Iterator[tuple[Verdict, int]]:
    """Decode the verdicts from offset ``start`` on, each with the offset of its end; stops at an incomplete one.

    Hashes and signatures are not checked. Raises ``WireError`` for bytes that are no verdict."""
    for body, end in unpack_maps(data, start):
        try:
            verdict = Verdict.model_validate(body)
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError(f"no verdict: {type(error).__name__}") from error
        yield verdict, end


def unpack_maps(data: bytes | memoryview, start: int = 0) -> Iterator[tuple[object, int]]:
    """Decode msgpack values, each with the offset of its end; stops at an incomplete one. Raises ``WireError``."""
    unpacker = msgpack.Unpacker(
        use_list=False,
        strict_map_key=True,
        max_buffer_size=max(len(data), 1),
        max_array_len=MAX_TENSORS,
        max_map_len=64,
        max_ext_len=0,
        max_str_len=MAX_MESSAGE_BYTES,
        max_bin_len=MAX_MESSAGE_BYTES,
    )
    unpacker.feed(memoryview(data)[start:])
    while True:
        try:
            value = unpacker.unpack()
        except msgpack.OutOfData:
            return
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise WireError(f"no verdict: {type(error).__name__}") from error
        yield value, start + unpacker.tell()


def check_verdict(verdict: Verdict, coordinator_key: bytes) -> None:
    """Raises ``WireError`` when the hash or the coordinator's signature is wrong."""
    if chain_hash(verdict) != verdict.chain:
        raise WireError(f"the verdict of round {verdict.round} does not match its own hash")
    if not verify_signature(coordinator_key, verdict.signature, signed_bytes(verdict.chain)):
        raise WireError(f"the verdict of round {verdict.round} is not signed by the coordinator")
