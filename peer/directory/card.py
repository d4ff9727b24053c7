"""The card of a run: a small signed JSON file that says what is trained, what a peer needs and how to get in.

A card carries the coordinator's certificate, so the key that signed it is tied to the CURVE key in the run's invite;
which key is the right one for a run, the directory says that lists the card. A card has no secret: an invite is in it
only for an open run, and never a token.

The signature (Ed25519, RFC 8032) is over ``shoal run card, version 1``, a zero byte, and the canonical JSON of all
fields but ``signature``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import StringConstraints, ValidationError

from shoal.peer.checkpoints.manifest import Hex32, Hex64, canonical_json
from shoal.swarm.errors import DirectoryError, InviteError, NotAdmitted
from shoal.swarm.memory_account import account_of, checkpoint_values, round_values
from shoal.swarm.protocol.evaluations import newest_used
from shoal.swarm.protocol.identity import CurveKeys, Identity, key_text, verify_certificate, verify_signature
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import PROTOCOL_VERSION, CoordinatorToPeerStatus
from shoal.swarm.protocol.run_file import CardSection, RunFile, RunName
from shoal.swarm.protocol.types import MAX_RATE, Certificate, CostStatus, Count, Loss, Rate, Record, UnixTime

MAX_CARD_BYTES = 16_384
_CONTEXT = b"shoal run card, version 1\0"
_KEPT_CHECKPOINTS = 4
"""The three that a peer keeps by default, and the one that it is writing."""

CardState = Literal["running", "stopped", "ended"]
"""``stopped``: the host was ended by its owner and may come back; ``ended``: the run has reached its end."""

_Short = Annotated[str, StringConstraints(max_length=64)]


class Needs(Record):
    """Least requirements of a member; memory without activations, which depend on the batch and the device.

    ``device_bytes``, ``host_bytes``: of a GPU with a memory of its own, and of the machine beside it;
    ``shared_bytes``: of a machine that computes in its own memory; ``disk_bytes``: for checkpoints as kept by default;
    ``round_bytes``: sent in a round, and received; ``bandwidth_bps``: rate at which that takes as long as the longest
    round. In a pipeline: for its largest layer, and without the activations that travel."""

    device_bytes: Count
    host_bytes: Count
    shared_bytes: Count
    disk_bytes: Count
    round_bytes: Count
    bandwidth_bps: Rate


class RunCard(CardSection):
    """Content of a card. ``python``: of the host, on which data of the standard library depends; ``data``: the run
    file's ``data.source``; ``parameters``: None while the model is not known; ``round``, ``tokens``: committed so far,
    of ``of_rounds`` and ``of_tokens`` if the run ends there; ``held_out_loss``: of the newest version that validators
    evaluated, ``held_out_agreed``: two or more have measured it; ``costs``: by what members and the run file say;
    ``invite``: empty unless everybody may join."""

    format: Literal[1] = 1
    run: RunName
    run_hash: Hex32
    protocol: Count
    shoal: _Short
    python: _Short
    recipe: _Short
    algorithm: _Short
    data: Annotated[str, StringConstraints(max_length=500)]
    parameters: Count | None
    in_stages: bool
    needs: Needs | None
    round: Count
    of_rounds: Count | None
    tokens: Count
    of_tokens: Count | None
    loss: Loss | None
    held_out_loss: Loss | None = None
    held_out_version: Count | None = None
    held_out_agreed: bool = False
    members: Count
    tokens_per_s: Rate
    costs: CostStatus = CostStatus()
    admission: Literal["open", "token", "list"]
    invite: Annotated[str, StringConstraints(max_length=4096)]
    state: CardState
    written_s: UnixTime


class SignedCard(RunCard):
    """A card as in its file. ``identity_key``: the run's; ``curve_key``: its coordinator's, in every invite;
    ``certificate``: the first one's signature of the second."""

    identity_key: Hex32
    curve_key: Hex32
    certificate: Hex64
    signature: Hex64

    @property
    def signed_bytes(self) -> bytes:
        return _CONTEXT + canonical_json(self.model_dump(mode="json", exclude={"signature"}))

    @property
    def file_bytes(self) -> bytes:
        """The file: indented, as people read it, too."""
        return (json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n").encode()

    @property
    def key(self) -> str:
        """The run's key, as directories name it."""
        return key_text(bytes.fromhex(self.identity_key))

    def check(self, pinned: str = "") -> None:
        """Check signature, keys and invite; ``pinned``: the key that the run is known by.

        Raises ``DirectoryError`` that says in what the card is forged."""
        if pinned and pinned != self.key:
            raise DirectoryError(f"it is signed by {self.key[:16]}…, and the run's key is {pinned[:16]}…")
        identity_key, curve_key = bytes.fromhex(self.identity_key), bytes.fromhex(self.curve_key)
        if not verify_signature(identity_key, bytes.fromhex(self.signature), self.signed_bytes):
            raise DirectoryError("its signature does not match its content")
        try:
            verify_certificate(
                Certificate(identity_key=identity_key, curve_key=curve_key, signature=bytes.fromhex(self.certificate))
            )
        except NotAdmitted as error:
            raise DirectoryError("its coordinator's key is not certified by the run's key") from error
        self.parsed_invite()

    def parsed_invite(self) -> Invite | None:
        """The invite of an open run, else None. Raises ``DirectoryError`` for one that is not the card's."""
        if not self.invite:
            return None
        try:
            invite = Invite.parse(self.invite)
        except InviteError as error:
            raise DirectoryError(f"its invite is none: {error}") from error
        named = invite.key.hex(), invite.run_hash.hex(), invite.run
        if invite.token or named != (self.curve_key, self.run_hash, self.run):
            raise DirectoryError("its invite is to another run, to another key, or has a secret")
        return invite


def parse_card(data: bytes) -> SignedCard:
    """Parse a card's file; its signature is still to be checked. Raises ``DirectoryError``."""
    if len(data) > MAX_CARD_BYTES:
        raise DirectoryError(f"larger than {MAX_CARD_BYTES} bytes, the most that a card may have")
    try:
        return SignedCard.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"][:3])[:80]
        raise DirectoryError(f"not a run's card: {where}: {first['msg']}".replace(": : ", ": ")) from error


@dataclass(frozen=True)
class CardSource:
    """Constant part of a run's card, and the keys that sign it. ``shoal``, ``python``: versions here."""

    invite: Invite
    identity: Identity
    curve_keys: CurveKeys
    shoal: str
    python: str

    def card(
        self,
        run: RunFile,
        status: CoordinatorToPeerStatus,
        elements: int | None,
        written_s: float,
        *,
        stopped: bool = False,
    ) -> SignedCard:
        """Make the signed card of a moment. ``run``: the run file as it is now; ``elements``: trained parameters of the
        model, None while unknown, which a run file with ``[pins]`` says itself."""
        alive = [one for one in status.members if one.alive]
        held = elements
        if run.pins is not None:
            elements = held = run.pins.elements
            if run.pins.layers is not None:
                held = max(layer.elements for layer in run.pins.layers)
        ended, figure = status.phase == "ended", newest_used(status.evaluation)
        content: dict[str, Any] = {
            **run.card.model_dump(mode="json"),
            "format": 1,
            "run": run.run.name,
            "run_hash": run.hash.hex(),
            "protocol": PROTOCOL_VERSION,
            "shoal": self.shoal,
            "python": self.python,
            "recipe": run.recipe.name,
            "algorithm": run.algorithm,
            "data": run.data.source,
            "parameters": elements,
            "in_stages": run.pipeline is not None,
            "needs": None if held is None else needs_of(run, held).model_dump(mode="json"),
            "round": status.rounds_committed,
            "of_rounds": run.run.rounds,
            "tokens": status.tokens_committed,
            "of_tokens": run.run.tokens,
            "loss": status.loss,
            "held_out_loss": None if figure is None else figure.loss,
            "held_out_version": None if figure is None else figure.version,
            "held_out_agreed": figure is not None and figure.standing == "agreed",
            "members": len(alive),
            "tokens_per_s": min(round(sum(one.tokens_per_s for one in alive), 1), MAX_RATE),
            "costs": status.costs.model_dump(mode="json"),
            "admission": run.access.admission,
            "invite": str(replace(self.invite, token=b"")) if run.access.admission == "open" else "",
            "state": "ended" if ended else "stopped" if stopped else "running",
            "written_s": round(written_s, 3),
        }
        return signed_card(content, self.identity, self.curve_keys)


def signed_card(content: Mapping[str, Any], identity: Identity, curve_keys: CurveKeys) -> SignedCard:
    """Sign a card's content, whose fields are those of ``RunCard``."""
    certificate = identity.certify(curve_keys)
    fields = dict(
        content,
        identity_key=identity.public_key.hex(),
        curve_key=certificate.curve_key.hex(),
        certificate=certificate.signature.hex(),
    )
    unsigned = SignedCard(**fields, signature=128 * "0")
    return unsigned.model_copy(update={"signature": identity.sign(unsigned.signed_bytes).hex()})


def needs_of(run: RunFile, held: int) -> Needs:
    """Return what a member needs that holds so many trained parameters."""
    demand, traffic = account_of(run).demand(), int(4 * round_values(run) * held)
    return Needs(
        device_bytes=int(4 * demand.device * held),
        host_bytes=int(4 * demand.host * held),
        shared_bytes=int(4 * demand.shared * held),
        disk_bytes=int(4 * checkpoint_values(run) * held * _KEPT_CHECKPOINTS),
        round_bytes=traffic,
        bandwidth_bps=round(8 * traffic / run.round.max_s, 1),
    )
