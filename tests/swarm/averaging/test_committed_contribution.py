"""Validators, and nobody else, get whole contributions to committed rounds, each leaf checked against the root."""

import asyncio
from pathlib import Path

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork, Step, changed, dripping
from tests.fakes.virtual_clock import now_s, run_virtual
from tests.swarm.averaging.test_contribution import ELEMENTS, begun

from shoal.swarm.averaging import spooled_chunks
from shoal.swarm.averaging.committed_contribution import (
    CommittedContribution,
    PartialContribution,
    fetch_contribution,
)
from shoal.swarm.errors import BlobUnavailable, Busy, DeadlineExceeded, WireError

MEMBER, VALIDATOR, STRANGER = "m" * 16, "v" * 16, "s" * 16
PROGRESS_S, LIMIT_S = 5.0, 6.5


def may_read(reader: bytes) -> bool:
    return reader in (VALIDATOR.encode(), b"another validator", b"a third one")


async def kept(folder: Path | None = None) -> tuple[MemoryNetwork, CommittedContribution, bytes, torch.Tensor]:
    """A member that offers its contribution to round 5; its root and values."""
    contribution, grid, feedback, buffers = await begun()
    source = CommittedContribution(5, grid, may_read, folder)
    source.keep(contribution)
    values = torch.empty(ELEMENTS)
    for leaf in range(grid.leaves):
        start, stop = grid.bounds(leaf)
        packed = grid.checked(contribution.root, start, stop, contribution.chunk(start, stop, buffers))
        grid.codec(leaf).decode(packed, stop - start, values[start:stop])
    feedback.commit()  # its round is over
    network = MemoryNetwork()
    network.endpoint(MEMBER).publish(source.blob, source)
    return network, source, contribution.root, values


def files_in(folder: Path) -> list[Path]:
    return list(folder.glob("**/*"))


async def fetched(
    network: MemoryNetwork,
    source: CommittedContribution,
    root: bytes,
    who: str,
    partial: PartialContribution | None = None,
) -> torch.Tensor:
    partial = partial or PartialContribution(source._grid)
    return await fetch_contribution(network.endpoint(who), MEMBER, 5, root, partial, PROGRESS_S, LIMIT_S)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_validator_gets_what_was_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_file: bool) -> None:
    monkeypatch.setattr(spooled_chunks, "_MEMORY_BYTES", 1 if in_file else 2**24)

    async def main() -> None:
        folder = tmp_path / "not there yet"
        network, source, root, values = await kept(folder)
        assert (await fetched(network, source, root, VALIDATOR)).equal(values)
        assert files_in(tmp_path) == [folder], "files without names"
        source.close()
        with pytest.raises(BlobUnavailable, match="not kept any more"):
            await fetched(network, source, root, VALIDATOR)

    run_virtual(main())


def test_others_get_nothing() -> None:
    async def main() -> None:
        network, source, root, _ = await kept()
        with pytest.raises(BlobUnavailable, match="only validators"):
            await fetched(network, source, root, STRANGER)

    run_virtual(main())


def test_two_validators_at_once_and_one_stream_each() -> None:
    async def main() -> None:
        _, source, _, _ = await kept()
        source.begin_reading(VALIDATOR.encode())
        with pytest.raises(Busy):
            source.begin_reading(VALIDATOR.encode())
        source.begin_reading(b"another validator")
        with pytest.raises(Busy):
            source.begin_reading(b"a third one")
        source.end_reading(VALIDATOR.encode())
        source.begin_reading(b"a third one")

    asyncio.run(main())


@pytest.mark.parametrize(
    "change", [lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1], lambda data: data + b"\0"]
)
def test_other_bytes_than_were_committed_are_refused(change) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        network, source, root, _ = await kept()
        network.faults.append(changed("committed", MEMBER, change))
        with pytest.raises(WireError):
            await fetched(network, source, root, VALIDATOR)

    run_virtual(main())


def test_a_member_that_shows_it_leaf_by_leaf_holds_no_validator_up() -> None:
    async def main() -> None:
        network, source, root, _ = await kept()
        every_s = PROGRESS_S / 4
        assert source.chunks * every_s > LIMIT_S
        network.faults.append(dripping("committed", MEMBER, every_s))
        began_s = now_s()
        with pytest.raises(DeadlineExceeded, match="within 6 s"):
            await fetched(network, source, root, VALIDATOR)
        assert now_s() - began_s == pytest.approx(LIMIT_S)

    run_virtual(main())


def test_of_a_slow_member_the_next_attempt_gets_the_rest() -> None:
    async def slow(step: Step, payload: bytes) -> bytes:
        await asyncio.sleep(PROGRESS_S / 4)
        return payload

    async def main() -> None:
        network, source, root, values = await kept()
        network.faults.append(slow)
        partial = PartialContribution(source._grid)
        for _ in range(source.chunks):
            had = partial.leaves
            try:
                whole = await fetched(network, source, root, VALIDATOR, partial)
            except DeadlineExceeded:
                assert had < partial.leaves < source.chunks
            else:
                assert whole.equal(values)
                assert had, "not the first attempt"
                return
        raise AssertionError("the whole contribution never came")

    run_virtual(main(), horizon_s=100.0)


def test_a_contribution_that_cannot_be_kept_costs_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled_chunks, "_MEMORY_BYTES", 1)

    async def main() -> None:
        (tmp_path / "a file").touch()
        network, source, root, _ = await kept(tmp_path / "a file")
        with pytest.raises(BlobUnavailable, match="not kept"):
            await fetched(network, source, root, VALIDATOR)

    run_virtual(main())
