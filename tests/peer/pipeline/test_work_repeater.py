"""Budget of work that is computed again for others."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.peer.pipeline.work_checks import ExchangeLog, WorkRepeater
from shoal.swarm.errors import Busy
from shoal.swarm.protocol.messages import PeerToPeerRepeatWork

SENDERS = [letter * 16 for letter in "abcd"]


def repeater(monkeypatch: pytest.MonkeyPatch) -> WorkRepeater:
    monkeypatch.setattr("shoal.peer.pipeline.work_checks.holders", lambda view, stage: dict.fromkeys(SENDERS))
    client = SimpleNamespace(view=None, peer="me")
    context: Any = SimpleNamespace(
        members=SimpleNamespace(run=SimpleNamespace(client=client, node=None)),
        span=SimpleNamespace(first=1, last=1),
        shapes=SimpleNamespace(micro_batch=4),
        settings=SimpleNamespace(share=0.01),
        holds=lambda peer, stage: True,
    )
    made = WorkRepeater(context, ExchangeLog(), lambda task: None)
    made.round_opened(3)
    return made


def ask(repeater: WorkRepeater, sender: str) -> None:
    request = PeerToPeerRepeatWork(round=3, start=0, stop=4, stage=1, last=1, number=0, backward=False, seed=bytes(16))
    repeater._check_request(sender, request)
    repeater._repeated[sender] += 1


def test_one_sender_does_not_use_up_the_budget_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = repeater(monkeypatch)
    ask(made, SENDERS[0])
    ask(made, SENDERS[0])
    with pytest.raises(Busy):
        ask(made, SENDERS[0])
    ask(made, SENDERS[1])
    ask(made, SENDERS[2])
    with pytest.raises(Busy):
        ask(made, SENDERS[3])
    made.round_opened(4)
    assert not made._repeated
