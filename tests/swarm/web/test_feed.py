"""The feed of changes: whole statuses and differences, each encoded once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.swarm.web.samples import member, status

from shoal.swarm.web.feed import Feed


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    lines = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
    return lines["event"], json.loads(lines["data"])


def test_a_newcomer_gets_the_whole_status_and_a_follower_what_has_changed() -> None:
    async def run() -> None:
        feed = Feed()
        feed.take(status([member(1), member(2)]))
        known, event = await feed.after(0)
        kind, whole = parsed(event)
        assert (kind, len(whole["members"])) == ("status", 2)
        feed.take(status([member(1, loss=2.0), member(3)], round=3))
        later, event = await feed.after(known)
        kind, delta = parsed(event)
        assert (kind, later) == ("delta", known + 1)
        assert delta["round"] == 3
        assert "chain" not in delta
        assert [(one["peer"], len(one) > 2) for one in delta["members"]] == [
            (member(1).peer, False),
            (member(3).peer, True),
        ]
        assert delta["gone"] == [member(2).peer]
        assert parsed((await feed.after(0))[1])[1]["round"] == 3

    asyncio.run(run())


def test_who_has_missed_a_change_gets_the_whole_status() -> None:
    async def run() -> None:
        feed = Feed()
        for number in range(3):
            feed.take(status(round=number))
        known, event = await feed.after(1)
        assert known == 3
        assert parsed(event)[0] == "status"

    asyncio.run(run())


def test_what_has_not_changed_wakes_nobody() -> None:
    async def run() -> None:
        feed = Feed()
        feed.take(status([member(1, tokens_per_s=1234.1)]))
        waiting = asyncio.ensure_future(feed.after(feed.version))
        feed.take(status([member(1, tokens_per_s=1233.9)]))
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.take(status([member(1, tokens_per_s=1300.0)]))
        assert (await waiting)[0] == 2

    asyncio.run(run())
