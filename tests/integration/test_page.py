"""The page of a live run in a real browser: what it shows through a kill and a join, and what it never does."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.harness import SHOAL, START_S, Host, Swarm, run_toml

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page of the browser; ``wrong``: what no page of ours may do."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.wrong: list[str] = []
        self.page = browser.new_page(**options)
        self.page.on("console", lambda message: self._note(message.type == "error", message.text))
        self.page.on("pageerror", lambda error: self._note(True, str(error)))
        server = url.partition("#")[0]
        self.page.on("request", lambda request: self._note(not request.url.startswith(server), request.url))
        self.page.on("dialog", lambda dialog: self._note(True, dialog.message))
        self.page.goto(url)

    def _note(self, is_wrong: bool, words: str) -> None:
        if is_wrong:
            self.wrong.append(words)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def rows(self) -> list[str]:
        return [str(row) for row in self.page.locator("#members-table tbody tr").all_inner_texts()]

    def until(self, what: str, script: str, within_s: float = 60.0) -> None:
        try:
            self.page.wait_for_function(script, timeout=1000 * within_s)
        except sync_api.TimeoutError:
            raise AssertionError(f"the page does not show {what}:\n{self.text('body')}") from None

    def layout_shift(self) -> float:
        """How much moved by itself, by the browser's own measure."""
        script = """() => new Promise(done => {
            let sum = 0;
            new PerformanceObserver(list => {
                for (const one of list.getEntries()) if (!one.hadRecentInput) sum += one.value;
            }).observe({type: 'layout-shift', buffered: true});
            setTimeout(() => done(sum), 100);
        })"""
        return float(self.page.evaluate(script))


def page_url(host: Host) -> str:
    found = re.search(r"^Page +(http://\S+)", host.text(), re.MULTILINE)
    assert found is not None, host.tail()
    return found[1]


def test_the_page_follows_a_run(swarm: Swarm, browser: Any) -> None:
    host = swarm.host(run_toml(rounds=None), extra=["--web", "127.0.0.1:0"])
    url = page_url(host)
    seen = Watched(browser, url)
    seen.until("that nobody is here", "() => document.querySelector('#waits').textContent.includes('Nobody is here')")
    ada, bob = swarm.members(host.invite, "ada", "bob")
    ada.committed()
    bob.committed()
    seen.until("both members", "() => document.querySelectorAll('#members-table tbody tr').length === 2")
    seen.until("a loss", "() => /^\\d/.test(document.querySelector('#tile-loss').textContent)")

    # A stranger's name stays text.
    eve = swarm.member(host.invite, "eve", extra=["--name", HOSTILE])
    seen.until("the newcomer", "() => document.querySelectorAll('#members-table tbody tr').length === 3")
    assert any(HOSTILE in row for row in seen.rows())
    assert seen.page.locator("#members-table img").count() == 0

    # What is shown is what the command says.
    told = status_of(swarm, host)
    seen.until("that round", shows_round(told["round"]))
    assert told["run_hash"] in seen.text("#chain")
    assert {f"{one['name']} {one['peer'][:8]}" for one in told["members"]} == set(names(seen))

    # Somebody dies, and is struck out; the run goes on.
    bob.send(signal.SIGKILL)
    seen.until("that one is gone", "() => document.querySelectorAll('#members-table tr.gone').length === 1")
    assert seen.text("#tile-members") == "2"
    before = int(seen.text("#tile-round"))
    seen.until("that the run goes on", shows_round(before + 2))

    # The strip of rounds, by keyboard.
    seen.page.focus("#strip")
    seen.page.keyboard.press("Home")
    seen.until("the first round", "() => document.querySelector('#round-detail').textContent.startsWith('Round 0 ')")
    seen.until("its members", "() => document.querySelectorAll('#round-members li').length >= 1")
    assert seen.layout_shift() < 0.1

    phone = Watched(browser, url + "#peer=" + ada.peer, viewport={"width": 360, "height": 740})
    phone.until("the person's own peer", "() => document.querySelector('#own').textContent.includes('ada')")
    assert phone.page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    assert phone.page.locator("tr.mine").count() == 1

    # The host goes away, and the page says so.
    host.stop()
    assert "Traceback" not in host.text()
    seen.until("that nobody answers", "() => document.querySelector('#link').textContent !== 'live'")
    assert ada.running
    assert eve.running
    assert [one for one in seen.wrong + phone.wrong if "net::ERR_" not in one] == []


def shows_round(number: int) -> str:
    return f"() => parseInt(document.querySelector('#tile-round').textContent) >= {number}"


def names(seen: Watched) -> list[str]:
    return [str(text) for text in seen.page.locator("#members-table tbody tr td:first-child").all_inner_texts()]


def status_of(swarm: Swarm, host: Host) -> dict[str, Any]:
    asked = swarm.command("asked", *SHOAL, "status", host.invite, "--json")
    assert asked.exit_code(START_S) == 0, asked.tail()
    found = json.loads(asked.text())
    assert isinstance(found, dict)
    return found
