"""A committed secure round as its auditors see it: what an owner has to show of a mean, and the mean that it gives.

An owner shows, of one chunk, the masked lanes of each member in the mean, each with its member's signature, and the
secrets that opened the part. Whoever has these sees the sums of that chunk by group, as the owner does, and no single
contribution. All of it is bound to what members had signed before anything could be opened: the verdict's sets and the
names of all that is summed, which the mean names, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.masked_chunks import LaneLayout, checked_lanes
from shoal.swarm.averaging.masked_means import encoded_mean, mean_of_sums
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.secure import KeysStatement, SignedSets, fewest_groups
from shoal.swarm.protocol.statements import PlanStatement, has_signed
from shoal.swarm.secure.groups import MaskingGroup
from shoal.swarm.secure.masks import add_masks, add_packed, packed_bytes
from shoal.swarm.secure.opening import is_secret, masks_of
from shoal.swarm.secure.round_keys import fault_of as fault_of_keys
from shoal.swarm.secure.shown_opening import ShownOpening, opening_bytes
from shoal.swarm.secure.signed_sets import fault_of as fault_of_sets
from shoal.swarm.secure.signed_sets import groups_of
from shoal.swarm.secure.sum_names import keys_digest, name_of_part, name_of_sum

_MOST_BITS = 16


def most_shown_bytes(store: ResultStore, chunk: int, header: ChunkHeader) -> int:
    """Return a bound on what is shown of a chunk, before the groups are known."""
    plan, layout = store.plan, LaneLayout(store)
    part = next(part for part in plan.parts if chunk in store.chunks_of(part))
    members = len(plan.members)
    proof = layout.chunk_bytes(part, chunk, members) - layout.packed_bytes(chunk, members)
    masked = packed_bytes(layout.lanes(chunk), _MOST_BITS) + proof
    return len(header.included) * masked + opening_bytes(members, members, len(plan.parts))


class MaskedRound:
    """A committed secure round. ``groups``: all its masking groups, in the order of the draw."""

    def __init__(self, store: ResultStore, about: PlanStatement, signed: SignedSets) -> None:
        """``store``: of the verdict's plan; ``signed``: the verdict's sets. For a worker thread."""
        self.groups = groups_of(about, store.plan, signed)
        self._store, self._about, self._signed = store, about, signed
        self._layout = LaneLayout(store)

    def chunk_bytes(self, part: int, chunk: int, member: int) -> int:
        """Return the size of a member's masked chunk."""
        group = next(group for group in self.groups if member in group.members)
        return self._layout.chunk_bytes(self._store.plan.parts[part], chunk, len(group.members))

    def opening_bytes(self, part: int, header: ChunkHeader) -> int:
        """Return the size of what is shown of the opening for a mean of these members."""
        senders = sum(len(group.among(self._signed.senders)) for group in self._opened(header))
        return opening_bytes(len(self._sums(part)), senders, len(self._store.plan.parts))

    def check_sets(self, part: int, header: ChunkHeader) -> None:
        """Raise ``WireError`` for a mean that is not one of the sums that members have signed for. For a worker
        thread."""
        plan, signed, included = self._store.plan, self._signed, header.included
        means = [included if index == part else () for index in range(len(plan.parts))]
        if fault := fault_of_sets(self._about, plan, signed, means):
            raise WireError(f"the verdict's sets are none: {fault}")
        if len(self._opened(header)) < fewest_groups(is_trimmed=plan.mean == "trimmed"):
            raise WireError("it is a mean of too few groups, which no member takes")
        if header.seal != signed.names[part]:
            raise WireError("it names other masked sums than the verdict's sets do, which no member takes")

    def mean_again(
        self,
        part: int,
        chunk: int,
        header: ChunkHeader,
        contributions: Mapping[int, memoryview],
        opening: bytes | memoryview,
    ) -> memoryview:
        """Return the result chunk that what is shown of it gives. For a worker thread.

        Raises ``WireError`` where not exactly that is shown which it says it includes, as its members have signed it:
        that proves nothing."""
        opened = self._opened(header)
        self.check_sets(part, header)
        senders = [one for group in opened for one in group.among(self._signed.senders)]
        shown = ShownOpening.unpack(opening, len(self._sums(part)), senders, len(self._store.plan.parts))
        lanes, roots = {}, {}
        for member, data in contributions.items():
            lanes[member], roots[member] = self._checked(part, chunk, member, data)
        if sorted(lanes) != header.included:
            raise WireError("not all the masked contributions are shown that the chunk includes, or others")
        self._check_opening(part, opened, roots, shown)
        sums = {}
        first_lane = self._layout.lanes(chunk - 1) if chunk > self._chunks(part).start else 0
        first_lane *= chunk - self._chunks(part).start  # all chunks but the last have as many
        for group in opened:
            mine, bits = group.among(header.included), self._layout.bits(len(group.members))
            total = np.zeros(self._layout.lanes(chunk), dtype="<u2")
            for member in mine:
                add_packed(lanes[member], bits, total)
            secrets = {one: shown.secrets[one] for one in group.among(self._signed.senders)}
            add_masks(total, masks_of(self._about, part, mine, shown.keys, secrets), first_lane)
            sums[group] = mine, total
        mean = mean_of_sums(self._store, self._layout, chunk, sums)
        return encoded_mean(self._store, chunk, mean, header).result

    def _chunks(self, part: int) -> range:
        return self._store.chunks_of(self._store.plan.parts[part])

    def _sums(self, part: int) -> list[MaskingGroup]:
        """Return the groups that have a sum of this part."""
        included = self._signed.sets[part] if part < len(self._signed.sets) else ()
        return [group for group in self.groups if group.among(included)]

    def _opened(self, header: ChunkHeader) -> list[MaskingGroup]:
        """Return the groups whose sums are in a mean."""
        return [group for group in self.groups if group.among(header.included)]

    def _checked(self, part: int, chunk: int, member: int, data: memoryview) -> tuple[memoryview, bytes]:
        """Return a member's masked lanes, and the root that it has signed."""
        chunks, plan = self._chunks(part), self._store.plan
        if member >= len(plan.members) or data.nbytes != self.chunk_bytes(part, chunk, member):
            raise WireError(f"the masked contribution of member {member} has {data.nbytes} bytes, which does not fit")
        group = next(group for group in self.groups if member in group.members)
        size = self._layout.packed_bytes(chunk, len(group.members))
        lanes, shown = checked_lanes(data, size, chunk - chunks.start, len(chunks))
        if not shown.is_of(self._about, part, member, plan.members[member]):
            raise WireError(f"the masked contribution of member {member} is not signed by it for this part")
        return lanes, shown.root

    def _check_opening(
        self, part: int, opened: list[MaskingGroup], roots: Mapping[int, bytes], shown: ShownOpening
    ) -> None:
        """Raise ``WireError`` unless the sums are named by these roots and keys, and the secrets are those of the
        keys."""
        plan, about, included = self._store.plan, self._about, self._signed.sets[part]
        for sender, keys in shown.keys.items():
            member, data = plan.members[sender], KeysStatement(about, sender, keys).bytes_to_sign()
            if fault_of_keys(keys, len(plan.parts)) or not has_signed(
                member.identity_key, member.peer, keys.signature, data
            ):
                raise WireError(f"the keys of member {sender} are not signed by it for this plan")
            if not is_secret(shown.secrets[sender], keys, part, is_in=sender in included):
                raise WireError(f"the secret of member {sender} is not that of its keys")
        if name_of_part(shown.names) != self._signed.names[part]:
            raise WireError("the sums have other names than the verdict's sets say")
        names = dict(zip(self._sums(part), shown.names, strict=True))
        for group in opened:
            mine = [(one, roots[one]) for one in group.among(included)]
            digests = [(one, keys_digest(about, one, shown.keys[one])) for one in group.among(self._signed.senders)]
            if names[group] != name_of_sum(about, part, mine, digests):
                raise WireError("a sum is of other roots or keys than its name says")
