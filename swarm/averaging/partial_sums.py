"""Partial sums of a grid's rows: signed by the row reducers that make them, and named by the means that include them.

Each is signed by itself, as it is made, so that an owner includes nothing that it could not show afterwards, and waits
for nothing more than for the chunk. A mean names what it includes, or a row reducer that signs two partial sums of one
chunk could have an honest owner judged by the one that it was not given.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.protocol.rounds import PlanMember
from shoal.swarm.protocol.statements import PartialSumStatement, PlanSigner, PlanStatement, has_signed

_SUM, _SUMS = "shoal partial sum, version 1", "shoal included partial sums, version 1"


def sign_partial_sum(signer: PlanSigner, row: int, group: Group, chunk: int, data: memoryview) -> None:
    """Put our signature into a partial sum that we have made. ``group``: that row. For a worker thread."""
    data[group.bits_bytes : group.header_bytes] = signer.sign(_statement(signer.plan, row, group, chunk, data))


def is_signed(plan: PlanStatement, row_reducer: PlanMember, group: Group, chunk: int, data: memoryview) -> bool:
    """Whether the row reducer has signed this partial sum. ``group``: its row. For a worker thread."""
    if data.nbytes < group.header_bytes:
        return False
    statement, signature = _statement(plan, row_reducer.row, group, chunk, data), group.header(data).seal
    return has_signed(row_reducer.identity_key, row_reducer.peer, signature, statement.bytes_to_sign())


def name_of_sums(partial_sums: Sequence[memoryview]) -> bytes:
    """Return the 32 bytes by which a mean names the partial sums in it, in the order of rows, with their signatures.

    Not the signatures alone: of some keys, one signature fits many messages. For a worker thread."""
    each = [blake3(one, derive_key_context=_SUM).digest() for one in partial_sums]
    return blake3(b"".join(each), derive_key_context=_SUMS).digest()


def _statement(plan: PlanStatement, row: int, group: Group, chunk: int, data: memoryview) -> PartialSumStatement:
    digest = blake3(data[: group.bits_bytes], derive_key_context=_SUM)
    digest.update(data[group.header_bytes :])
    return PartialSumStatement(plan.name, plan.plan, row, chunk, digest.digest())
