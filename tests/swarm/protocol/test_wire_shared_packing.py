"""Views are packed from pieces that are packed once for everybody: what is read must be the whole."""

from typing import Any

import pytest
from hypothesis import given, settings
from tests.swarm.samples import records

from shoal.swarm.protocol.messages import CoordinatorToPeerJoinAccepted, CoordinatorToPeerView
from shoal.swarm.protocol.rounds import RunView, Verdict
from shoal.swarm.protocol.types import Message
from shoal.swarm.protocol.wire import Envelope, decode, encode


def told(message: Message) -> Message:
    """What a member reads of a message."""
    return decode(encode(Envelope("notice", 0, message))).message


@pytest.mark.parametrize("kind", [CoordinatorToPeerView, CoordinatorToPeerJoinAccepted])
def test_pieces_are_read_as_the_whole(kind: type[Message]) -> None:
    @settings(max_examples=50, deadline=None)
    @given(records(kind))
    def check(message: Any) -> None:
        assert told(message) == message
        again = message.model_copy(update={"view": message.view.model_copy(update={"sequence": 7})})
        assert told(again) == again

    check()


def packed(message: Message) -> bytes:
    return encode(Envelope("notice", 0, message))


@settings(max_examples=50, deadline=None)
@given(records(RunView), records(Verdict))
def test_a_changed_copy_is_packed_anew(view: Any, verdict: Any) -> None:
    for number in range(3):
        changed = verdict.model_copy(update={"round": number, "digests": (None,) * number})
        message = CoordinatorToPeerView(view=view.model_copy(update={"verdict": changed}))
        assert packed(message) == packed(message.model_copy(deep=True)), "of other objects, nothing is known"


@settings(max_examples=50, deadline=None)
@given(records(RunView))
def test_a_roster_with_one_entry_replaced_is_packed_anew(view: Any) -> None:
    for name in ("one", "other"):
        roster = tuple(entry.model_copy(update={"name": name}) for entry in (view.roster or ())[-1:])
        message = CoordinatorToPeerView(view=view.model_copy(update={"roster": (*(view.roster or ())[:-1], *roster)}))
        assert told(message) == message
