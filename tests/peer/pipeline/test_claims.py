"""Tests of pipeline/claims: claims in order and together, and requests for new samples to drive."""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.fakes.virtual_clock import run_virtual

from shoal.peer.pipeline.claims import ClaimQueue, DriveRequests
from shoal.swarm.errors import NotAdmitted
from shoal.swarm.pipeline.engine.effects import AskToDrive, Claim, MicroBatch, Release
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerClaimed,
    CoordinatorToPeerLease,
    PeerToCoordinatorClaim,
    PeerToCoordinatorDrive,
    PeerToCoordinatorRelease,
)
from shoal.swarm.protocol.types import Message
from shoal.swarm.sample_ranges import Ranges, from_wire, to_wire


class Coordinator:
    """What the client of one scope is to whoever asks; ``answer`` decides."""

    def __init__(self, answer: Callable[[Message], Message]) -> None:
        self.asked: list[Message] = []
        self._answer = answer

    async def ask(self, message: Message, reply: type[Message]) -> Message:
        self.asked.append(message)
        await asyncio.sleep(0.1)
        return self._answer(message)


def claim(start: int, stop: int, round_number: int = 1) -> Claim:
    return Claim(0, MicroBatch(round_number, start, stop))


def claimed(asked: list[Claim | Release], granted: Ranges) -> tuple[list[Message], dict[MicroBatch, Ranges]]:
    """What is asked, and what each claim hears, when those samples are free."""

    def answer(message: Message) -> Message:
        if isinstance(message, PeerToCoordinatorClaim):
            return CoordinatorToPeerClaimed(
                ranges=tuple(one for one in message.ranges if (one.start, one.stop) in granted)
            )
        return Acknowledged()

    async def main() -> tuple[list[Message], dict[MicroBatch, Ranges]]:
        heard: dict[MicroBatch, Ranges] = {}
        client: Any = Coordinator(answer)
        line = ClaimQueue(client, lambda of, ranges: heard.__setitem__(of.micro_batch, ranges))
        for one in asked:
            line.put(one)
        running = asyncio.create_task(line.send_queued())
        await asyncio.sleep(10.0)
        running.cancel()
        return client.asked, heard

    return run_virtual(main())


def test_claims_that_wait_together_are_asked_together() -> None:
    asked, heard = claimed([claim(0, 4), claim(4, 8), claim(12, 16)], [(0, 4), (12, 16)])
    assert asked == [PeerToCoordinatorClaim(round=1, ranges=to_wire([(0, 4), (4, 8), (12, 16)]))]
    assert heard == {
        MicroBatch(1, 0, 4): [(0, 4)],
        MicroBatch(1, 4, 8): [],
        MicroBatch(1, 12, 16): [(12, 16)],
    }


def test_claims_and_releases_keep_their_order() -> None:
    release = Release(0, 1, ((0, 4),))
    asked, _ = claimed([claim(0, 4), release, claim(0, 4), claim(8, 12)], [(0, 4), (8, 12)])
    assert [type(one) for one in asked] == [PeerToCoordinatorClaim, PeerToCoordinatorRelease, PeerToCoordinatorClaim]
    assert from_wire(asked[2].ranges) == [(0, 4), (8, 12)]  # type: ignore[attr-defined]


def test_claims_of_the_same_samples_or_of_two_rounds_are_asked_apart() -> None:
    asked, heard = claimed([claim(0, 4), claim(0, 8), claim(8, 12, 2)], [(0, 4), (0, 8), (8, 12)])
    assert [from_wire(one.ranges) for one in asked] == [[(0, 4)], [(0, 8)], [(8, 12)]]  # type: ignore[attr-defined]
    assert len(heard) == 3


def test_who_is_not_in_the_stage_any_more_is_granted_nothing() -> None:
    async def main() -> None:
        def refuse(message: Message) -> Message:
            raise NotAdmitted("for the test")

        heard: list[Ranges] = []
        client: Any = Coordinator(refuse)
        line = ClaimQueue(client, lambda of, ranges: heard.append(ranges))
        running = asyncio.create_task(line.send_queued())
        line.put(Release(0, 1, ((4, 8),)))
        line.put(claim(0, 4))
        await asyncio.sleep(10.0)
        assert heard == [[]]
        running.cancel()

    run_virtual(main())


def drive(*turns: tuple[AskToDrive, Ranges | None]) -> tuple[list[PeerToCoordinatorDrive], list[Ranges]]:
    """What is asked, and what is new in the answers; None: it is refused."""

    async def main() -> tuple[list[Any], list[Ranges]]:
        answers = iter(held for _, held in turns)

        def answer(message: Message) -> Message:
            held = next(answers)
            if held is None:
                raise NotAdmitted("for the test")
            return CoordinatorToPeerLease(ranges=to_wire(held))

        client: Any = Coordinator(answer)
        line = DriveRequests(client)
        return client.asked, [await line.request_samples(ask) for ask, _ in turns]

    return run_virtual(main())


def test_only_new_samples_are_to_be_driven_and_what_is_under_way_is_asked_for_too() -> None:
    asked, new = drive(
        (AskToDrive(1, 8, ()), [(0, 4), (4, 8)]),
        (AskToDrive(1, 4, ((0, 4),)), [(4, 8), (8, 12)]),
        (AskToDrive(1, 4, ()), [(4, 8), (8, 12)]),
    )
    assert [one.samples for one in asked] == [8, 4 + 4, 8 + 4]
    assert [from_wire(one.done) for one in asked] == [[], [(0, 4)], []]
    assert new == [[(0, 8)], [(8, 12)], []]


def test_what_was_done_and_is_named_again_is_driven_again() -> None:
    _, new = drive((AskToDrive(1, 4, ()), [(0, 4)]), (AskToDrive(1, 4, ((0, 4),)), [(0, 4)]))
    assert new == [[(0, 4)], [(0, 4)]]


def test_a_new_round_and_a_lost_membership_begin_with_nothing() -> None:
    asked, new = drive(
        (AskToDrive(1, 4, ()), [(0, 4)]),
        (AskToDrive(2, 4, ()), [(4, 8)]),
        (AskToDrive(2, 4, ()), None),
        (AskToDrive(2, 4, ()), [(4, 8)]),
    )
    assert [one.samples for one in asked] == [4, 4, 8, 4]
    assert new == [[(0, 4)], [(4, 8)], [], [(4, 8)]]
