"""Schema of events: name, meaning and fields of everything that a peer or a host logs with ``--log-json``.

``docs/events.md`` is made from it (`make docs`). ``make_event`` is the only place that makes an event.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]

FIELDS_OF_ALL: Mapping[str, str] = {
    "event": "the name of the event",
    "time": "when it happened, in seconds since 1970 (UTC)",
    "run": "name of the run; in a host's events, and in some of a peer's",
    "stage": "the pipeline's stage that the event is about; absent where it is about the run",
}


@dataclass(frozen=True)
class EventKind:
    """Meaning of an event and of its fields. A field is absent or null where it does not apply."""

    meaning: str
    fields: Mapping[str, str]


_VERDICT: Mapping[str, str] = {
    "round": "number of the round",
    "committed": "whether its mean was applied",
    "reason": "why it was not; empty for a committed round",
    "tokens": "tokens of the round",
    "tokens_total": "committed tokens of the run so far",
    "loss": "mean training loss of the round, in nats",
    "anchor_version": "version of the anchor after the round",
    "members": "ids of the peers in the round",
    "elapsed_s": "seconds that the round took",
    "chain": "hash of the run's history up to this verdict",
    "together": "hash over the verdicts of all stages of this round",
}
_TRAFFIC: Mapping[str, str] = {
    "bytes_sent": "bytes that this process has sent since it started",
    "bytes_received": "bytes that it has received",
}

_AMENDED = EventKind(
    "the host has changed settings of the run",
    {"round": "the round from which they count", "changes": "JSON of the new value by name of the setting"},
)

PEER_EVENTS: Mapping[str, EventKind] = {
    "joined": EventKind(
        "this peer has joined the run",
        {"run": "name of the run", "peer": "id of this peer", "reachable": "whether others can connect to it"},
    ),
    "state_fetched": EventKind(
        "the state of the run was downloaded from other peers",
        {
            "anchor_version": "its version",
            "chunks": "number of its chunks",
            "resumed": "chunks that were here from before",
            "donors": "number of chunks by peer that sent them",
            "seconds": "how long it took",
        },
    ),
    "donor_refused": EventKind(
        "a peer is asked for no more of the state",
        {"donor": "id of that peer", "anchor_version": "version of the state", "reason": "why"},
    ),
    "synced": EventKind(
        "this peer holds the state that the run has agreed on, and trains from it",
        {
            "anchor_version": "its version",
            "digest": "digest of the state",
            "residual": "whether this peer's own state came back with it",
            "checkpoint": "round of the checkpoint that it came from",
            "caught_up": "rounds that were applied to that checkpoint",
        },
    ),
    "amended": _AMENDED,
    "committed": EventKind(
        "a round was committed and applied here",
        {
            "round": "number of the round",
            "anchor_version": "version of the anchor after it",
            "loss": "mean training loss of the round, in nats",
            "tokens": "committed tokens of the run so far",
            "members": "number of peers in the round",
            "included": "whether this peer's work is in the mean",
            "digest": "digest of the state after it",
            **_TRAFFIC,
        },
    ),
    "aborted": EventKind("a round was aborted for all", {"round": "number of the round", "reason": "why"}),
    "resync": EventKind("this peer drops its local work and starts again from the anchor", {"reason": "why"}),
    "diverged": EventKind(
        "training from this anchor gives no finite numbers here; the coordinator is asked whether it is so for all",
        {"anchor_version": "version of the anchor", "digest": "digest of its state"},
    ),
    "span": EventKind(
        "this peer has entered stages of a pipeline",
        {
            "first": "first of them",
            "last": "last of them",
            "stages": "number of stages of the run",
            "first_layer": "first layer of the model that it holds",
            "stop_layer": "the layer after its last one",
            "parameters_bytes": "size of its parameters, in bytes",
            "anchor_version": "version of the run's anchor",
        },
    ),
    "scored": EventKind(
        "this validator has scored a contribution",
        {
            "round": "number of the round",
            "peer": "the member that contributed it",
            "finding": "helps, unclear, harms, empty, copied, wrong gradient, wrong loss or withheld",
            "gain_random": "decrease of the loss by it on random samples, in nats",
            "gain_leased": "the same on the member's samples",
        },
    ),
    "evaluation": EventKind(
        "this validator has evaluated a version of the model on held-out data, and reported it",
        {
            "version": "version of the anchor",
            "loss": "held-out loss, in nats a token; null for no finite number",
            "samples": "held-out samples",
            "accuracy": "share of the tokens, or labels, that the model finds likeliest",
            "seconds": "how long it took",
        },
    ),
    "paused": EventKind(
        "this peer is out of the run by its owner's terms, and comes back by itself",
        {"run": "name of the run", "reason": "why", "until": "when or how that ends, in local time"},
    ),
    "resumed": EventKind("the owner's terms let this peer join again", {"run": "name of the run"}),
    "left": EventKind(
        "this peer has left the run",
        {
            **_TRAFFIC,
            "anchor_version": "version of the state that it held last",
            "digest": "digest of that state",
            "held": "the same by stage, for a pipeline",
            "tokens_trained": "tokens that it has trained",
        },
    ),
}

HOST_EVENTS: Mapping[str, EventKind] = {
    "amended": _AMENDED,
    "member_joined": EventKind(
        "a peer was admitted",
        {
            "peer": "its id",
            "name": "its name",
            "role": "trainer, contributor, validator or follower",
            "device": "its device",
            "invite": "id of the invite that let it in; absent where it was known already, or needed none",
        },
    ),
    "member_lost": EventKind(
        "a peer is a member no more",
        {"peer": "its id", "reason": "why", "trouble": "what the peer itself says is wrong"},
    ),
    "invite_made": EventKind(
        "the host has made an invite",
        {
            "invite": "its id",
            "role": "the most that it admits to: trainer, contributor, validator or observer",
            "uses": "identities that may join by it; 0 for any number",
            "expires_s": "when it ends, in seconds since 1970 (UTC); 0 for never",
            "note": "the host's remark",
        },
    ),
    "invite_revoked": EventKind("an invite lets nobody new in any more", {"invite": "its id"}),
    "member_kicked": EventKind(
        "the host has removed a member, which may join again", {"peer": "its id", "note": "the host's remark"}
    ),
    "peer_banned": EventKind(
        "the host has banned an identity",
        {"peer": "its id", "network": "the network that is banned with it, or empty", "note": "the host's remark"},
    ),
    "standing_by": EventKind(
        "another host leads the run; this one follows its journal and takes over when it falls silent",
        {"leader": "who leads; empty while nobody does"},
    ),
    "leading": EventKind(
        "this host leads the run from now on", {"epoch": "fencing epoch of its lease", "round": "the open round"}
    ),
    "member_expelled": EventKind(
        "a member is banned, as evidence proves that it signed a wrong mean",
        {
            "peer": "its id",
            "round": "number of the round",
            "accuser": "id of the member that showed the evidence",
            "evidence": "the evidence's id; the host's folder has it under that name",
        },
    ),
    "mean_disproved": EventKind(
        "evidence proves that a mean is wrong beyond the bound, and the run goes back",
        {
            "peer": "id of the member that signed it",
            "round": "number of the round",
            "excess": "how far it is off, relative to how far that member's own contribution could have moved it",
            "accuser": "id of the member that showed the evidence",
            "evidence": "the evidence's id; the host's folder has it under that name",
        },
    ),
    "peer_allowed": EventKind("the host has lifted a ban, or has put an identity on its list", {"peer": "its id"}),
    "round_closing": EventKind("a round takes no more work", {"round": "number of the round"}),
    "round_reopened": EventKind(
        "a closing round takes work again, as some was lost or is missing", {"round": "number of the round"}
    ),
    "round_planned": EventKind(
        "it is decided who averages what in a round",
        {
            "round": "number of the round",
            "members": "ids of the peers in it",
            "tokens": "tokens of each of them, its weight in the mean",
            "parts": "number of parts that the vector is cut into",
            "clipped": "ids of those whose contributions are bounded",
        },
    ),
    "verdict": EventKind("a round has ended, committed or aborted", _VERDICT),
    "went_back": EventKind(
        "the run went back to an earlier state",
        {
            **_VERDICT,
            "from_version": "version that the run had before",
            "digest": "digest of the state that it went back to",
            "vouched_round": "round whose verdict vouches for that state",
            "keepers": "ids of the peers that have it",
            "suspects": "ids of the peers whose work was in a divergence",
            "evidence": "id of the evidence on a wrong mean that it undoes",
        },
    ),
    "work_scored": EventKind(
        "a validator has scored a member's contribution",
        {
            "by": "id of the validator",
            "peer": "id of the member",
            "round": "number of the round",
            "finding": "helps, unclear, harms, empty, copied, wrong gradient, wrong loss or withheld",
        },
    ),
    "evaluated": EventKind(
        "a validator has evaluated a version of the model on held-out data",
        {
            "round": "number of the round that made the version",
            "version": "version of the anchor",
            "loss": "the figure to use, in nats a token; null where it is disputed or no finite number",
            "standing": "claim: of a single validator; agreed: most of them have measured the same; disputed",
            "counts": "whether enough validators stand behind it to end the run (`[evaluation] validators`)",
            "losses": "the loss by validator",
            "accuracy": "share of the tokens, or labels, that the model finds likeliest",
            "sources": "the loss by source of the data",
        },
    ),
    "stops": EventKind(
        "the held-out figures end the run (`run.stop_when`)",
        {"round": "number of the open round, which is the last one", "reason": "why"},
    ),
    "trend": EventKind(
        "the run's losses go wrong, or no longer do",
        {
            "round": "number of the open round",
            "kind": "diverging, overfitting or not finite; empty where they no longer do",
            "text": "what is seen, and what to do",
        },
    ),
    "loss_rose": EventKind(
        "a round was committed with a loss far above the usual one",
        {"round": "number of the round", "loss": "its loss, in nats", "usual": "the usual loss"},
    ),
    "epochs_covered": EventKind(
        "all samples of some epochs are committed, each once",
        {
            "first": "the first epoch",
            "stop": "the epoch after the last one",
            "samples": "samples of an epoch",
            "lost": "samples that were trained on again because their first contributor died",
            "undone": "samples that were trained on again because their round was undone",
        },
    ),
    "rounds_too_short": EventKind(
        "rounds get far more tokens than `round.tokens`, as the shortest possible one takes longer than that",
        {
            "wanted": "`round.tokens`",
            "tokens": "tokens of a round",
            "least_s": "time from the announcement of a round's end to the end, in seconds",
            "advised": "a value of `round.tokens` that a round can keep to",
        },
    ),
    "run_ended": EventKind(
        "the run has all that its file asks for",
        {"rounds": "committed rounds", "tokens": "committed tokens", "loss": "loss of the newest round, in nats"},
    ),
    "model_kept": EventKind(
        "the run's last model was fetched from its members, or could not be",
        {"path": "its file; null if it could not be fetched", "trouble": "why not; empty if it was"},
    ),
    "stages_cut": EventKind(
        "the model was cut into stages", {"boundaries": "first layer of each stage, and the number of layers"}
    ),
    "span_assigned": EventKind(
        "a peer is to hold stages", {"peer": "its id", "first": "first stage", "last": "last stage"}
    ),
    "span_taken": EventKind("a peer holds no stage any more", {"peer": "its id", "reason": "why"}),
}

EVENTS: Mapping[str, EventKind] = {**PEER_EVENTS, **HOST_EVENTS}


def make_event(name: str, /, **fields: Any) -> Event:
    """Make an event of this moment. Raises ``ValueError`` for a name or a field that is not in the schema."""
    kind = EVENTS.get(name)
    if kind is None or not fields.keys() <= kind.fields.keys() | {"stage"}:
        raise ValueError(f"the schema of events has no {name} with the fields {', '.join(fields)}")
    return {"event": name, "time": time.time(), **fields}
