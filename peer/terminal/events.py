"""Events in words: one sentence for people for each event that a peer or a host logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

from rich import filesize

from shoal.peer.event_schema import Event

# Words ------------------------------------------------------------------------------------------------------


def plain_line(event: Event, run: str = "") -> str:
    """Format an event as one line that starts with the time of day, and the run where there are several."""
    of = f"{printable(run)}: " if run else ""
    return f"{clock(event.get('time'))}  {of}{sentence(event)}"


def sentence(event: Event) -> str:
    """Describe an event in printable characters only: names and reasons come from other machines."""
    say = _SENTENCES.get(str(event.get("event")), _any_event)
    where = f"stage {event['stage']}: " if "stage" in event else ""
    return printable(where + say(event))


def _joined(event: Event) -> str:
    reached = "" if event.get("reachable", True) else ", not reachable by others"
    return f"joined {event.get('run')} as {event.get('peer')}{reached}"


def _synced(event: Event) -> str:
    found, rounds = event.get("checkpoint"), event.get("caught_up")
    source = "" if found is None else f" · with the checkpoint of round {found}"
    source += f" · caught up by {rounds} rounds" if rounds else ""
    return f"holds version {event.get('anchor_version')} of the anchor · {_short(event.get('digest'))}{source}"


def _state_fetched(event: Event) -> str:
    donors, resumed = event.get("donors") or (), event.get("resumed")
    chunks, took_s = number_of(event.get("chunks") or 0, "chunk"), event.get("seconds") or 0
    words = [
        f"fetched version {event.get('anchor_version')} of the state",
        f"{chunks} from {_peers(donors)} in {duration_text(took_s)}",
    ]
    return " · ".join([*words, *([f"{resumed} were kept from an earlier download"] if resumed else [])])


def _donor_refused(event: Event) -> str:
    return f"no more of the state is fetched from {event.get('donor')}: {event.get('reason')}"


def _committed(event: Event) -> str:
    without = "" if event.get("included", True) else " · without this peer's work"
    return " · ".join(
        [
            f"round {event.get('round')} committed",
            f"loss {loss_text(event.get('loss'))}",
            _peers(event.get("members")),
            f"{count_text(event.get('tokens') or 0)} tokens",
            f"anchor {_short(event.get('digest'))}{without}",
        ]
    )


def _amended(event: Event) -> str:
    changes = event.get("changes") or {}
    words = ", ".join(f"{key} = {value}" for key, value in changes.items()) if isinstance(changes, dict) else ""
    return f"the host amends the run: {words} from round {event.get('round')} on"


def _aborted(event: Event) -> str:
    return f"round {event.get('round')} aborted for all: {event.get('reason')}"


def _diverged(event: Event) -> str:
    return (
        f"training from version {event.get('anchor_version')} gives no finite numbers here; the coordinator is asked "
        "whether all peers see that"
    )


def _resync(event: Event) -> str:
    return f"local work is dropped and starts again from the anchor: {event.get('reason')}"


def _left(event: Event) -> str:
    version = event.get("anchor_version")
    words = ["left before it held a state" if version is None else f"left at version {version}"]
    if event.get("tokens_trained") is not None:
        words.append(f"{count_text(event['tokens_trained'])} tokens trained")
    if event.get("bytes_sent") is not None:
        words.append(f"{filesize.decimal(event['bytes_sent'])} sent")
    if event.get("digest"):
        words.append(f"anchor {_short(event['digest'])}")
    words += [f"stage {one.get('stage')} {_short(one.get('digest'))}" for one in event.get("held") or ()]
    return " · ".join(words)


def _paused(event: Event) -> str:
    return f"paused: until {event.get('until')} ({event.get('reason')})"


def _scored(event: Event) -> str:
    by = f" · by {event['by']}" if "by" in event else ""
    gain = event.get("gain_random")
    change = "" if gain is None else f" · {gain:+.5f} nats on random samples"
    found = _FOUND.get(str(event.get("finding")), "?")
    return f"round {event.get('round')}: the work of {_who(event)} {found}{change}{by}"


_FOUND = {
    "helps": "lowers the loss",
    "unclear": "changes the loss no more than chance",
    "harms": "raises the loss",
    "empty": "is next to nothing",
    "copied": "is another member's",
    "wrong gradient": "is not the gradient of its samples",
    "withheld": "was not shown",
}


def _span(event: Event) -> str:
    """The stages that this peer has entered."""
    first, last = event.get("first") or 0, event.get("last") or 0
    first_layer, stop_layer = event.get("first_layer") or 0, event.get("stop_layer") or 0
    layers, of = range_text("layer", first_layer, stop_layer - 1), event.get("stages")
    size = filesize.decimal(event.get("parameters_bytes") or 0)
    return f"in {range_text('stage', first, last)} of {of}: {layers}, {size} of parameters"


def _member_joined(event: Event) -> str:
    return f"{_who(event)} joined with {event.get('device')}"


def _member_lost(event: Event) -> str:
    trouble = f": {event['trouble']}" if event.get("trouble") else ""
    return f"{_who(event)} is gone: {event.get('reason')}{trouble}"


def _stages_cut(event: Event) -> str:
    boundaries = event.get("boundaries") or ()
    layers = ", ".join(f"{first} to {stop - 1}" for first, stop in pairwise(boundaries))
    return f"the model is cut into {number_of(len(boundaries) - 1, 'stage')}: layers {layers}"


def _span_assigned(event: Event) -> str:
    first, last = event.get("first") or 0, event.get("last") or 0
    return f"{_who(event)} is to hold {range_text('stage', first, last)}"


def _round_closing(event: Event) -> str:
    return f"round {event.get('round')} is closing"


def _round_reopened(event: Event) -> str:
    return f"round {event.get('round')} is open again: work of it was lost or is missing"


def _round_planned(event: Event) -> str:
    parts = event.get("parts")
    clipped = event.get("clipped")
    bounded = f", {_peers(clipped)} bounded" if clipped else ""
    members = _peers(event.get("members"))
    return f"round {event.get('round')} averages {members} in {number_of(parts or 0, 'part')}{bounded}"


def _verdict(event: Event) -> str:
    if not event.get("committed"):
        return _aborted(event)
    return " · ".join(
        [
            f"round {event.get('round')} committed",
            f"loss {loss_text(event.get('loss'))}",
            _peers(event.get("members")),
            f"{count_text(event.get('tokens_total') or 0)} tokens",
            f"chain {_short(event.get('chain'))}",
        ]
    )


def _went_back(event: Event) -> str:
    return f"round {event.get('round')} ends here: {event.get('reason')}"


def _loss_rose(event: Event) -> str:
    loss, usual = loss_text(event.get("loss")), loss_text(event.get("usual"))
    return f"WARNING: the loss has risen to {loss} in round {event.get('round')}; it was about {usual}"


def _evaluated(event: Event) -> str:
    words = [f"held-out loss {loss_text(event.get('loss'))} of version {event.get('version')}"]
    if event.get("accuracy") is not None:
        words.append(f"accuracy {event['accuracy']:.1%}")
    losses, standing = event.get("losses") or {}, event.get("standing")
    if standing == "disputed":
        told = ", ".join(f"{peer} {loss_text(loss)}" for peer, loss in losses.items())
        return (
            f"WARNING: validators disagree on the held-out loss of version {event.get('version')}: {told}; none is used"
        )
    if standing == "claim":
        words.append(f"by one validator, {', '.join(losses)}")
    elif standing == "agreed":
        words.append(f"agreed on by validators, {len(losses)} of them")
    return " · ".join(words)


def _trend(event: Event) -> str:
    if not event.get("kind"):
        return "the losses are no longer conspicuous"
    return f"WARNING: {event.get('text')}"


def _epochs_covered(event: Event) -> str:
    first, last, samples = event.get("first") or 0, (event.get("stop") or 1) - 1, event.get("samples") or 0
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    each = "" if first == last else " of each"
    again = [
        f"{event[key]:,} {why}"
        for key, why in (
            ("lost", "trained on again because their first contributor died"),
            ("undone", "trained on again because their round was undone"),
        )
        if event.get(key)
    ]
    return "; ".join([f"{epochs}: all {samples:,} samples{each} committed once", ", ".join(again)]).removesuffix("; ")


def _rounds_too_short(event: Event) -> str:
    return (
        f"WARNING: round.tokens is {event.get('wanted') or 0:,}, but the members train {event.get('tokens') or 0:,} "
        f"before a round can end, {event.get('least_s') or 0:.1f} s after its end was announced: set it to "
        f"{event.get('advised') or 0:,} or more, as by shoal amend {event.get('run', 'RUN')} "
        f"round.tokens={event.get('advised') or 0}"
    )


def _run_ended(event: Event) -> str:
    done = f"{number_of(event.get('rounds') or 0, 'round')}, {count_text(event.get('tokens') or 0)} tokens"
    return (
        f"run finished: {done}, loss {loss_text(event.get('loss'))}; this host stays for whoever still needs it, until "
        "Ctrl-C"
    )


def _model_kept(event: Event) -> str:
    if event.get("path"):
        return f"the last model is in {event['path']}"
    return (
        f"the last model could not be fetched: {event.get('trouble')}. Members have it in their checkpoints: on one of "
        "them, shoal export FOLDER, as it was told at its end"
    )


def _words(event: Event) -> str:
    return str(event.get("words", ""))


def _any_event(event: Event) -> str:
    rest = [f"{key}={value}" for key, value in event.items() if key not in ("event", "time")]
    return " ".join([str(event.get("event", "?")), *rest])


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "demo": _words,
    "status": _words,
    "joined": _joined,
    "synced": _synced,
    "state_fetched": _state_fetched,
    "donor_refused": _donor_refused,
    "amended": _amended,
    "committed": _committed,
    "aborted": _aborted,
    "resync": _resync,
    "diverged": _diverged,
    "scored": _scored,
    "work_scored": _scored,
    "left": _left,
    "paused": _paused,
    "resumed": lambda event: f"this machine is lent to {event.get('run')} again: joining",
    "span": _span,
    "member_joined": _member_joined,
    "member_lost": _member_lost,
    "stages_cut": _stages_cut,
    "span_assigned": _span_assigned,
    "span_taken": lambda event: (
        f"{_who(event)} holds no stage any more" + (f": it {event['reason']}" if event.get("reason") else "")
    ),
    "round_closing": _round_closing,
    "round_reopened": _round_reopened,
    "round_planned": _round_planned,
    "verdict": _verdict,
    "went_back": _went_back,
    "loss_rose": _loss_rose,
    "evaluated": _evaluated,
    "evaluation": lambda event: (
        f"evaluated version {event.get('version')}: held-out loss {loss_text(event.get('loss'))} "
        f"in {duration_text(event.get('seconds') or 0)}"
    ),
    "stops": lambda event: f"round {event.get('round')} is the last one: {event.get('reason')}",
    "trend": _trend,
    "epochs_covered": _epochs_covered,
    "invite_made": lambda event: (
        f"made the invite {event.get('invite')} for a {event.get('role')}"
        + (f": {event['note']}" if event.get("note") else "")
    ),
    "rounds_too_short": _rounds_too_short,
    "run_ended": _run_ended,
    "model_kept": _model_kept,
}


def _who(event: Event) -> str:
    """The peer that an event is about: its name, where that is known, with the id, which nobody else can have."""
    return f"{event['name']} ({event.get('peer')})" if event.get("name") else str(event.get("peer"))


def _peers(members: Any) -> str:
    return number_of(len(members) if isinstance(members, list | tuple | dict) else members or 0, "peer")


def _short(digest: Any) -> str:
    return str(digest)[:8] if digest else "–"


# Numbers ----------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Replace characters that could move a terminal's cursor."""
    return "".join(character if character.isprintable() else "·" for character in text)


def printable_lines(text: str) -> str:
    """As ``printable``, with line breaks kept: messages of errors may quote what other machines have said."""
    return "\n".join(printable(line) for line in text.split("\n"))


def clock(moment: float | None) -> str:
    """Format the local time of day, ``HH:MM:SS``."""
    return time.strftime("%H:%M:%S", time.localtime(moment))


def number_of(number: int, what: str) -> str:
    """``1 peer``, ``3 peers``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def range_text(what: str, first: int, last: int) -> str:
    """``stage 2``, ``stages 2 to 3``."""
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def span_text(first: int, last: int) -> str:
    """``2``, ``2–3``."""
    return f"{first}" if first == last else f"{first}–{last}"


def count_text(number: float) -> str:
    """``61.4k``, ``1.2M``."""
    whole = round(number)
    unit, suffix = filesize.pick_unit_and_suffix(whole, ["", "k", "M", "G", "T", "P"], 1000)
    return f"{whole / unit:.1f}{suffix}" if suffix else f"{whole}"


def loss_text(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.3f}"


def duration_text(seconds: float) -> str:
    """``42 s``, ``0:03:05``."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else str(timedelta(seconds=whole))
