"""What copies of checkpoints there are at a URL, and which of them are brought back together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.peer.checkpoints.remote.listing import LAST_FILES, round_in
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.sealed_folder import ENVELOPE

_DEEPEST = 4  # URL / run / peer / stage / round
_SAID = 4
"""Rounds that a message names of each stage."""

_STAGE = re.compile(r"stage-([0-9]{5})")


@dataclass(frozen=True)
class Copy:
    """A checkpoint's folder at a URL, whole or not. ``last``: the file that lists the others; None where there is none,
    as in a copy that was not finished; ``stage``: of a pipeline, as the folder above it is named."""

    path: str
    run: str
    peer: str
    round: int
    size_bytes: int
    last: str | None
    stage: int | None = None

    @property
    def is_sealed(self) -> bool:
        return self.last == ENVELOPE


def find_copies(remote: RemoteStore) -> list[Copy]:
    """All below the URL, be it of a run, of a peer, of a stage, or of all; newest round first. Raises
    ``RemoteStorageError``."""
    found = _below(remote, "", _DEEPEST)
    return sorted(found, key=lambda copy: (-copy.round, copy.run, copy.peer, copy.stage or 0))


def _below(remote: RemoteStore, path: str, depth: int) -> list[Copy]:
    found = []
    for name in remote.folders(path):
        inside = f"{path}/{name}" if path else name
        number = round_in(name)
        if number is not None:
            sizes = remote.sizes(inside)
            last = next((one for one in reversed(LAST_FILES) if one in sizes), None)
            above = remote.shown(inside).split("/")[:-1]
            stage = _STAGE.fullmatch(above[-1])
            run, peer = (above[:-1] if stage else above)[-2:]
            size_bytes, in_stage = sum(sizes.values()), int(stage.group(1)) if stage else None
            found.append(Copy(inside, run, peer, number, size_bytes, last, in_stage))
        elif depth > 1:
            found += _below(remote, inside, depth - 1)
    return found


def by_preference(copies: Sequence[Copy], mine: str) -> list[Copy]:
    """Newest first, and of as new ones the peer's own."""
    return sorted(copies, key=lambda copy: (-copy.round, copy.peer != mine, copy.peer))


def stages_needed(copies: Sequence[Copy], mine: str) -> list[int]:
    """The stages that this peer has copied, as it held them; all that there are for one that has copied none."""
    own = {copy.stage for copy in copies if copy.peer == mine}
    return sorted({copy.stage for copy in copies if copy.stage is not None and (not own or copy.stage in own)})


def in_step(copies: Sequence[Copy]) -> Iterator[int]:
    """The rounds of which there is a finished copy of each stage that has any, newest first: the run goes on from a
    version that all its stages have."""
    yield from sorted(set.intersection(*map(set, _rounds(copies).values())), reverse=True)


def say_rounds(copies: Sequence[Copy]) -> str:
    """Of which rounds there are finished copies, of each stage if there are any."""
    said = []
    for stage, rounds in _rounds(copies).items():
        newest = [str(number) for number in sorted(rounds, reverse=True)]
        more = f" and {len(newest) - _SAID} older" if len(newest) > _SAID else ""
        which = ", ".join(newest[:_SAID]) + more if newest else "none that is finished"
        said.append(which if stage is None else f"stage {stage}: {which}")
    return "; ".join(said)


def _rounds(copies: Sequence[Copy]) -> dict[int | None, set[int]]:
    """Of the finished ones, by stage."""
    stages = sorted({copy.stage for copy in copies}, key=lambda stage: -1 if stage is None else stage)
    return {stage: {copy.round for copy in copies if copy.stage == stage and copy.last is not None} for stage in stages}
