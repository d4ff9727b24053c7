"""A real browser, headless, that notes what no page of ours may do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "\u202egnp<img src=x onerror=alert(1)>\u0007</script>"
"""What strangers may call themselves: with markup, and a mark that turns the direction of writing."""

SHOWN = "\u00b7gnp<img src=x onerror=alert(1)>\u00b7</script>"
"""The same on the page."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright's."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page of the browser; ``wrong``: errors in its console, requests to others, dialogs."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.wrong: list[str] = []
        self.page = browser.new_page(**options)
        self.page.on("console", lambda message: self._note(message.type == "error", message.text))
        self.page.on("pageerror", lambda error: self._note(True, str(error)))
        server = url.partition("#")[0].partition("?")[0]
        self.page.on("request", lambda request: self._note(not request.url.startswith(server), request.url))
        self.page.on("dialog", lambda dialog: self._note(True, dialog.message))
        self.page.goto(url)

    def _note(self, is_wrong: bool, words: str) -> None:
        if is_wrong:
            self.wrong.append(words)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, what: str, script: str, within_s: float = 60.0) -> None:
        from playwright.sync_api import TimeoutError as BrowserTimeout

        try:
            self.page.wait_for_function(script, timeout=1000 * within_s)
        except BrowserTimeout:
            raise AssertionError(f"the page does not show {what}:\n{self.text('body')}") from None

    def until_text(self, selector: str, words: str) -> None:
        self.until(words, f"() => document.querySelector({selector!r}).textContent.includes({words!r})")

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
