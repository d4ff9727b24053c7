"""A run's card: what it says, what it never says, and that nobody but the run's host can write it."""

import json

import pytest
from tests.peer.directory.cards import make_card, run_file, signed_anew
from tests.swarm.coordinator.world import CPU

from shoal.peer.directory.card import MAX_CARD_BYTES, needs_of, parse_card
from shoal.swarm.errors import DirectoryError
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.identity import Identity, key_text
from shoal.swarm.protocol.types import MAX_RATE, MemberStatus

HOST = Identity.generate()


def test_a_card_says_how_far_the_run_is_and_how_to_get_in() -> None:
    card = make_card(identity=HOST)
    again = parse_card(card.file_bytes)
    again.check(key_text(HOST.public_key))
    assert again == card
    assert (card.round, card.of_rounds, card.tokens, card.of_tokens, card.members) == (3, 9, 24, None, 0)
    assert card.state == "running"
    invite = again.parsed_invite()
    assert invite is not None
    assert invite.run_hash == run_file().hash
    assert make_card(phase="ended").state == "ended"


def test_every_field_is_signed() -> None:
    """Another value of any field, of the right type, is noticed."""
    content = json.loads(make_card(identity=HOST).file_bytes)
    for name, value in content.items():
        if name in ("format", "admission", "state", "homepage"):
            other = {"admission": "list", "state": "ended", "homepage": "https://example.com/"}.get(name)
        elif isinstance(value, dict):
            other = {**value, "disk_bytes": 1}
        elif isinstance(value, bool):
            other = not value
        elif isinstance(value, int | float):
            other = value + 1
        elif isinstance(value, str):
            other = f"{value[1:]}{value[0]}" if len(value) >= 64 else f"{value}x"
        else:
            other = 7
        if other is None:
            continue
        with pytest.raises(DirectoryError):
            parse_card(json.dumps(content | {name: other}).encode()).check()


def test_another_key_than_the_known_one_is_refused() -> None:
    card = make_card()
    card.check()
    with pytest.raises(DirectoryError, match="the run's key is"):
        card.check(key_text(HOST.public_key))


def test_the_invite_has_to_lead_to_the_key_that_signed() -> None:
    """Who signs a card of its own cannot list another coordinator, nor another run, under it."""
    thief = Identity.generate()
    honest = make_card(identity=HOST)
    for changed in ({"invite": honest.invite}, {"invite": ""}):
        card = signed_anew(honest, thief, **changed)
        if changed["invite"]:
            with pytest.raises(DirectoryError, match="another run, to another key"):
                card.check()
        else:
            card.check()
    stolen = signed_anew(honest, thief, curve_key=honest.curve_key)
    with pytest.raises(DirectoryError, match="signature"):
        parse_card(stolen.model_copy(update={"curve_key": honest.curve_key}).file_bytes).check()
    other_run = make_card(run_file(more='purpose = "another"'), HOST)
    with pytest.raises(DirectoryError, match="another run"):
        signed_anew(honest, HOST, invite=other_run.invite).check()


@pytest.mark.parametrize("admission", ["open", "token", "list"])
def test_no_card_has_a_secret(admission: str) -> None:
    run = run_file(admission=admission)
    card = make_card(run, HOST, token=b"" if admission == "open" else bytes(range(82)))
    assert ("shoal://" in card.invite) == (admission == "open")
    assert "t=" not in card.invite
    assert card.contact == "kim@example.org"


def test_an_invite_with_a_token_makes_a_card_a_forgery() -> None:
    honest = make_card(identity=HOST)
    with pytest.raises(DirectoryError, match="invite"):
        signed_anew(honest, HOST, invite=f"{honest.invite}&t=AAAA").check()


def test_what_a_member_needs_is_the_memory_account_s() -> None:
    run = run_file()
    needs = needs_of(run, 1000)
    demand = account_of(run).demand()
    assert needs.device_bytes == int(4000 * demand.device)
    assert needs.host_bytes == int(4000 * demand.host)
    assert needs.shared_bytes == int(4000 * demand.shared)
    assert needs.disk_bytes == 4000 * 4 * (1 + 1 + 2 + 1), "anchor, momentum, two moments, residual; four times"
    assert needs.round_bytes == int(2 * 4000 * (1024 + 4) / 4096), "a contribution and a mean, int8"
    assert make_card(run).needs == needs_of(run, 1_000_000)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80", "not a run's card"),
        (b"[" * 10_000, "not a run's card"),
        (b"{}", "not a run's card"),
        (b" " * (MAX_CARD_BYTES + 1), "larger than"),
    ],
)
def test_other_bytes_are_no_card(data: bytes, words: str) -> None:
    with pytest.raises(DirectoryError, match=words):
        parse_card(data)


def test_a_title_cannot_move_the_cursor() -> None:
    content = json.loads(make_card().file_bytes) | {"title": "\x1b[2J"}
    with pytest.raises(DirectoryError, match="title"):
        parse_card(json.dumps(content).encode())


def test_what_members_claim_makes_no_card_impossible() -> None:
    """Each may claim the largest rate; together they have no more room in a card."""
    member = MemberStatus(
        peer="a" * 16,
        name="a peer",
        device=CPU,
        activity="training",
        alive=True,
        synced=True,
        reachable=True,
        tokens_per_s=MAX_RATE,
        tokens_committed=0,
        share=0.0,
        credit=0.0,
        loss=None,
        bytes_sent=0,
        bytes_received=0,
    )
    card = make_card(members=(member, member.model_copy(update={"peer": "b" * 16})))
    assert (card.members, card.tokens_per_s) == (2, MAX_RATE)
