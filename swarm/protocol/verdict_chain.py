"""The chain of verdicts: hashing, signing bytes, packing, and the check of a verdict."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgpack

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import verify_signature
from shoal.swarm.protocol.rounds import StateAgreement, Verdict
from shoal.swarm.protocol.signed_chain import check_record, record_hash
from shoal.swarm.protocol.types import MAX_TENSORS
from shoal.swarm.protocol.wire import MAX_MESSAGE_BYTES

_CONTEXT = b"shoal verdict, version 1\0"


_AGREEMENT = b"shoal agreement on the state, version 1\0"
_TOGETHER = b"shoal verdicts of all stages, version 1\0"


def genesis(run_hash: bytes, scope: int = 0) -> bytes:
    """The chain hash before the first round, of the run or of its stage ``scope - 1``."""
    stage = b"stage" + (scope - 1).to_bytes(4, "big") if scope else b""
    return hashlib.sha256(b"shoal chain, version 1\0" + run_hash + stage).digest()


def chain_hash(verdict: Verdict) -> bytes:
    """SHA-256 over all fields of a verdict, including the previous chain hash, except its own hash and signature."""
    return record_hash(verdict, _CONTEXT)


def tied_together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Put ``together``, SHA-256 over the verdicts of all stages on one round, into each of them.

    So the signature of each verdict covers all of them."""
    together = _together(verdicts)
    return [verdict.model_copy(update={"together": together}) for verdict in verdicts]


def are_all_stages(verdicts: Sequence[Verdict]) -> bool:
    """Whether these are the verdicts of all stages on one round, in order, by their ``together`` hashes."""
    together = _together(verdicts)
    return bool(verdicts) and all(verdict.together == together for verdict in verdicts)


def _together(verdicts: Sequence[Verdict]) -> bytes:
    bare = [verdict.model_copy(update={"together": None}) for verdict in verdicts]
    return hashlib.sha256(_TOGETHER + b"".join(chain_hash(verdict) for verdict in bare)).digest()


def signed_bytes(chain: bytes) -> bytes:
    """The bytes that the coordinator signs; the chain hash in them covers the verdict."""
    return _CONTEXT + chain


def agreement_bytes(anchor_version: int, digest: bytes, chain: bytes) -> bytes:
    """The bytes that the coordinator signs for an agreement on the state behind the verdict with this chain hash."""
    return _AGREEMENT + anchor_version.to_bytes(8, "big") + digest + chain


def check_agreement(agreement: StateAgreement, coordinator_key: bytes) -> None:
    """Check that the coordinator has signed an agreement on the state. Raises ``WireError`` if it has not."""
    signed = agreement_bytes(agreement.anchor_version, agreement.digest, agreement.chain)
    if not verify_signature(coordinator_key, agreement.signature, signed):
        raise WireError(f"the agreement on version {agreement.anchor_version} is not signed by the coordinator")


def pack_verdict(verdict: Verdict) -> bytes:
    """Encode a verdict for a file, as msgpack of all its fields; verdicts are written one after the other."""
    data: bytes = msgpack.packb(verdict.model_dump())
    return data


def unpack_verdicts(data: bytes | memoryview, start: int = 0) -> Iterator[tuple[Verdict, int]]:
    """Decode verdicts from offset ``start`` on, each with the offset of its end; stop at an incomplete one.

    Does not check hashes and signatures. Raises ``WireError`` for bytes that are not a verdict."""
    for body, end in unpack_maps(data, start):
        try:
            verdict = Verdict.model_validate(body)
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError(f"not a verdict: {type(error).__name__}") from error
        yield verdict, end


def unpack_maps(data: bytes | memoryview, start: int = 0) -> Iterator[tuple[object, int]]:
    """Decode msgpack values, each with the offset of its end; stop at an incomplete one. Raises ``WireError``."""
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
            raise WireError(f"not msgpack: {type(error).__name__}") from error
        yield value, start + unpacker.tell()


def check_verdict(verdict: Verdict, coordinator_key: bytes) -> None:
    """Check a verdict's hash and the coordinator's signature. Raises ``WireError`` if either is wrong."""
    check_record(verdict, coordinator_key, _CONTEXT, f"the verdict of round {verdict.round}", "the coordinator")
