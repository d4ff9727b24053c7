"""Cards for tests, of runs whose hosts have keys of their own."""

from typing import Any

from shoal.peer.directory.card import CardSource, SignedCard, signed_card
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import Address

NOW_S = 1_800_000_000.0


def run_file(name: str = "reef", admission: str = "open", more: str = "") -> RunFile:
    return parse_run_file(
        f'[run]\nname = "{name}"\nrounds = 9\n[recipe]\nname = "gpt"\n[round]\ntokens = 8\n'
        f'[access]\nadmission = "{admission}"\n[card]\ntitle = "Reefs"\ncontact = "kim@example.org"\n{more}'
    )


def status_of(run: RunFile, **fields: Any) -> CoordinatorToPeerStatus:
    usual: dict[str, Any] = {
        "run": run.run.name,
        "run_hash": run.hash,
        "round": 3,
        "phase": "training",
        "closes_in_s": None,
        "anchor_version": 3,
        "rounds_committed": 3,
        "rounds_aborted": 0,
        "tokens_committed": 24,
        "loss": 2.5,
        "tokens_in_round": 1,
        "chain": bytes(32),
        "state_digest": None,
        "elapsed_s": 60.0,
        "members": (),
    }
    return CoordinatorToPeerStatus(**usual | fields)


def make_card(
    run: RunFile | None = None,
    identity: Identity | None = None,
    written_s: float = NOW_S,
    token: bytes = b"",
    **status: Any,
) -> SignedCard:
    run, identity = run or run_file(), identity or Identity.generate()
    keys = identity.coordinator_keys()
    invite = Invite((Address(host="203.0.113.5", control_port=7707),), run.run.name, keys.public, run.hash, token)
    source = CardSource(invite, identity, keys, "0.1.0", "3.12.1")
    return source.card(run, status_of(run, **status), 1_000_000, written_s)


def signed_anew(card: SignedCard, identity: Identity, keys: CurveKeys | None = None, **changed: Any) -> SignedCard:
    """The card with other fields, signed by ``identity``."""
    kept = {"identity_key", "curve_key", "certificate", "signature"}
    content = card.model_dump(mode="json", exclude=kept) | changed
    return signed_card(content, identity, keys or identity.coordinator_keys())
