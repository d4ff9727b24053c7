"""Requests for what a member did in a round: what it answers is bounded, and its failure is not the coordinator's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.swarm.coordinator.test_path_requests import OBSERVER, PUBLIC, WALLED, ask, served
from tests.swarm.coordinator.world import entry

from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import DeadlineExceeded, LinkError, Removed, ShoalError, StorageError, TryLater, Unreachable
from shoal.swarm.protocol.messages import CoordinatorToPeerSpans, PeerToCoordinatorGetSpans, PeerToCoordinatorSpans
from shoal.swarm.protocol.timing import PhaseSpan
from shoal.swarm.protocol.types import MAX_SECONDS

SPAN = PhaseSpan(track="training", phase="compute", start_s=MAX_SECONDS, seconds=1.0)
WISH = PeerToCoordinatorGetSpans(peer=entry(WALLED).peer, round=3)


def answering(service: CoordinatorService, answer: PeerToCoordinatorSpans | ShoalError) -> None:
    """Have every member answer so."""

    async def request(*question: Any) -> PeerToCoordinatorSpans:
        if isinstance(answer, ShoalError):
            raise answer
        return answer

    service.node.control.incoming = lambda key: SimpleNamespace(request=request)  # type: ignore[method-assign, assignment, return-value]


def test_spans_stay_in_range_whatever_clock_a_member_names(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        for now_s in (0.0, MAX_SECONDS):
            answering(service, PeerToCoordinatorSpans(spans=(SPAN,), now_s=now_s))
            told = await ask(service, OBSERVER, WISH)
            CoordinatorToPeerSpans.model_validate(told.model_dump())

    served(tmp_path, main)


@pytest.mark.parametrize("error", [DeadlineExceeded("x"), Unreachable("x"), Removed("x"), StorageError("x")])
def test_a_members_failure_does_not_look_like_the_coordinators(tmp_path: Path, error: ShoalError) -> None:
    async def main(service: CoordinatorService) -> None:
        answering(service, error)
        with pytest.raises(LinkError, match="does not say") as caught:
            await ask(service, OBSERVER, WISH)
        assert type(caught.value) is LinkError, "after others a client waits for the coordinator, or ends"
        assert service.spans_asked == 0

    served(tmp_path, main)


def test_a_member_is_asked_so_often_whoever_asks(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        answering(service, PeerToCoordinatorSpans(spans=(), now_s=1.0))
        answered = 0
        for number in (OBSERVER, PUBLIC) * 100:
            try:
                await ask(service, number, WISH)
            except TryLater:
                break
            answered += 1
        assert 32 <= answered < 100
        service.spans_asked = 32
        with pytest.raises(TryLater):
            await ask(service, OBSERVER, PeerToCoordinatorGetSpans(peer=entry(PUBLIC).peer, round=3))

    served(tmp_path, main)
