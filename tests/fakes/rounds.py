"""Rounds that were never averaged: a plan, the results that somebody might have made, and a signed verdict on them."""

import hashlib
from collections.abc import Collection

import torch
from tests.fakes.memory_coordinator import identity

from shoal.compression.codec_map import CodecMap
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.results import ResultStore, chunks_of, part_digest
from shoal.swarm.protocol.rounds import RoundPlan, Verdict
from shoal.swarm.protocol.verdict_chain import chain_hash, genesis, signed_bytes

COORDINATOR = identity(1_000_000)
RUN_HASH = hashlib.sha256(b"a run").digest()


def results_of(plan: RoundPlan, codec_map: CodecMap, seed: int = 0, empty: Collection[int] = ()) -> list[memoryview]:
    """Return results with random means, which include all members; chunks in ``empty`` include none."""
    store, generator = ResultStore(plan, codec_map), torch.Generator().manual_seed(seed)
    everybody, chunks = ChunkHeader(store.group.members), []
    for chunk in range(store.chunks):
        start, stop = store.bounds(chunk)
        codec = store.codec(chunk)
        packed = torch.empty(codec.packed_bytes(stop - start), dtype=torch.uint8)
        zeros = torch.zeros(stop - start)
        codec.encode_residual(torch.randn(stop - start, generator=generator), zeros, zeros.clone(), packed)
        header = store.group.pack_header(ChunkHeader() if chunk in empty else everybody)
        chunks.append(memoryview(header + (b"" if chunk in empty else packed.numpy().tobytes())))
    return chunks


def verdict_on(plan: RoundPlan, chunks: list[memoryview], void: Collection[int] = ()) -> Verdict:
    """Return a signed verdict that commits all parts but those in ``void``."""
    digests = [
        None if index in void else part_digest(chunks[one] for one in chunks_of(plan, part))
        for index, part in enumerate(plan.parts)
    ]
    return signed(
        round=plan.round, committed=True, anchor_version=plan.anchor_version + 1, plan=plan, digests=tuple(digests)
    )


def signed(**fields: object) -> Verdict:
    """Return a signed verdict with these fields; all others are empty."""
    nothing = {
        "reason": "",
        "plan": None,
        "digests": (),
        "tokens": 0,
        "tokens_total": 0,
        "loss": None,
        "ended_s": 0.0,
        "sent_bytes": 0,
        "previous_chain": genesis(RUN_HASH),
        "chain": bytes(32),
        "signature": b"",
    }
    blank = Verdict.model_validate(nothing | fields)
    chain = chain_hash(blank)
    return blank.model_copy(update={"chain": chain, "signature": COORDINATOR.sign(signed_bytes(chain))})
