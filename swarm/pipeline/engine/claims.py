"""Claims ledger of one peer: which micro-batches' gradients it has claimed and counted, by stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from shoal.swarm.pipeline.engine.effects import Claim, MicroBatch, Release, as_range
from shoal.swarm.sample_ranges import Ranges, covers, merge, within

_State = Literal["asked", "granted", "refused"]


class Claims:
    """Claims of one round, such that no sample counts twice in a stage.

    A micro-batch that overlaps samples already counted or claimed here passes through without being counted, even where
    the coordinator would grant it: to the coordinator, this peer is the one that has these samples."""

    def __init__(self) -> None:
        self._counted: dict[int, Ranges] = {}
        self._states: dict[tuple[int, MicroBatch], _State] = {}

    def counted(self, stage: int) -> Ranges:
        """Sample ranges in this stage's accumulated gradient."""
        return list(self._counted.get(stage, []))

    def ask(self, micro_batch: MicroBatch, stages: Iterable[int]) -> list[Claim]:
        """Claims still to be made for a micro-batch in these stages; nothing is asked twice."""
        claims = []
        for stage in stages:
            key = (stage, micro_batch)
            if key in self._states:
                continue
            if self._is_ours(stage, micro_batch):
                self._states[key] = "refused"
            else:
                self._states[key] = "asked"
                claims.append(Claim(stage, micro_batch))
        return claims

    def answered(self, claim: Claim, granted: Ranges, is_wanted: bool) -> list[Release]:
        """Take in an answer; returns what goes back, since a part of a micro-batch cannot count.

        ``is_wanted``: whether the micro-batch is still under way in that stage."""
        key = (claim.stage, claim.micro_batch)
        if self._states.get(key) != "asked":
            return []
        whole = covers(merge(granted), as_range(claim.micro_batch))
        if whole and is_wanted:
            self._states[key] = "granted"
            return []
        if is_wanted:
            self._states[key] = "refused"
        else:
            del self._states[key]
        return [Release(claim.stage, claim.micro_batch.round, tuple(granted))] if granted else []

    def is_settled(self, micro_batch: MicroBatch, stages: Iterable[int]) -> bool:
        """Whether all claims of a micro-batch in these stages were answered."""
        return all(self._states.get((stage, micro_batch)) in ("granted", "refused") for stage in stages)

    def count(self, micro_batch: MicroBatch, stages: Iterable[int]) -> frozenset[int]:
        """Count a micro-batch whose backward begins; returns the stages that accumulate its gradient."""
        granted = frozenset(stage for stage in stages if self._states.pop((stage, micro_batch), "refused") == "granted")
        for stage in granted:
            self._counted[stage] = merge([*self._counted.get(stage, []), *as_range(micro_batch)])
        return granted

    def give_up(self, micro_batch: MicroBatch) -> list[Release]:
        """Release the claims of an abandoned micro-batch. Those not answered yet go back when they are."""
        releases = []
        for stage, other in [key for key in self._states if key[1] == micro_batch]:
            state = self._states[stage, other]
            if state == "granted":
                releases.append(Release(stage, other.round, tuple(as_range(other))))
            if state != "asked":
                del self._states[stage, other]
        return releases

    def _is_ours(self, stage: int, micro_batch: MicroBatch) -> bool:
        claimed = [
            (other.start, other.stop)
            for (where, other), state in self._states.items()
            if where == stage and state != "refused"
        ]
        return any(
            within(ranges, micro_batch.start, micro_batch.stop) for ranges in (claimed, self._counted.get(stage, []))
        )
