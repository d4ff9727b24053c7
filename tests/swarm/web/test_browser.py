"""The page in a real browser, on runs of values that we choose: what it shows, and that strangers' text stays text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from tests.swarm.web.browsers import CHROMIUM, HOSTILE, SHOWN, Watched, chromium
from tests.swarm.web.samples import RUN, member, status, timing, verdict

from shoal.swarm.protocol.evaluations import ClaimedLoss, EvaluationStatus, HeldOutFigure, TextSample, VersionTexts
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.timing import RoundTiming
from shoal.swarm.protocol.types import CostStatus, PhaseTimes
from shoal.swarm.web.metrics import Reading
from shoal.swarm.web.server import PageServer

pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]


def evaluated(rounds: int) -> EvaluationStatus:
    """Every fifth version."""
    by, versions = member(9).peer, range(5, rounds, 5)
    figures = [
        HeldOutFigure(
            version=version,
            round=version,
            tokens=200 * version,
            at_s=1.7e9 + 10 * version,
            loss=2.0 + 1 / version,
            standing="claim",
            counts=True,
            claims=(ClaimedLoss(validator=by, loss=2.0),),
        )
        for version in versions
    ]
    hostile = TextSample.model_construct(prompt="def ", text=HOSTILE + "y" * 1000)
    texts = [
        VersionTexts.model_construct(
            version=version, round=version, validator=by, texts=(TextSample(prompt="", text=f"at {version}"), hostile)
        )
        for version in versions
    ]
    return EvaluationStatus.model_construct(figures=tuple(figures), texts=tuple(texts), newest=())


class ShownRun:
    """A run of 20 rounds, with strangers' words wherever there may be some."""

    own_peer = ""

    def __init__(self, name: str, rounds: int = 20) -> None:
        run = RUN.run.model_copy(update={"name": name})
        card = RUN.card.model_copy(update={"title": f"{name} {HOSTILE}", "purpose": HOSTILE})
        self.run = RUN.model_copy(update={"run": run, "card": card})
        self.rounds = rounds
        self.costs = CostStatus()
        self.members = [member(number, name=HOSTILE, activity=HOSTILE[:32], trouble=HOSTILE) for number in range(3)]
        self.members[1] = member(1, name="W" * 64, times=PhaseTimes(compute=3.0, waiting=1.0))

    def run_file(self) -> RunFile:
        return self.run

    async def status(self) -> CoordinatorToPeerStatus:
        told = timing(max(0, self.rounds - 1), late=1, text=HOSTILE).model_copy(
            update={"mean": PhaseTimes(compute=3.0, data=1)}
        )
        return status(
            self.members,
            run=self.run.run.name,
            round=self.rounds,
            timing=told if self.rounds else None,
            evaluation=evaluated(self.rounds),
            utilisation=0.75 if self.rounds else None,
            goodput=0.96,
            warning=HOSTILE,
            costs=self.costs,
        )

    async def verdicts(self, first: int, limit: int) -> Sequence[Verdict]:
        return [verdict(number, number + 1) for number in range(first, self.rounds)][:limit]

    async def timings(self, first: int) -> Sequence[RoundTiming]:
        spent = {"mean": PhaseTimes(compute=3.0, packing=1.0), "cost": 0.0042, "energy_j": 90_000.0}
        timed = [timing(number, late=1, text=HOSTILE) for number in range(first, self.rounds)]
        return [one.model_copy(update=spent) for one in timed]

    async def readings(self) -> Sequence[Reading]:
        return []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def network() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def serve(network: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Serve runs; returns the page's address."""
    with ExitStack() as ending:

        def start(*runs: ShownRun) -> str:
            server = PageServer(("127.0.0.1", 0), 64)
            ending.callback(server.close)
            for run in runs:
                ending.enter_context(server.showing(run, network))
            return server.url

        yield start


def test_values_are_shown_and_strangers_text_stays_text(browser: Any, serve: Any) -> None:
    run = ShownRun("reef")
    seen = Watched(browser, serve(run))
    seen.until_text("#texts-which", "after round 15, held-out loss 2.0667")
    seen.until_text("#rounds-title", "Rounds: 2 committed")
    seen.until_text("#round-detail", "Round 19 committed")
    assert seen.text("#tile-loss") == "2.2500"
    assert "held out 2.0667, after round 15" in seen.text("#tile-loss-note")
    assert seen.text("#tile-used") == "75%"
    assert "96%" in seen.text("#tile-used-note")
    assert "training 12 s gathering 1.0 s averaging 7.0 s" in " ".join(seen.text("#time-round").split())
    assert "compute 75% data 25%" in " ".join(seen.text("#time-members").split())
    assert "75%" in seen.page.locator("#members-table tbody tr", has_text="WWW").first.inner_text()
    for place in ("#title", "#waits", "#time-path", "#texts", "#round-why", "#members-table", "#run-facts"):
        assert SHOWN in seen.text(place), place
    assert seen.page.locator("main img").count() == 0
    assert seen.page.locator("body > script").count() == 0
    assert not seen.page.evaluate(r"() => /[\u202a-\u202e\u2066-\u2069\u0007]/.test(document.body.innerText)")

    # Texts of earlier rounds, by keyboard; those of a new one do not take it away.
    seen.page.focus("#texts-round")
    seen.page.keyboard.press("Home")
    seen.until_text("#texts", "at 5")
    run.rounds = 27
    seen.until_text("#round-detail", "Round 26 committed")
    assert "after round 5," in seen.text("#texts-which")
    seen.page.keyboard.press("End")
    seen.until_text("#texts", "at 25")

    # The strip of rounds, by keyboard.
    seen.page.focus("#strip")
    seen.page.keyboard.press("Home")
    seen.until_text("#round-detail", "Round 0 ")
    seen.until_text("#round-members", "%")
    assert "training 12 s" in seen.text("#round-time")
    assert "compute 3.0 s packing 1.0 s" in " ".join(seen.text("#round-time").split())
    assert "cost 0.0042 USD energy 25 Wh" in " ".join(seen.text("#round-figures").split())

    # An amendment is there without a new visit.
    run.run = run.run.model_copy(update={"card": run.run.card.model_copy(update={"title": "Another title"})})
    seen.until_text("#title", "Another title")
    assert seen.layout_shift() < 0.1
    assert seen.wrong == []

    # The policy forbids code that is no file of the page.
    seen.page.evaluate("() => { const one = document.createElement('script'); one.text = 'window.ran = 1';"
                       " document.body.append(one); }")  # fmt: skip
    assert seen.page.evaluate("() => window.ran") is None
    seen.page.close()


def test_a_phone_shows_a_person_their_own_peer(browser: Any, serve: Any) -> None:
    url = serve(ShownRun("reef"))
    seen = Watched(browser, f"{url}#peer={member(1).peer}", viewport={"width": 360, "height": 740}, color_scheme="dark")
    seen.until_text("#own", "Your peer: WWW")
    assert seen.page.locator("tr.mine").count() == 1
    assert seen.page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    assert seen.wrong == []
    seen.page.close()


def test_an_empty_run_says_so(browser: Any, serve: Any) -> None:
    run = ShownRun("reef", 0)
    run.members = []
    seen = Watched(browser, serve(run))
    seen.until_text("#members-count", "0 here")
    assert "Nobody has joined yet." in seen.text("main#one")
    assert "No round has ended yet." in seen.text("main#one")
    assert not seen.page.is_visible("#texts-card")
    assert not seen.page.is_visible("#time-card")
    assert seen.wrong == []
    seen.page.close()


def test_several_runs_have_a_card_each(browser: Any, serve: Any) -> None:
    seen = Watched(browser, serve(ShownRun("reef"), ShownRun("atoll", 3)))
    seen.until_text("#runs-list", "atoll")
    cards = seen.page.locator("a.run")
    assert cards.count() == 2
    assert "2 of 8 rounds, 25%" in cards.nth(1).inner_text()
    assert SHOWN in cards.nth(1).inner_text()
    cards.nth(1).focus()
    seen.page.keyboard.press("Enter")
    seen.until_text("#tile-round", "3")
    assert "atoll" in seen.text("#subtitle")
    seen.page.click("#all-runs")
    seen.until_text("#runs-list", "reef")
    assert seen.wrong == []
    seen.page.close()


HOSTILE_COSTS = CostStatus.model_construct(
    currency=HOSTILE,
    members=3,
    priced_members=2,
    cost=1e30,
    round_cost=0.0,
    million_tokens_cost=0.0042,
    provider=HOSTILE,
    provider_cost=1234.5,
    provider_unlisted_device_s=7200.0,
    metered_members=1,
    energy_j=1e18,
    round_energy_j=90_000.0,
    token_energy_j=0.25,
)


def test_costs_are_shown_where_there_are_any(browser: Any, serve: Any) -> None:
    run = ShownRun("reef")
    seen = Watched(browser, serve(run), viewport={"width": 360, "height": 740})
    seen.until_text("#round-detail", "Round 19")
    assert not seen.page.is_visible("#costs-card")
    run.costs = CostStatus(members=3, metered_members=3, energy_j=4.5e6)
    seen.until_text("#energy", "1.25 kWh, as members say")
    assert not seen.page.is_visible("#cost-part")
    run.costs = HOSTILE_COSTS
    seen.until_text("#costs", "1.00e+30")
    costs, energy = (" ".join(seen.text(f"#{name}").split()) for name in ("costs", "energy"))
    assert f"the run 1.00e+30 {SHOWN}, 2 of 3 members say the last round 0.00 {SHOWN}" in costs
    assert f"a million tokens 0.0042 {SHOWN} at {SHOWN}'s prices 1,234.50 {SHOWN}, without 2 h 00 min" in costs
    assert energy == "the run 278 TWh, 1 of 3 members say the last round 25 Wh a token 0.25 J"
    assert seen.page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    assert seen.page.locator("main img").count() == 0
    assert seen.wrong == []
    seen.page.close()


def test_of_a_thousand_members_those_on_the_screen_are_elements(browser: Any, serve: Any) -> None:
    run = ShownRun("reef", 3)
    run.members = [member(number, share=1 / (number + 2)) for number in range(1000)]
    seen = Watched(browser, serve(run))
    rows = "#members-table tr td:first-child b"
    seen.until_text("#more", "Show all 1000")
    height = "() => document.querySelector('#members-table').offsetHeight"
    assert abs(seen.page.evaluate(height) - 101 * 31) <= 2
    seen.page.click("#more")
    assert abs(seen.page.evaluate(height) - 1001 * 31) <= 2
    for name in ("member-999", "member-500", "member-0"):
        number = int(name.removeprefix("member-"))
        top = "document.querySelector('#members-table').getBoundingClientRect().top"
        seen.page.evaluate(f"y => window.scrollBy(0, {top} + y)", 31 * number)
        there = f"() => [...document.querySelectorAll({rows!r})].some(one => one.textContent === {name!r})"
        seen.until(name, there)
        assert seen.page.evaluate(f"() => document.querySelectorAll({rows!r}).length") < 60
        box = seen.page.locator(rows, has_text=name).first.bounding_box()
        assert box is not None
        assert 0 <= box["y"] <= 720, "where it would be if all rows were there"
    # Values change where one looks, and who goes is gone there.
    run.members = [one.model_copy(update={"loss": 1.125}) for one in run.members[:-1]]
    seen.until("a new value", "() => document.querySelector('#members-table').textContent.includes('1.1250')")
    seen.until_text("#members-count", "999 in all")
    seen.page.click("#more")
    assert abs(seen.page.evaluate(height) - 101 * 31) <= 2
    assert seen.wrong == []
    seen.page.close()
