"""The page of a live run in a real browser: what it shows through a kill and a join, and what it never does."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.harness import SHOAL, START_S, Host, Swarm, run_toml
from tests.swarm.web.browsers import CHROMIUM, Watched, chromium

pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


def page_url(host: Host) -> str:
    found = re.search(r"^Page +(http://\S+)", host.text(), re.MULTILINE)
    assert found is not None, host.tail()
    return found[1]


def test_the_page_follows_a_run(swarm: Swarm, browser: Any) -> None:
    host = swarm.host(run_toml(rounds=None, max_s=1.0), extra=["--web", "127.0.0.1:0"])
    seen = Watched(browser, page_url(host))
    seen.until_text("#waits", "Nobody is here")
    ada, bob = swarm.members(host.invite, "ada", "bob")
    ada.committed()
    seen.until("both members", "() => document.querySelectorAll('#members-table tbody tr').length === 2")
    seen.until("a loss", "() => /^\\d/.test(document.querySelector('#tile-loss').textContent)")
    seen.until_text("#time-round", "averaging")

    # A stranger joins while somebody dies; its name stays text, and the run goes on.
    eve = swarm.member(host.invite, "eve", extra=["--name", HOSTILE])
    bob.send(signal.SIGKILL)
    seen.until("the newcomer", "() => document.querySelectorAll('#members-table tbody tr').length === 3")
    seen.until("that one is gone", "() => document.querySelectorAll('#members-table tr.gone').length === 1")
    assert any(HOSTILE in name for name in names(seen))
    assert seen.page.locator("#members-table img").count() == 0
    seen.until("that the run goes on", shows_round(int(seen.text("#tile-round")) + 2))

    # What is shown is what the command says.
    told = status_of(swarm, host)
    seen.until("that round", shows_round(told["round"]))
    assert told["run_hash"] in seen.text("#chain")
    assert {f"{one['name']} {one['peer'][:8]}" for one in told["members"]} == set(names(seen))

    # The strip of rounds, by keyboard.
    seen.page.focus("#strip")
    seen.page.keyboard.press("Home")
    seen.until_text("#round-detail", "Round 0 ")
    seen.until("its members", "() => document.querySelectorAll('#round-members li').length >= 1")
    assert seen.layout_shift() < 0.05

    # The host goes away, and the page says so.
    host.stop()
    assert "Traceback" not in host.text()
    seen.until("that nobody answers", "() => document.querySelector('#link').textContent !== 'live'")
    assert ada.running
    assert eve.running
    assert [one for one in seen.wrong if "net::ERR_" not in one] == []


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
