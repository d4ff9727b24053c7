"""One engine, event by event: what it answers, computes, counts, sends again and keeps."""

from __future__ import annotations

from typing import TypeVar

import pytest
from tests.swarm.pipeline.turns import Turns

from shoal.swarm.pipeline.engine.effects import (
    AskToDrive,
    Claim,
    Compute,
    ComputeBackward,
    ComputeForward,
    Drop,
    DropRound,
    Effect,
    Fetch,
    MicroBatch,
    MicroBatchDone,
    PeerNote,
    Release,
    Reply,
    Send,
    TensorOffer,
)
from shoal.swarm.pipeline.engine.engine import EngineSettings, StageEngine, StageSpan
from shoal.swarm.pipeline.engine.micro_batch_source import cut_micro_batches
from shoal.swarm.sample_ranges import Ranges

ROUND = 5
RETRY_S, PATIENCE_S = 2.0, 30.0
T = TypeVar("T", bound=Effect)


def batch(index: int, round_number: int = ROUND) -> MicroBatch:
    return MicroBatch(round_number, 2 * index, 2 * index + 2)


def as_range(micro_batch: MicroBatch) -> Ranges:
    return [(micro_batch.start, micro_batch.stop)]


def activation(index: int, sender: str = "up", attempt: int = 1, stage: int = 1, number: int = 7) -> TensorOffer:
    return TensorOffer("activation", sender, batch(index), stage, attempt, number)


class Peer:
    """An engine whose effects are collected, and short ways to bring it somewhere."""

    def __init__(self, first: int = 1, last: int = 1, stages: int = 3, in_flight: int = 2, begin: bool = True) -> None:
        settings = EngineSettings(stages, 2, in_flight, RETRY_S, PATIENCE_S)
        self.stage = first
        self.router = Turns(PATIENCE_S, RETRY_S)
        self.engine = StageEngine(StageSpan(first, last), settings, self.router, first_number=100)
        self.now_s = 0.0
        self.last: list[Effect] = []
        self.all: list[Effect] = []
        if begin:
            self.do("round_opened", ROUND)
            if last + 1 < stages:
                self.do("replicas_changed", last + 1, {"down": None, "other": None})

    def do(self, event: str, *arguments: object) -> list[Effect]:
        self.last = getattr(self.engine, event)(*arguments, self.now_s)
        self.all += self.last
        assert self.engine.kept_activations <= self.engine.settings.max_in_flight
        assert len(self.engine._outbox) <= self.engine.settings.max_in_flight
        return self.last

    def only(self, kind: type[T]) -> T:
        (found,) = self.some(kind)
        return found

    def some(self, kind: type[T]) -> list[T]:
        return [effect for effect in self.last if isinstance(effect, kind)]

    def ever(self, kind: type[T]) -> list[T]:
        return [effect for effect in self.all if isinstance(effect, kind)]

    def answer(self, offer: TensorOffer) -> str:
        self.do("offered", offer)
        return self.only(Reply).answer

    def arrive(self, index: int, sender: str = "up", attempt: int = 1) -> list[Effect]:
        """Its input is here."""
        assert self.answer(activation(index, sender, attempt, stage=max(1, self.stage))) == "accepted"
        return self.do("tensor_arrived", self.only(Fetch))

    def forward(self, index: int) -> Send:
        """Offered, fetched, computed and sent on; the engine must be idle before."""
        self.arrive(index)
        self.do("computed", self.only(ComputeForward))
        return self.only(Send)

    def gradient(self, sent: Send, granted: bool = True) -> list[Effect]:
        """The gradient for what was sent comes back, and the claims are answered."""
        self.do("offered", self.gradient_of(sent))
        assert self.only(Reply).answer == "accepted"
        fetch, claims = self.only(Fetch), self.some(Claim)
        for claim in claims:
            self.do("claim_answered", claim, as_range(claim.micro_batch) if granted else [])
        return self.do("tensor_arrived", fetch)

    @staticmethod
    def gradient_of(sent: Send) -> TensorOffer:
        return TensorOffer("gradient", sent.peer, sent.micro_batch, sent.stage - 1, sent.attempt, 55)

    def backward(self, index: int) -> Send:
        """All the way, until the gradient is offered to the one before."""
        self.gradient(self.forward(index))
        self.do("computed", self.only(ComputeBackward))
        return self.only(Send)


def test_a_micro_batch_goes_forward_and_back() -> None:
    peer = Peer()
    assert peer.answer(activation(0)) == "accepted"
    fetch = peer.only(Fetch)
    assert (fetch.peer, fetch.number, fetch.job) == ("up", 7, 100)
    peer.do("tensor_arrived", fetch)
    assert peer.only(ComputeForward) == ComputeForward(100, batch(0), 1)
    peer.do("computed", peer.only(ComputeForward))
    sent = peer.only(Send)
    assert sent == Send("activation", "down", batch(0), 2, 1, 100)
    peer.gradient(sent)
    assert peer.only(ComputeBackward).accumulate == {1}
    assert peer.ever(PeerNote) == [PeerNote("taken", "down", batch(0), 2, 1)]
    peer.do("computed", peer.only(ComputeBackward))
    assert peer.last == [Send("gradient", "up", batch(0), 0, 1, 100)]
    assert peer.engine.kept_activations == 0
    assert len(peer.engine._outbox) == 1
    peer.do("noted", PeerNote("taken", "up", batch(0), 1, 1))
    assert peer.last == [Drop(100)]
    assert len(peer.engine._outbox) == 0
    assert peer.engine.counted(1) == as_range(batch(0))


# Accepting ----------------------------------------------------------------------------------------------------


def test_more_than_max_in_flight_is_busy_until_there_is_room() -> None:
    peer = Peer(in_flight=2)
    sent = peer.forward(0)
    peer.arrive(1)
    assert peer.answer(activation(2, sender="left")) == "busy"
    peer.do("computed", peer.ever(ComputeForward)[-1])
    peer.gradient(sent)
    assert not peer.some(PeerNote)[1:]
    peer.do("computed", peer.only(ComputeBackward))
    assert [(note.kind, note.peer) for note in peer.some(PeerNote)] == [("slot_free", "left")]
    # The place is held for the one who waited, but not for ever.
    assert peer.answer(activation(3)) == "busy"
    assert peer.answer(activation(2, sender="left", attempt=2)) == "accepted"
    peer.now_s += RETRY_S
    assert peer.answer(activation(3, attempt=2)) == "busy"


def test_a_held_place_is_free_again_after_a_while() -> None:
    peer = Peer(in_flight=1)
    sent = peer.forward(0)
    assert peer.answer(activation(2, sender="left")) == "busy"
    peer.gradient(sent)
    peer.do("computed", peer.only(ComputeBackward))
    assert peer.answer(activation(3)) == "busy"
    peer.now_s += RETRY_S
    assert peer.answer(activation(3, attempt=2)) == "accepted"


@pytest.mark.parametrize("full", [False, True])
def test_the_same_offer_twice_is_answered_the_same_and_done_once(full: bool) -> None:
    peer = Peer(in_flight=1)
    if full:
        peer.arrive(5)
    first = peer.answer(activation(0))
    assert first == ("busy" if full else "accepted")
    before = len(peer.ever(Fetch))
    if full:
        peer.do("noted", PeerNote("cancel", "up", batch(5), 1, 1))
    assert peer.answer(activation(0)) == first
    assert len(peer.ever(Fetch)) == before


def test_an_offer_that_arrives_once_more_after_all_is_done_costs_nothing() -> None:
    peer = Peer()
    peer.backward(0)
    peer.do("noted", PeerNote("taken", "up", batch(0), 1, 1))
    assert peer.answer(activation(0)) == "accepted"
    assert not peer.some(Fetch)
    assert peer.engine.kept_activations == 0


def test_a_newer_attempt_supersedes_and_an_older_one_is_outdated() -> None:
    peer = Peer()
    sent = peer.forward(0)
    assert peer.answer(activation(0, attempt=3)) == "accepted"
    assert peer.answer(activation(0, attempt=2)) == "outdated"
    assert peer.answer(activation(0, sender="new driver", attempt=1)) == "accepted"
    peer.gradient(sent)
    peer.do("computed", peer.only(ComputeBackward))
    assert [(one.peer, one.attempt) for one in peer.some(Send)] == [("up", 3), ("new driver", 1)]
    assert len(peer.ever(ComputeForward)) == len(peer.ever(ComputeBackward)) == len(peer.ever(Fetch)) / 2 == 1


def test_the_same_micro_batch_from_another_stage_waits() -> None:
    peer = Peer(first=1, last=2, stages=4)
    peer.arrive(0)
    assert peer.answer(activation(0, sender="left", stage=2)) == "busy"
    assert not peer.some(PeerNote)  # a place would not help


def test_stages_that_we_do_not_hold_are_refused() -> None:
    assert Peer().answer(activation(0, stage=2)) == "outdated"
    assert Peer(first=0).answer(activation(0, stage=0)) == "outdated"


def test_other_rounds_are_refused() -> None:
    peer = Peer(begin=False)
    assert peer.answer(activation(0)) == "busy"  # the round begins elsewhere before it begins here
    peer.do("round_opened", ROUND)
    peer.do("round_over")
    assert peer.answer(activation(0)) == "outdated"
    peer.do("round_opened", ROUND + 1)
    assert peer.answer(activation(0, attempt=2)) == "outdated"
    assert peer.answer(TensorOffer("gradient", "down", batch(0), 1, 1, 1)) == "outdated"
    assert peer.answer(TensorOffer("activation", "up", batch(0, ROUND + 2), 1, 1, 1)) == "busy"


def test_an_input_that_cannot_be_fetched_is_given_back() -> None:
    peer = Peer()
    peer.answer(activation(0))
    peer.do("fetch_failed", peer.only(Fetch))
    assert peer.some(PeerNote) == [PeerNote("abandoned", "up", batch(0), 0, 1)]
    assert peer.some(Drop) == [Drop(100)]
    assert peer.engine.kept_activations == 0
    assert peer.answer(activation(0, attempt=2)) == "accepted"


def test_an_input_is_fetched_from_whoever_has_it_still() -> None:
    peer = Peer()
    peer.answer(activation(0))
    fetch = peer.only(Fetch)
    peer.answer(activation(0, sender="second", number=9))
    peer.do("fetch_failed", fetch)
    assert (peer.only(Fetch).peer, peer.only(Fetch).number) == ("second", 9)
    peer.do("tensor_arrived", peer.only(Fetch))
    assert peer.only(ComputeForward).micro_batch == batch(0)


def test_an_upstream_that_began_anew_is_asked_for_its_new_number() -> None:
    peer = Peer()
    peer.answer(activation(0, number=7))
    old = peer.only(Fetch)
    assert peer.answer(activation(0, attempt=2, number=8)) == "accepted"
    assert peer.only(Fetch).number == 8
    peer.do("tensor_arrived", old)
    assert not peer.last


# Order --------------------------------------------------------------------------------------------------------


def test_backward_work_comes_first_then_the_oldest_forward() -> None:
    peer = Peer(in_flight=3)
    sent = peer.forward(0)
    peer.arrive(1)
    running = peer.only(ComputeForward)
    peer.arrive(2)
    peer.gradient(sent)
    assert not peer.some(ComputeBackward)  # one at a time
    peer.do("computed", running)
    assert peer.only(ComputeBackward).micro_batch == batch(0)
    peer.do("computed", peer.only(ComputeBackward))
    assert peer.only(ComputeForward).micro_batch == batch(2)


def test_other_work_goes_on_while_a_claim_is_not_answered() -> None:
    peer = Peer()
    sent = peer.forward(0)
    peer.do("offered", peer.gradient_of(sent))
    claim, fetch = peer.only(Claim), peer.only(Fetch)
    assert claim == Claim(1, batch(0))
    peer.do("tensor_arrived", fetch)
    assert not peer.some(ComputeBackward)
    peer.arrive(1)
    running = peer.only(ComputeForward)
    peer.do("claim_answered", claim, as_range(batch(0)))
    peer.do("computed", running)
    assert peer.only(ComputeBackward).accumulate == {1}


# Claims -------------------------------------------------------------------------------------------------------


def test_what_is_not_granted_passes_through() -> None:
    peer = Peer()
    peer.gradient(peer.forward(0), granted=False)
    assert peer.only(ComputeBackward).accumulate == frozenset()
    peer.do("computed", peer.only(ComputeBackward))
    assert peer.only(Send).kind == "gradient"
    assert peer.engine.counted(1) == []
    assert not peer.ever(Release)


def test_each_stage_of_a_span_is_claimed_by_itself() -> None:
    peer = Peer(first=1, last=2, stages=4)
    sent = peer.forward(0)
    peer.do("offered", peer.gradient_of(sent))
    fetch, (first, second) = peer.only(Fetch), peer.some(Claim)
    peer.do("tensor_arrived", fetch)
    peer.do("claim_answered", first, [])
    assert not peer.some(ComputeBackward)
    peer.do("claim_answered", second, as_range(batch(0)))
    assert peer.only(ComputeBackward).accumulate == {2}
    assert (peer.engine.counted(1), peer.engine.counted(2)) == ([], as_range(batch(0)))


def test_a_part_of_a_micro_batch_goes_back_and_it_passes_through() -> None:
    peer = Peer()
    sent = peer.forward(0)
    peer.do("offered", peer.gradient_of(sent))
    claim, fetch = peer.only(Claim), peer.only(Fetch)
    peer.do("claim_answered", claim, [(0, 1)])
    assert peer.some(Release) == [Release(1, ROUND, ((0, 1),))]
    peer.do("tensor_arrived", fetch)
    assert peer.only(ComputeBackward).accumulate == frozenset()


def test_what_counted_here_counts_no_second_time() -> None:
    peer = Peer()
    peer.backward(0)
    peer.do("noted", PeerNote("taken", "up", batch(0), 1, 1))
    for again in (activation(0, attempt=2), TensorOffer("activation", "up", MicroBatch(ROUND, 1, 3), 1, 1, 7)):
        peer.answer(again)
        peer.do("tensor_arrived", peer.only(Fetch))
        peer.do("computed", peer.only(ComputeForward))
        sent = peer.only(Send)
        peer.do("offered", peer.gradient_of(sent))
        assert not peer.some(Claim)
        peer.do("tensor_arrived", peer.only(Fetch))
        assert peer.only(ComputeBackward).accumulate == frozenset()
        peer.do("computed", peer.only(ComputeBackward))


def test_overlapping_micro_batches_under_way_do_not_both_count() -> None:
    """The coordinator would grant both: it knows the samples that they share as ours."""
    peer = Peer(first=2, last=2)
    peer.stage = 2
    peer.arrive(0)
    assert peer.only(Claim) == Claim(2, batch(0))
    running = peer.only(ComputeForward)
    peer.answer(TensorOffer("activation", "up", MicroBatch(ROUND, 1, 3), 2, 1, 7))
    peer.do("tensor_arrived", peer.only(Fetch))
    peer.do("computed", running)
    assert peer.only(ComputeForward).micro_batch.start == 1
    assert not peer.some(Claim)


def test_an_abandoned_micro_batch_releases_its_claim() -> None:
    peer = Peer(first=2, last=2)
    peer.arrive(0)
    peer.do("claim_answered", peer.only(Claim), as_range(batch(0)))
    peer.do("noted", PeerNote("cancel", "up", batch(0), 2, 1))
    assert peer.last == [Release(2, ROUND, ((0, 2),)), Drop(100)]
    assert peer.engine.kept_activations == 0


def test_a_claim_that_is_granted_after_all_is_given_up_goes_back() -> None:
    peer = Peer(first=2, last=2)
    peer.arrive(0)
    claim = peer.only(Claim)
    peer.do("noted", PeerNote("cancel", "up", batch(0), 2, 1))
    assert not peer.some(Release)
    peer.do("claim_answered", claim, as_range(batch(0)))
    assert peer.last == [Release(2, ROUND, ((0, 2),))]


def test_a_claim_under_way_serves_the_next_attempt() -> None:
    peer = Peer(first=2, last=2)
    peer.arrive(0)
    claim, running = peer.only(Claim), peer.only(ComputeForward)
    peer.do("noted", PeerNote("cancel", "up", batch(0), 2, 1))
    peer.answer(activation(0, stage=2, attempt=2))
    fetch = peer.only(Fetch)
    peer.do("tensor_arrived", fetch)
    peer.do("computed", running)
    assert not peer.some(Claim)
    forward = peer.only(ComputeForward)
    peer.do("claim_answered", claim, as_range(batch(0)))
    assert not peer.last
    peer.do("computed", forward)
    assert peer.only(ComputeBackward).accumulate == {2}


# The next hop -------------------------------------------------------------------------------------------------


def test_forward_and_backward_take_turns_while_there_are_both() -> None:
    peer = Peer(in_flight=4)
    sent = [peer.forward(0), peer.forward(1)]
    peer.arrive(2)
    running: Compute = peer.only(ComputeForward)
    peer.arrive(3)
    for one in sent:
        peer.gradient(one)
    order: list[tuple[type[Compute], int]] = []
    for kind in (ComputeBackward, ComputeForward, ComputeBackward):
        peer.do("computed", running)
        running = peer.only(kind)
        order.append((kind, running.micro_batch.start))
    assert order == [(ComputeBackward, 0), (ComputeForward, 6), (ComputeBackward, 2)]


def test_the_last_stage_claims_one_ahead() -> None:
    """So the answer is here when its turn comes; of those that wait longer, others may have more to say till then."""
    peer = Peer(first=2, last=2, in_flight=4)
    peer.arrive(0)
    assert peer.only(Claim).micro_batch == batch(0)
    running = peer.only(ComputeForward)
    peer.arrive(1)
    assert peer.only(Claim).micro_batch == batch(1)
    peer.arrive(2)
    assert not peer.some(Claim)
    peer.do("claim_answered", peer.ever(Claim)[0], as_range(batch(0)))
    peer.do("computed", running)
    peer.do("computed", peer.only(ComputeBackward))
    assert peer.only(ComputeForward).micro_batch == batch(1)
    assert peer.only(Claim).micro_batch == batch(2)


def test_a_dead_next_hop_costs_a_resend() -> None:
    peer = Peer()
    sent = peer.forward(0)
    assert sent.peer == "down"
    peer.do("replica_gone", "down")
    again = peer.only(Send)
    assert again == Send("activation", "other", batch(0), 2, 2, 100)
    assert not peer.some(Compute)  # type: ignore[type-var]
    peer.do("offered", peer.gradient_of(sent))
    assert peer.only(Reply).answer == "outdated"
    peer.gradient(again)
    assert peer.only(ComputeBackward).accumulate == {1}


def test_a_silent_next_hop_costs_a_resend_and_is_told() -> None:
    peer = Peer()
    sent = peer.forward(0)
    peer.now_s += PATIENCE_S
    peer.do("tick")
    assert peer.some(PeerNote) == [PeerNote("cancel", "down", batch(0), 2, 1)]
    again = peer.only(Send)
    assert (again.peer, again.attempt) == ("other", 2)
    peer.do("offered", peer.gradient_of(sent))
    assert peer.only(Reply).answer == "outdated"


def test_the_only_next_hop_is_asked_again() -> None:
    peer = Peer()
    peer.do("replicas_changed", 2, {"down": None})
    sent = peer.forward(0)
    peer.now_s += PATIENCE_S
    peer.do("tick")
    assert not peer.some(PeerNote)
    again = peer.only(Send)
    assert (again.peer, again.attempt) == ("down", 2)
    peer.gradient(sent)  # it was slow, and its first answer is as good
    assert peer.only(ComputeBackward)


@pytest.mark.parametrize("how", ["refused", "send_failed", "abandoned", "moved"])
def test_what_one_replica_does_not_take_goes_to_another(how: str) -> None:
    peer = Peer()
    sent = peer.forward(0)
    match how:
        case "refused":
            peer.do("refused", sent, "busy")
        case "send_failed":
            peer.do("send_failed", sent)
        case "abandoned":
            peer.do("noted", PeerNote("abandoned", "down", batch(0), 1, 1))
        case "moved":
            peer.do("replicas_changed", 2, {"other": None})
    again = peer.only(Send)
    assert (again.peer, again.attempt, again.number) == ("other", 2, sent.number)
    peer.do("refused", sent, "busy")
    assert not peer.last  # that attempt is over


def test_where_all_are_full_it_waits_for_room_or_a_while() -> None:
    peer = Peer()
    peer.do("refused", peer.forward(0), "busy")
    peer.do("refused", peer.only(Send), "busy")
    assert not peer.last
    peer.do("noted", PeerNote("slot_free", "down", batch(0), 2, 0))
    assert peer.only(Send).peer == "down"
    peer.do("refused", peer.only(Send), "busy")
    peer.now_s += RETRY_S
    peer.do("tick")
    assert peer.only(Send).attempt == 4


def test_a_gradient_of_an_attempt_given_up_is_ignored_while_nobody_has_the_next() -> None:
    peer = Peer()
    peer.do("replicas_changed", 2, {"down": None})
    sent = peer.forward(0)
    peer.do("send_failed", sent)
    assert not peer.some(Send)
    assert peer.answer(peer.gradient_of(sent)) == "outdated"


def test_room_at_a_stranger_is_no_room() -> None:
    peer = Peer()
    peer.do("refused", peer.forward(0), "busy")
    peer.do("refused", peer.only(Send), "busy")
    peer.do("noted", PeerNote("slot_free", "stranger", batch(0), 2, 0))
    assert not peer.last


def test_without_any_next_hop_it_waits_for_one() -> None:
    peer = Peer()
    peer.do("replicas_changed", 2, {})
    peer.arrive(0)
    peer.do("computed", peer.only(ComputeForward))
    assert not peer.last
    peer.now_s += RETRY_S
    peer.do("replicas_changed", 2, {"new": None})
    assert peer.only(Send).peer == "new"


def test_a_gradient_that_cannot_be_fetched_is_asked_of_another() -> None:
    peer = Peer()
    sent = peer.forward(0)
    peer.do("offered", peer.gradient_of(sent))
    claim = peer.only(Claim)
    peer.do("fetch_failed", peer.only(Fetch))
    again = peer.only(Send)
    assert again.peer == "other"
    peer.do("offered", peer.gradient_of(again))
    assert not peer.some(Claim)  # asked once
    peer.do("tensor_arrived", peer.only(Fetch))
    peer.do("claim_answered", claim, as_range(batch(0)))
    assert peer.only(ComputeBackward).accumulate == {1}


def test_who_gives_up_downstream_work_says_so() -> None:
    peer = Peer()
    peer.forward(0)
    peer.do("noted", PeerNote("cancel", "up", batch(0), 1, 1))
    assert peer.some(PeerNote) == [PeerNote("cancel", "down", batch(0), 2, 1)]
    assert peer.some(Drop) == [Drop(100)]
    assert peer.answer(activation(0)) == "outdated"


def test_a_cancel_that_overtakes_its_offer_holds() -> None:
    peer = Peer()
    peer.do("noted", PeerNote("cancel", "up", batch(0), 1, 1))
    assert peer.answer(activation(0)) == "outdated"
    assert peer.answer(activation(0, attempt=2)) == "accepted"
    peer.do("noted", PeerNote("cancel", "up", batch(0), 1, 1))
    assert peer.engine.kept_activations == 1


# The one before -----------------------------------------------------------------------------------------------


def test_a_counted_gradient_waits_for_the_micro_batch_to_come_again() -> None:
    peer = Peer()
    peer.backward(0)
    peer.do("replica_gone", "up")
    assert not peer.last
    assert peer.engine.counted(1) == as_range(batch(0))
    assert peer.answer(activation(0, sender="heir")) == "accepted"
    assert peer.only(Send) == Send("gradient", "heir", batch(0), 0, 1, 100)
    assert not peer.some(Fetch)
    peer.do("noted", PeerNote("taken", "heir", batch(0), 1, 1))
    assert peer.some(Drop) == [Drop(100)]


def test_work_under_way_goes_on_for_the_heir() -> None:
    peer = Peer()
    sent = peer.forward(0)
    peer.do("replica_gone", "up")
    assert not peer.last
    assert peer.answer(activation(0, sender="heir")) == "accepted"
    assert not peer.some(Fetch)
    peer.gradient(sent)
    peer.do("computed", peer.only(ComputeBackward))
    assert peer.only(Send).peer == "heir"


def test_work_whose_input_never_came_ends_with_its_sender() -> None:
    peer = Peer()
    peer.answer(activation(0))
    peer.do("replica_gone", "up")
    assert peer.last == [Drop(100)]


def test_gradients_that_nobody_fetches_make_way() -> None:
    peer = Peer(in_flight=1)
    peer.backward(0)
    peer.gradient(peer.forward(1))
    assert not peer.some(ComputeBackward)  # the first may be on its way
    peer.do("replica_gone", "up")
    drop, backward = peer.last
    assert drop == Drop(100)
    assert isinstance(backward, ComputeBackward)


def test_a_gradient_that_did_not_get_there_is_offered_again() -> None:
    peer = Peer()
    sent = peer.backward(0)
    peer.do("send_failed", sent)
    assert not peer.last
    peer.now_s += RETRY_S
    peer.do("tick")
    assert peer.last == [sent]
    peer.do("refused", sent, "outdated")
    assert peer.last == [Drop(100)]


# Driving ------------------------------------------------------------------------------------------------------


def driver(last: int = 0, stages: int = 3, in_flight: int = 2) -> Peer:
    return Peer(first=0, last=last, stages=stages, in_flight=in_flight)


def test_a_driver_asks_drives_and_reports() -> None:
    peer = driver()
    ask = peer.ever(AskToDrive)[0]
    assert ask == AskToDrive(ROUND, 6, ())  # two in flight, and one ahead
    peer.do("driving_granted", ask, [(0, 6)])
    peer.do("computed", peer.only(ComputeForward))
    sent = peer.only(Send)
    assert (sent.micro_batch, sent.stage) == (batch(0), 1)
    peer.do("computed", peer.only(ComputeForward))
    assert not peer.some(ComputeForward)  # two are in flight
    peer.gradient(sent)
    peer.do("computed", peer.only(ComputeBackward))
    assert peer.some(Drop) == [Drop(100)]
    assert peer.some(MicroBatchDone) == [MicroBatchDone(batch(0))]
    assert peer.only(ComputeForward).micro_batch == batch(2)
    assert peer.only(AskToDrive) == AskToDrive(ROUND, 2, ((0, 2),))


def test_a_full_replica_is_a_chain_of_one() -> None:
    peer = driver(last=2)
    peer.do("driving_granted", peer.ever(AskToDrive)[0], [(0, 2)])
    forward, claims = peer.only(ComputeForward), peer.some(Claim)
    assert [claim.stage for claim in claims] == [0, 1, 2]
    for claim in claims:
        peer.do("claim_answered", claim, as_range(batch(0)))
    peer.do("computed", forward)
    assert peer.only(ComputeBackward).accumulate == {0, 1, 2}
    peer.do("computed", peer.only(ComputeBackward))
    assert peer.some(MicroBatchDone) == [MicroBatchDone(batch(0))]
    assert not peer.ever(Send)


def test_a_driver_with_samples_serves_those_who_have_nobody_else() -> None:
    peer = driver(last=1, in_flight=2)
    peer.do("driving_granted", peer.ever(AskToDrive)[0], [(0, 6)])
    assert peer.answer(activation(7)) == "busy"
    assert [note.kind for note in peer.some(PeerNote)] == ["slot_free"]
    assert peer.answer(activation(7, attempt=2)) == "accepted"


def test_nothing_to_drive_is_asked_for_again_later() -> None:
    peer = driver()
    ask = peer.ever(AskToDrive)[0]
    peer.do("driving_granted", ask, [])
    assert not peer.last
    peer.now_s += RETRY_S
    peer.do("tick")
    assert peer.only(AskToDrive) == ask


def test_nobody_asks_for_more_while_the_round_closes() -> None:
    peer = driver()
    ask = peer.ever(AskToDrive)[0]
    peer.do("round_closing")
    peer.do("driving_granted", ask, [(0, 2)])
    assert peer.some(ComputeForward)
    assert not peer.some(AskToDrive)
    peer.do("round_opened", ROUND)  # it lacks samples after all
    assert peer.some(AskToDrive)


def test_samples_are_cut_alike_however_they_are_leased() -> None:
    pieces = cut_micro_batches(ROUND, [(2, 10), (13, 14)], 4)
    assert [(one.start, one.stop) for one in pieces] == [(2, 4), (4, 8), (8, 10), (13, 14)]
    assert set(cut_micro_batches(ROUND, [(4, 8)], 4)) <= set(pieces)


# The end ------------------------------------------------------------------------------------------------------


def test_after_the_round_nothing_of_it_is_left() -> None:
    peer = Peer()
    peer.backward(0)
    sent = peer.forward(1)
    peer.do("round_over")
    assert peer.last == [DropRound(ROUND)]
    assert peer.engine.kept_activations == len(peer.engine._outbox) == 0
    assert peer.engine.counted(1) == []
    for late in (("refused", sent, "busy"), ("send_failed", sent), ("tick",)):
        assert peer.do(*late) == []
    assert not peer.router.overdue(10**6)


def test_a_computation_of_the_last_round_ends_before_the_next_one_begins() -> None:
    peer = Peer()
    peer.arrive(0)
    running = peer.only(ComputeForward)
    peer.do("round_over")
    peer.do("round_opened", ROUND + 1)
    peer.do("offered", TensorOffer("activation", "up", batch(0, ROUND + 1), 1, 1, 9))
    peer.do("tensor_arrived", peer.only(Fetch))
    assert not peer.last
    peer.do("computed", running)
    assert peer.only(ComputeForward).micro_batch == batch(0, ROUND + 1)
    assert not peer.some(Send)


def test_answers_to_what_was_given_up_count_for_nothing() -> None:
    peer = Peer()
    peer.answer(activation(0))
    fetch = peer.only(Fetch)
    peer.do("noted", PeerNote("cancel", "up", batch(0), 1, 1))
    peer.answer(activation(0, attempt=2))
    again = peer.only(Fetch)
    peer.do("tensor_arrived", fetch)
    peer.do("fetch_failed", fetch)
    assert not peer.last
    peer.do("tensor_arrived", again)
    assert peer.only(ComputeForward).job == again.job


def test_a_claim_of_a_stage_that_the_next_attempt_does_not_go_through_goes_back() -> None:
    peer = Peer(first=1, last=2)
    peer.arrive(0)
    first, second = peer.some(Claim)
    running = peer.only(ComputeForward)
    peer.do("noted", PeerNote("cancel", "up", batch(0), 1, 1))
    peer.answer(activation(0, sender="heir", stage=2))
    fetch = peer.only(Fetch)
    peer.do("claim_answered", first, as_range(batch(0)))
    assert peer.last == [Release(1, ROUND, ((0, 2),))]
    peer.do("claim_answered", second, as_range(batch(0)))
    peer.do("computed", running)
    peer.do("tensor_arrived", fetch)
    peer.do("computed", peer.only(ComputeForward))
    assert peer.only(ComputeBackward).accumulate == {2}
