"""What the page is told: rounds in columns, sentences without addresses, what the run waits for."""

from __future__ import annotations

import json
import math

import pytest
from tests.swarm.web.samples import DEVICE, RUN, member, status, timing, verdict

from shoal.swarm.protocol.json_values import status_json
from shoal.swarm.protocol.types import RelayStatus
from shoal.swarm.web.documents import RoundHistory, facts, public_status, round_detail, waits_for, without_addresses
from shoal.swarm.web.feed import encode


def test_rounds_come_in_columns_and_each_once() -> None:
    history = RoundHistory()
    history.take([verdict(0, 1), verdict(1, 1, committed=False, reason="nobody was ready")])
    history.take([verdict(1, 1, committed=False), verdict(2, 2)])
    assert history.next_round == 3
    columns = history.since(0, 10)
    assert columns["round"] == [0, 1, 2]
    assert columns["state"] == ["committed", "aborted", "committed"]
    assert columns["reason"] == ["", "nobody was ready", ""]
    assert columns["members"] == [2, 0, 2]
    assert (columns["parts"][0], columns["void"][0]) == (2, 1)
    assert history.since(1, 1)["round"] == [1]
    assert history.since(3, 10)["round"] == []


def test_rounds_say_where_their_time_went_and_for_whom_the_others_waited() -> None:
    history = RoundHistory()
    late = timing(1, late=2, text="round 1 took 12 s longer because x at 10.0.0.1:80 sent at 2 Mbit/s")
    history.take([verdict(0, 1), verdict(1, 2), verdict(2, 3)], [late, timing(2)])
    columns = history.since(0, 9)
    assert columns["exchange_s"] == [None, 7.0, 7.0]
    assert columns["waited_for"] == [None, member(2).peer, None]
    assert columns["waited_s"] == [None, 12.0, None]
    assert columns["why"] == [None, "round 1 took 12 s longer because x at (address) sent at 2 Mbit/s", ""]
    assert "10.0.0.1" not in encode(public_status(status([member(1)], timing=late))).decode()


def test_rounds_behind_a_rollback_are_undone_and_those_before_it_are_not() -> None:
    history = RoundHistory()
    history.take([verdict(0, 1), verdict(1, 2), verdict(2, 3)])
    history.take([verdict(3, 1, committed=False, reason="went back")])
    assert history.since(0, 9)["state"] == ["committed", "undone", "undone", "aborted"]
    history.take([verdict(4, 2), verdict(5, 1, committed=False)])
    assert history.since(0, 9)["state"] == ["committed", "undone", "undone", "aborted", "undone", "aborted"]
    assert history.undone == 3


@pytest.mark.parametrize(
    "address",
    [
        "192.168.1.5",
        "203.0.113.7:7707",
        "[2001:db8::1]:7707",
        "2001:db8::1",
        "::ffff:10.0.0.1",
        "shoal://1.2.3.4/x?key=ab&t=secret",
        "[fe80::1%eth0]:7707",
        "home.example.org:7707",
    ],
)
def test_sentences_lose_their_addresses(address: str) -> None:
    words = without_addresses(f"{address} does not answer within 4.0 s, after 3.2.1 tries since 12:34:56.")
    assert words == "(address) does not answer within 4.0 s, after 3.2.1 tries since 12:34:56."


@pytest.mark.parametrize(
    "words",
    ["http://{}/x refused", "to={}", "tcp:{}", "<{}>", "('{}', 80)", "me@{}", "{}/24", "peer→{}→peer", "at: {}."],
)
@pytest.mark.parametrize("address", ["10.1.2.3", "10.1.2.3:80", "[2001:db8::1]:7707"])
def test_addresses_are_masked_within_words(words: str, address: str) -> None:
    assert without_addresses(words.format(address)) == words.format("(address)")


def test_no_address_of_a_volunteer_is_in_the_status() -> None:
    device = DEVICE.model_copy(update={"name": "CPU of 10.1.2.3"})
    told = {"name": "shoal://10.1.2.3/x?t=secret", "device": device, "activity": "asks http://10.1.2.3/"}
    walled = member(1, **told, wall="cannot meet member-2 at 10.1.2.3:700", trouble="10.1.2.3 refused", left="10.1.2.3")
    relays = (
        RelayStatus(host="10.1.2.3", port=700, peer=member(2).peer, load=None),
        RelayStatus(host="relay.example.org", port=443, load=None),
    )
    plain = public_status(status([walled, member(2)], relays=relays, outlook="10.1.2.3 has it", warning="10.1.2.3"))
    assert "10.1.2.3" not in json.dumps(plain)
    assert plain["members"][0]["name"] == "(address)"
    assert [relay["host"] for relay in plain["relays"]] == ["", "relay.example.org"]


def test_the_status_is_that_of_the_command() -> None:
    told = status([member(1), member(2, alive=False, left="left")])
    plain = public_status(told)
    assert plain.pop("waits_for") == ""
    assert plain == status_json(told)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (status([member(1)]), ""),
        (status([]), "Nobody is here"),
        (status([member(1, alive=False)]), "Nobody is here"),
        (status([member(1)], phase="ended"), "The run has ended."),
        (status([member(1)], outlook="nobody holds version 3"), "nobody holds version 3"),
        (status([member(1, synced=False)]), "One member is here, and gets the state"),
        (status([member(1, synced=False), member(2, synced=False)]), "2 members are here, and get the state"),
        (status([member(1, wall="it can meet nobody")]), "it can meet nobody"),
        (status([member(1)], phase="waiting"), "The next round begins"),
    ],
)
def test_what_the_run_waits_for_is_said(told: object, words: str) -> None:
    sentence = waits_for(told)  # type: ignore[arg-type]
    assert sentence.startswith(words)
    assert bool(sentence) == bool(words)


def test_a_round_names_its_members_and_their_weights() -> None:
    detail = round_detail(verdict(4, 5))
    assert [one["weight"] for one in detail["members"]] == [100, 101]
    assert round_detail(verdict(4, 5, committed=False))["members"] == []


def test_facts_are_json() -> None:
    told = json.loads(encode(facts(RUN)))
    assert told["name"] == "reef"
    assert told["goals"] == {"rounds": 8}


def test_json_is_safe_in_a_script_and_has_no_infinite_numbers() -> None:
    data = encode({"name": "</script><script>\u2028", "loss": math.nan, "more": [math.inf, 1.5]})
    assert b"<" not in data
    assert json.loads(data) == {"name": "</script><script>\u2028", "loss": None, "more": [None, 1.5]}
