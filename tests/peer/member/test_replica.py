"""Tests of member/replica: rounds of a member that trains on while they are averaged; the network is a fake."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes.outer_steps import TensorMean
from tests.swarm.coordinator.world import SIGNER
from torch import Tensor, nn

from shoal.compression.range_reader import whole_vector
from shoal.peer.history.round_records import RecordOwner, RoundRecords
from shoal.peer.member.member import Progress
from shoal.peer.member.replica import TrainingReplica, TrainingSetup
from shoal.peer.network_thread import Interrupted
from shoal.peer.state_transfer.acquire import LocalCandidates
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.data import DataAbout
from shoal.peer.training.divergence import TRIES
from shoal.peer.training.outer_optimizer import make_outer
from shoal.swarm.averaging.outcome import Aborted, CarriedResidual, Committed, Resync, RoundOffer, RoundOutcome
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.errors import Diverged, NotAdmitted
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import OuterSection, parse_run_file
from shoal.swarm.protocol.types import DivergenceWord, KeptState

MEAN = torch.tensor([0.5, -0.25, 0.125, 1.0])
TOKENS = 10


class FakeMember:
    """``offers``: what was brought to rounds; ``afresh``: how often it joined anew."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.clock = PhaseClock()
        self.offers: list[RoundOffer] = []
        self.afresh = 0
        self.held: list[AnchorState] = []
        self.bad: list[KeptState] = []
        self.word: DivergenceWord = "unrecoverable"
        self.start: Any = None
        self.client: Any = SimpleNamespace(
            view=SimpleNamespace(round=0, anchor_version=0, state_digest=None, plan=None, verdict=None),
            coordinator_is_away=False,
            run_toml="",
            coordinator_key=SIGNER.public_key,
            peer="",
        )
        meter = SimpleNamespace(sent_bytes=0, received_bytes=0)
        self.node = SimpleNamespace(meter=meter)
        self.averager = SimpleNamespace(
            round_feedback=SimpleNamespace(carried=CarriedResidual(torch.zeros(4), 0), forget=self._forget)
        )
        self.forgotten = 0
        self.records = RoundRecords(Path("there are none"), RecordOwner(bytes(32), bytes(32)))

    def missed_rounds(self, steps: Any) -> Any:
        """None are missed here."""
        return SimpleNamespace(rounds=0)

    async def agreed_state(self, own: LocalCandidates, *_: Any) -> AnchorState:
        if not self.held:
            found = own.find(self.client.view.anchor_version, None) or own.find(0, None)
            assert found is not None
            self.held.append(found)
        return self.held[-1]

    def _forget(self) -> None:
        self.forgotten += 1

    async def rejoin_without_work(self) -> None:
        self.afresh += 1

    async def ask_about_divergence(self, bad: KeptState, kept: Callable[[], tuple[KeptState, ...]]) -> DivergenceWord:
        self.bad.append(bad)
        return self.word

    def hold_state(self, state: AnchorState) -> None:
        self.held.append(state)

    def request_heartbeat(self) -> None:
        """Nobody hears it."""

    async def average(self, offer: RoundOffer, step: Any) -> RoundOutcome:
        if not bool(whole_vector(offer.contribution).isfinite().all()):
            return Resync("the local work had become infinite or not a number", is_unusable=True)
        self.offers.append(offer)
        self.step = step
        return Aborted("replaced by the test's")

    def commits(self, outcome: RoundOutcome) -> RoundOutcome:
        """Step the state where the outcome says so, as a member does before it hands the outcome over."""
        if isinstance(outcome, Committed):
            self.hold_state(asyncio.run(self.step(outcome)))
        return outcome


class FakeNetwork:
    """``exchange``: the latest one begun; the test gives its result."""

    def __init__(self) -> None:
        self.resource = FakeMember()
        self.exchange: Future[RoundOutcome] = Future()
        self.trouble: Exception | None = None

    def call(self, coroutine: Coroutine[Any, Any, Any], interruptible: object = False) -> Any:
        return asyncio.run(coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        result, future = asyncio.run(coroutine), Future[Any]()
        if isinstance(result, Aborted):
            self.exchange = future
        else:
            future.set_result(result)
        return future

    def wait_for(self, future: Future[RoundOutcome], interruptible: object = False) -> RoundOutcome:
        if self.trouble is not None:
            raise self.trouble
        return future.result(timeout=0)

    def post(self, callback: Callable[[], object]) -> None:
        callback()


class Side:
    """One member of a run with ``overlap``: a model of four parameters, plain gradient descent."""

    def __init__(self, tmp_path: Path, overlap: bool = True, build: Callable[[], nn.Module] | None = None) -> None:
        toml = f"[run]\nname = 't'\n[recipe]\nname = 'own'\n[averaging]\noverlap = {str(overlap).lower()}\n"
        self.run = parse_run_file(toml + "[inner]\n[round]\ntokens = 100\n")
        self.model = nn.Linear(4, 1, bias=False)
        self.network = FakeNetwork()
        self.member = self.network.resource
        self.events: list[str] = []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        about = DataAbout(bytes(32), "none", TOKENS)
        network: Any = self.network
        self.replica = TrainingReplica(
            self.run,
            TrainingSetup(self.model, optimizer, about, build=build),
            network,
            network.resource,
            tmp_path,
            None,
            lambda event, **_: self.events.append(event),
        )
        self.replica.sync_state()
        self.replica.samples.add_lease(0, 100)

    def train(self, samples: int = 2) -> None:
        self.replica.samples.next_batch(samples)
        loss = self.model(torch.ones(1, 4)).square().mean()
        loss.backward()
        self.replica.step(self.replica.samples.finish_batch(loss), 1.0)

    @property
    def local(self) -> Tensor:
        return whole_vector(self.replica.vector)

    @property
    def anchor(self) -> Tensor:
        assert self.replica.state is not None
        return self.replica.state.anchor

    def has_ended(self, outcome: RoundOutcome) -> None:
        self.network.exchange.set_result(self.member.commits(outcome))

    def ends(self, outcome: RoundOutcome) -> bool:
        self.has_ended(outcome)
        return self.replica.conclude_round()

    def ranges(self, offer: int = -1) -> list[tuple[int, int]]:
        return [(one.start, one.stop) for one in self.member.offers[offer].ranges]


def verdict(number: int, committed: bool) -> Verdict:
    return Verdict(
        round=number,
        committed=committed,
        reason="" if committed else "for the test",
        anchor_version=number + 1,
        plan=None,
        digests=(),
        tokens=0,
        tokens_total=0,
        loss=None,
        ended_s=1.7e9,
        sent_bytes=0,
        previous_chain=bytes(32),
        chain=bytes(32),
        signature=SIGNER.sign(b""),
    )


def committed(number: int = 0, included: bool = True) -> Committed:
    return Committed(TensorMean(MEAN), verdict(number, committed=True), included)


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path)


def test_work_goes_on_for_the_next_round(side: Side) -> None:
    side.train()
    side.replica.close_round()
    assert side.replica.exchanging
    assert not side.replica.verdict_is_known
    assert (side.replica.round, side.member.progress.round, side.member.progress.tokens_done) == (1, 1, 0)
    side.train(3)
    assert side.replica.samples.tokens_done == 3 * TOKENS
    assert (side.member.offers[0].round, side.member.offers[0].weight_tokens) == (0, 2 * TOKENS)


def test_the_anchor_is_the_outer_step_and_the_work_since_goes_along(side: Side) -> None:
    before = side.anchor.clone()
    side.train()
    side.replica.close_round()
    at_offer = side.local
    side.train()
    work = at_offer - side.local
    assert side.ends(committed())
    outer = make_outer(OuterSection())
    values = torch.stack([before, torch.zeros(4)])
    outer.step_(values, MEAN, 0, 1.0)
    expected = values[0]
    assert torch.equal(side.anchor, expected), "bit for bit that of those who did nothing meanwhile"
    torch.testing.assert_close(side.local, expected - work)
    side.replica.close_round()
    assert side.ranges() == [(2, 4)]
    torch.testing.assert_close(whole_vector(side.member.offers[-1].contribution), work)
    assert (side.member.offers[-1].round, side.member.offers[-1].anchor_version) == (1, 1)


def test_the_offered_contribution_is_not_changed_meanwhile(side: Side) -> None:
    side.train()
    side.replica.close_round()
    contribution = side.member.offers[0].contribution
    as_offered = whole_vector(contribution)
    side.train()
    assert torch.equal(whole_vector(contribution), as_offered)


def test_an_aborted_rounds_work_comes_again_with_what_was_done_since(side: Side) -> None:
    anchor = side.anchor.clone()
    side.train()
    side.replica.close_round()
    side.train()
    local = side.local
    assert side.ends(Aborted("for the test", verdict(0, committed=False)))
    assert torch.equal(side.local, local)
    assert torch.equal(side.anchor, anchor)
    assert side.member.progress.tokens_done == 4 * TOKENS
    side.replica.close_round()
    assert side.ranges() == [(0, 4)]
    assert (side.member.offers[-1].round, side.member.offers[-1].weight_tokens) == (1, 4 * TOKENS)
    torch.testing.assert_close(whole_vector(side.member.offers[-1].contribution), anchor - local)


def test_a_reopened_round_goes_on(side: Side) -> None:
    side.train()
    side.replica.close_round()
    side.train()
    assert side.ends(Aborted("reopened"))
    assert (side.replica.round, side.replica.samples.tokens_done) == (0, 4 * TOKENS)


def test_samples_of_a_round_that_came_too_late_for_us_stay_ours(side: Side) -> None:
    side.train()
    side.replica.close_round()
    side.train()
    side.ends(committed(included=False))
    side.replica.close_round()
    assert side.ranges() == [(0, 4)]


def test_out_of_date_is_a_fresh_start_without_what_was_done_since(side: Side) -> None:
    side.train()
    side.replica.close_round()
    side.train()
    assert not side.ends(Resync("for the test"))
    assert side.member.afresh == 1
    assert (side.replica.samples.tokens_done, side.replica.samples.left) == (0, 0)
    assert torch.equal(side.local, side.anchor)


def spoil(side: Side) -> None:
    side.train()
    side.replica.vector.write(torch.full((4,), math.nan))


def counts(side: Side) -> bool:
    """Contribute the work and return whether it was of use."""
    assert side.replica.begin_exchange()
    return side.replica.conclude_round()


def test_work_that_is_never_finite_is_given_up_in_the_end(side: Side) -> None:
    for times in range(1, TRIES):
        spoil(side)
        assert not counts(side)
        assert (side.member.afresh, side.replica.samples.tokens_done) == (times, 0)
        assert torch.equal(side.local, side.anchor)
        side.replica.samples.add_lease(0, 100)
    spoil(side)
    with pytest.raises(Diverged, match=r"3 times in a row: .* lower learning rate"):
        counts(side)
    assert side.member.offers == [], "nothing of it went anywhere"


def test_work_that_cannot_be_packed_counts_as_well(side: Side) -> None:
    for _ in range(1, TRIES):
        side.train()
        side.replica.close_round()
        assert not side.ends(Resync("too large for float16", is_unusable=True))
        side.replica.samples.add_lease(0, 100)
    side.train()
    side.replica.close_round()
    with pytest.raises(Diverged, match="too large for float16"):
        side.ends(Resync("too large for float16", is_unusable=True))


def test_work_that_counted_makes_up_for_what_was_of_no_use_before(side: Side) -> None:
    for number in range(2 * TRIES):
        spoil(side)
        assert not counts(side)
        side.replica.samples.add_lease(0, 100)
        side.train()
        side.replica.close_round()
        side.member.client.view.round = number + 1
        assert side.ends(committed(number))


def test_an_anchor_that_is_not_finite_is_named(side: Side) -> None:
    side.train()
    side.replica.close_round()
    side.ends(Committed(TensorMean(torch.full((4,), 3e38)), verdict(0, committed=True), True))
    assert not bool(side.anchor.isfinite().all())
    assert side.replica.state is not None
    bad = KeptState(anchor_version=1, digest=side.replica.state.digest)
    side.train()
    with pytest.raises(Diverged, match="version 1 is itself infinite"):
        counts(side)
    assert side.member.bad == [bad], "asked at once: another try from there would be the same"


def test_the_others_are_asked_about_the_first_state_that_nothing_came_of(side: Side) -> None:
    assert side.replica.state is not None
    first, side.member.word = side.replica.state, "go on"
    for number in range(TRIES):
        spoil(side)
        assert not counts(side)
        assert len(side.member.bad) == (number == TRIES - 1)
        side.member.held.append(AnchorState.make(torch.ones(4), torch.zeros(1, 4), number + 1))
        side.replica.sync_state(afresh=True)
        side.replica.samples.add_lease(0, 100)
    assert side.member.bad == [KeptState(anchor_version=0, digest=first.digest)]
    assert "diverged" in side.events
    spoil(side)
    assert not counts(side)
    assert len(side.member.bad) == 1, "the run has gone back: counted anew"
    assert side.member.forgotten == 1, "what rounds left that are undone"


def test_what_undone_rounds_left_is_forgotten_and_nothing_else(side: Side) -> None:
    side.train()
    side.replica.close_round()
    side.ends(committed())
    assert side.replica.state is not None
    for version, forgotten in ((2, 0), (2, 0), (1, 1)):
        state = side.replica.state if version == side.replica.state.version else None
        side.member.held.append(state or AnchorState.make(torch.ones(4), torch.zeros(1, 4), version))
        side.replica.resync("for the test")
        assert side.member.forgotten == forgotten


@pytest.mark.parametrize(
    ("word", "advice"), [("at fault", "this machine is at fault"), ("unrecoverable", "lower learning")]
)
def test_the_coordinators_word_ends_a_peer_that_cannot_go_on(side: Side, word: DivergenceWord, advice: str) -> None:
    side.member.word = word
    for _ in range(1, TRIES):
        spoil(side)
        counts(side)
        side.replica.samples.add_lease(0, 100)
    spoil(side)
    with pytest.raises(Diverged, match=advice):
        counts(side)


def test_a_fresh_start_waits_for_the_verdict_of_what_is_offered(side: Side) -> None:
    side.train()
    side.replica.close_round()
    side.has_ended(committed())
    side.replica.resync("for the test")
    assert (side.events[-2], side.member.afresh) == ("resync", 1)
    assert "committed" in side.events
    assert not side.replica.exchanging


def test_a_round_is_closed_once_the_one_before_is_concluded(side: Side) -> None:
    side.train()
    side.replica.close_round()
    side.train()
    side.has_ended(committed())
    side.replica.close_round()
    assert [offer.round for offer in side.member.offers] == [0, 1]
    assert side.member.offers[1].anchor_version == 1
    assert side.ranges() == [(2, 4)]


@pytest.mark.parametrize("why", [Interrupted(), NotAdmitted("the stage is not ours any more")], ids=["stop", "taken"])
def test_who_stops_waiting_has_its_work_still(side: Side, why: Exception) -> None:
    side.train()
    side.replica.close_round()
    side.network.trouble = why
    with pytest.raises(type(why)):
        side.replica.conclude_round()
    assert (side.replica.exchanging, side.replica.samples.tokens_done, side.replica.round) == (False, 2 * TOKENS, 0)


def test_without_overlap_the_verdict_is_awaited_at_once(tmp_path: Path) -> None:
    side = Side(tmp_path, overlap=False)

    async def average(offer: RoundOffer, step: Any) -> RoundOutcome:
        await step(committed())
        return committed()

    side.member.average = average  # type: ignore[method-assign]
    side.train()
    side.replica.close_round()
    assert not side.replica.exchanging
    assert (side.replica.round, side.replica.samples.tokens_done) == (1, 0)
    assert torch.equal(side.local, side.anchor)


def test_a_run_may_go_back_to_what_it_began_with(tmp_path: Path) -> None:
    """Nobody may have had a reason to keep it: of a pipeline's stages another one may be lost."""
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Linear(4, 1, bias=False))
        nn.init.ones_(made[-1].weight)  # type: ignore[arg-type]
        return made[-1]

    side = Side(tmp_path, overlap=False, build=build)
    side.train()
    assert not torch.equal(side.local, torch.ones(4))
    side.member.held.clear()
    side.replica.resync("the run has gone back")
    assert torch.equal(side.local, torch.ones(4))
    assert torch.equal(side.anchor, torch.ones(4))
