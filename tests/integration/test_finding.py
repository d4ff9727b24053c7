"""A run is found in a directory and joined by its name; its card follows it to its end."""

import json
from typing import Any

import pytest
from tests.integration.harness import SHOAL, START_S, Swarm, eventually, run_toml

pytestmark = pytest.mark.integration

OPEN = '[access]\nadmission = "open"\n[card]\ntitle = "Reefs"\nlicence = "Apache-2.0"\n'


def test_a_published_run_is_joined_by_its_name(swarm: Swarm) -> None:
    pub = swarm.folder / "www"
    host = swarm.host(run_toml(max_s=1.0) + OPEN, extra=("--publish", str(pub)))
    card, directory = pub / "reef.json", pub / "runs.json"

    def published(**fields: Any) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = json.loads(card.read_text()) if card.exists() else {}
            return found if fields.items() <= found.items() else None

        return eventually(f"the card has {fields}", look, START_S, host.tail)

    assert published(state="running", parameters=None)["invite"] == host.invite
    added = swarm.command("add", *SHOAL, "directory", "add", str(directory), str(card))
    assert added.exit_code(START_S) == 0, added.tail()
    member = swarm.member("reef", "finder", extra=("--directory", str(directory)))
    member.committed()
    assert published(members=1)["licence"] == "Apache-2.0"
    listed = swarm.command("runs", *SHOAL, "runs", str(directory), "--json", "--device", "cpu")
    assert listed.exit_code(START_S) == 0, listed.tail()
    (found,) = json.loads(listed.log.read_text())["runs"]
    assert found["can_join"] is True, found
    assert found["mark"] == ""
    member.leave()
    host.stop()
    ended = published(state="stopped")["round"]
    assert ended >= 1
    # Beside it lies the page, with the rounds up to the end.
    assert "data.js" in (pub / "reef" / "index.html").read_text()
    shown = (pub / "reef" / "data.js").read_text()
    copied = json.loads(shown.removeprefix("window.shoalCopy = ").removesuffix(";\n"))
    assert copied["status"]["rounds_committed"] == len(copied["rounds"]["round"]) == ended
    assert copied["renewed_s"] is None
    assert host.invite not in shown
