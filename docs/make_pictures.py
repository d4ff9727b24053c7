"""Make the pictures of the page in docs/: on a desktop, on a phone, and in dark. Needs playwright and chromium.

    python docs/make_pictures.py URL

URL: of a page that is served (`shoal host --web`), or file:///… of a copy (`shoal page RUN --out DIR`)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
MOST_BYTES = 150_000

PICTURES: dict[str, dict[str, Any]] = {
    "page": {"viewport": {"width": 1200, "height": 1240}},
    "page-phone": {"viewport": {"width": 360, "height": 1240}},
    "page-dark": {"viewport": {"width": 1200, "height": 1240}, "color_scheme": "dark"},
}
"""Names of the files, and the browsers they are seen with."""


def make_pictures(url: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, options in PICTURES.items():
            page = browser.new_page(**options)
            page.goto(url)
            page.wait_for_function("() => document.querySelector('#round-detail').textContent.startsWith('Round')")
            page.wait_for_timeout(1500)  # until bars have grown
            path = DOCS / f"{name}.png"
            page.screenshot(path=path)
            print(f"{path.name}: {path.stat().st_size} bytes")
            if path.stat().st_size > MOST_BYTES:
                raise SystemExit(f"{path}: has more than {MOST_BYTES} bytes")
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    make_pictures(sys.argv[1])
