"""Commands of a run's host on who takes part: ``invite create list revoke``, ``members``, ``kick``, ``ban``, ``allow``.

They need the host's folder, with its keys. While the host runs its coordinator carries them out; otherwise they open
the journal themselves.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.peer.options import SHOAL_HOME
from shoal.swarm.errors import FolderInUse, StateFileError, StorageError, Unreachable, UserError
from shoal.swarm.system import run_loop

if TYPE_CHECKING:
    from shoal.swarm.protocol.access_records import AccessRecord
    from shoal.swarm.protocol.messages import HostCommand, InviteState, MemberAccess
    from shoal.swarm.protocol.types import Message

M = TypeVar("M", bound="Message")

app = typer.Typer()
"""Part of the ``shoal`` command in ``main.py``."""

invites = typer.Typer(no_args_is_help=True, help="Make, list and revoke the invites of a run that this machine hosts.")
app.add_typer(invites, name="invite")

console = Console()

RunArgument = Annotated[
    str, typer.Argument(help="A run that this machine hosts: its name, or its folder (~/.shoal/host/RUN).")
]
HostKeys = Annotated[
    Path | None, typer.Option("--identity", help="The host's keys, if `shoal host` was given --identity.")
]
Note = Annotated[str, typer.Option(help="A remark for yourself, such as whom it is for.")]


class InviteFor(StrEnum):
    """Roles that an invite may admit to."""

    trainer = "trainer"
    contributor = "contributor"
    validator = "validator"
    observer = "observer"


def default_uses(role: InviteFor) -> int:
    """Return how many machines may join by an invite of which the host says nothing else: a validator is believed, so
    its invite is for one machine."""
    return 1 if role is InviteFor.validator else 0


@invites.command("create")
def create_command(
    run: RunArgument,
    role: Annotated[
        InviteFor,
        typer.Option(help="trainer; contributor: reduces nothing; validator: scores work; observer: only follows."),
    ] = InviteFor.trainer,
    uses: Annotated[
        int | None,
        typer.Option(
            min=0, max=4096, help="Machines that may join by it; 0: any number. Default: 0, for validators 1."
        ),
    ] = None,
    expires: Annotated[str, typer.Option(metavar="7d", help="How long newcomers may use it: 30m, 12h, 7d.")] = "",
    note: Note = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the invite to this new file, readable for you alone, and do not print it."),
    ] = None,
    identity: HostKeys = None,
) -> None:
    """Make an invite and print it. Who has it may join: send it like a password."""
    from dataclasses import replace

    from shoal.peer.cli.host import INVITE_FILE
    from shoal.swarm import durable
    from shoal.swarm.protocol.invite import Invite
    from shoal.swarm.protocol.messages import CoordinatorToHostInvite, CreateInvite

    if out is not None and out.exists():
        raise UserError(f"--out {out}: is there already")
    for_s = parse_duration(expires) if expires else 0
    folder = host_folder(run)
    try:
        printed = Invite.parse((folder / INVITE_FILE).read_text())
    except OSError as error:
        raise StateFileError(f"{folder}: has no {INVITE_FILE} yet: start the host once with `shoal host`") from error
    made = ask_host(
        folder,
        identity,
        CreateInvite(role=role.value, uses=default_uses(role) if uses is None else uses, for_s=for_s, note=_note(note)),
        CoordinatorToHostInvite,
    )
    invite = replace(printed, token=made.token)
    if out is None:
        print(invite)
    else:
        try:
            durable.write_whole(out, f"{invite}\n".encode(), 0o600)
        except OSError as error:
            raise StorageError(f"{out}: cannot be written: {error}") from error
        console.print(f"Invite {made.terms.id} written to {out}", soft_wrap=True)


@invites.command("list")
def list_command(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one invite a line.")] = False,
    identity: HostKeys = None,
) -> None:
    """List the invites of a run, without what makes them work."""
    import json

    found = _all_invites(host_folder(run), identity)
    if as_json:
        for one in found:
            print(json.dumps(_invite_json(one)))
    else:
        console.print(invite_table(found))


@invites.command("revoke")
def revoke_command(
    run: RunArgument,
    invite: Annotated[str, typer.Argument(help="The invite's id, as `shoal invite list` shows it.")],
    identity: HostKeys = None,
) -> None:
    """Let nobody new in by an invite. Who has joined by it stays: see `shoal kick` and `shoal ban`."""
    from shoal.swarm.protocol.messages import Acknowledged, RevokeInvite

    if not re.fullmatch(r"[a-z2-7]{8}", invite):
        raise UserError(f"{invite[:40]!r} is no invite's id: it has eight letters and digits, see `shoal invite list`")
    ask_host(host_folder(run), identity, RevokeInvite(id=invite), Acknowledged)
    console.print(f"The invite {invite} lets nobody new in any more")


# Members --------------------------------------------------------------------------------------------------------

PeerArgument = Annotated[str, typer.Argument(help="The peer's id, as `shoal members` and `shoal status` show it.")]


@app.command("members")
def members_command(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one peer a line.")] = False,
    identity: HostKeys = None,
) -> None:
    """Show who takes part in a run that this machine hosts, by which invite and from where, and who is banned."""
    import json

    found = _all_members(host_folder(run), identity)
    if as_json:
        for one in found:
            print(json.dumps(one.model_dump()))
    else:
        console.print(members_table(found))


@app.command("kick")
def kick_command(run: RunArgument, peer: PeerArgument, note: Note = "", identity: HostKeys = None) -> None:
    """Remove a member at once; its owner may join again. What it holds goes to others, as if it had died."""
    from shoal.swarm.protocol.messages import Acknowledged, KickMember

    ask_host(host_folder(run), identity, KickMember(peer=_peer(peer), note=_note(note)), Acknowledged)
    console.print(f"{peer} is removed; it may join again, see `shoal ban`")


@app.command("ban")
def ban_command(
    run: RunArgument,
    peer: PeerArgument,
    network: Annotated[
        bool, typer.Option("--network", help="Ban all that comes from its network (IPv4 /24, IPv6 /48), too.")
    ] = False,
    note: Note = "",
    identity: HostKeys = None,
) -> None:
    """Remove a peer for good: its identity may not join again. A new identity costs nothing: see --network."""
    from shoal.swarm.protocol.messages import BanPeer, CoordinatorToHostBanned

    command = BanPeer(peer=_peer(peer), network=network, note=_note(note))
    done = ask_host(host_folder(run), identity, command, CoordinatorToHostBanned)
    also = f" with the network {done.network}" if done.network else ""
    console.print(f"{peer} is banned{also}; {len(done.removed)} members had to leave", soft_wrap=True)


@app.command("allow")
def allow_command(run: RunArgument, peer: PeerArgument, identity: HostKeys = None) -> None:
    """Lift a ban; in a run with a list of members, put the peer on it."""
    from shoal.swarm.protocol.messages import Acknowledged, AllowPeer

    ask_host(host_folder(run), identity, AllowPeer(peer=_peer(peer)), Acknowledged)
    console.print(f"{peer} may join")


def _peer(text: str) -> str:
    if not re.fullmatch(r"[a-z2-7]{16}", text):
        raise UserError(f"{text[:40]!r} is no peer id: it has 16 letters and digits, see `shoal members`")
    return text


def _note(text: str) -> str:
    if len(text) > _MAX_NOTE:
        raise UserError(f"--note: has {len(text)} characters; at most {_MAX_NOTE} are kept")
    return text


# The run --------------------------------------------------------------------------------------------------------


@app.command("amend")
def amend_command(
    run: RunArgument,
    changes: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE…", help="Settings of the run file, such as outer.lr=0.5.")
    ],
    at_round: Annotated[
        int, typer.Option(min=0, help="First round with them; by default the next one after the open one.")
    ] = 0,
    identity: HostKeys = None,
) -> None:
    """Change settings of a running run: learning rates, the size of rounds, the run's end, access, the card's text."""
    from shoal.swarm.protocol.messages import AmendRun, CoordinatorToHostAmended

    command = AmendRun(changes=parse_changes(changes), at_round=at_round)
    made = ask_host(host_folder(run), identity, command, CoordinatorToHostAmended)
    for one in made.amendments:
        console.print(Text(_plain(one.text)), soft_wrap=True)
    console.print(f"Round {made.round} is open now. Members see this at once.")


def parse_changes(given: list[str]) -> tuple[tuple[str, str], ...]:
    """Parse ``KEY=VALUE`` as names of settings with JSON; what is no JSON is a text. Raises ``UserError``."""
    import json

    found: dict[str, str] = {}
    for one in given:
        key, equals, text = one.partition("=")
        if not equals or not re.fullmatch(r"[a-z_]{1,32}\.[a-z_]{1,32}", key.strip()) or not text.strip():
            raise UserError(f"{one[:80]!r}: expected a setting of the run file and its value, such as outer.lr=0.5")
        try:
            value = json.loads(text)
        except ValueError:
            value = text.strip()
        if key.strip() in found or len(json.dumps(value)) > _MAX_VALUE:
            raise UserError(f"{key.strip()}: named twice, or its value has more than {_MAX_VALUE} characters")
        found[key.strip()] = json.dumps(value)
    return tuple(sorted(found.items()))


# The host -------------------------------------------------------------------------------------------------------

_MAX_NOTE = 200
_MAX_VALUE = 1200
_NAME = 12
_PATIENCE_S, _PAUSE_S = 10.0, 0.3
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_duration(text: str, option: str = "--expires") -> int:
    """Parse ``30m``, ``12h`` or ``7d`` as seconds. Raises ``UserError``."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhdw])", text.strip())
    if found is None:
        raise UserError(f"{option} {text[:40]!r}: expected a number with a unit, such as 30m, 12h or 7d")
    return min(int(found[1]) * _UNITS_S[found[2]], 2**31)


def host_folder(run: str) -> Path:
    """Return the folder of a run that this machine hosts. Raises ``StateFileError``."""
    from shoal.peer.cli.host import find_host_folder

    folder = find_host_folder(run)
    if folder is not None:
        return folder
    raise StateFileError(
        f"{run}: no run that this machine hosts: give its name, or its folder, such as {SHOAL_HOME / 'host' / 'RUN'}"
    )


def ask_host(folder: Path, keys: Path | None, command: HostCommand, reply: type[M]) -> M:
    """Have a command carried out, by the running coordinator or in the journal itself.

    Raises ``StateFileError``, ``IdentityError``, ``StorageError``, ``Unreachable`` and the errors of the command."""
    from shoal.peer.cli.host import CONTROL_FILE, IDENTITY_FILE, RUN_FILE, check_keys, kept_port_keys
    from shoal.swarm.client.host_control import command_coordinator
    from shoal.swarm.coordinator.host_commands import command_journal
    from shoal.swarm.coordinator.local_journal import LocalJournal
    from shoal.swarm.protocol.addresses import split_host_port
    from shoal.swarm.protocol.identity import Identity
    from shoal.swarm.protocol.run_file import load_run_file
    from shoal.swarm.protocol.types import Address

    path = keys or folder / IDENTITY_FILE
    if not path.exists():
        raise StateFileError(f"{path}: the host's keys are missing; if they are elsewhere, give --identity FILE")
    identity = Identity.load_or_create(path)
    key = kept_port_keys(folder, identity).public
    text, run = load_run_file(folder / RUN_FILE)
    named = run.run.name, run.hash

    def check(journal: LocalJournal) -> None:
        check_keys(identity, journal, path)

    give_up_s = time.monotonic() + _PATIENCE_S
    while True:  # the coordinator may be starting or ending
        try:
            answer = command_journal(LocalJournal(folder, run.hash, text), run, identity, command, check)
        except FolderInUse as in_use:
            try:
                host, port = split_host_port((folder / CONTROL_FILE).read_text().strip())
                address = Address(host=host, control_port=port)
                return run_loop(command_coordinator(address, key, identity, named, command, reply))
            except (OSError, Unreachable) as error:
                if time.monotonic() > give_up_s:
                    raise Unreachable(
                        f"{in_use}; but it does not answer at the address in {folder / CONTROL_FILE}: {error}"
                    ) from error
        else:
            assert isinstance(answer, reply)
            return answer
        time.sleep(_PAUSE_S)


# Records --------------------------------------------------------------------------------------------------------


RecordsShown = Literal["members", "scores", "evaluations"]


def show_records(source: str, keys: Path, which: RecordsShown, *, as_json: bool) -> None:
    """Show and check who came and went, and what the host decided on that, or what validators found of the members'
    work or of the model, whose signatures are checked, too. ``source``: the run's name, its folder on this machine, or
    an invite to a run whose host's keys are in the file ``keys``.

    Raises ``StateFileError`` for a broken chain, after printing what comes before the break."""
    import json

    _, checked, broken = checked_records(source, keys)
    shown = [one for one in checked if _kind_of(one) == which]
    if as_json:
        from shoal.swarm.protocol.json_values import jsonable

        for record in shown:
            print(json.dumps(jsonable(record.model_dump()) | {"signature_ok": True}))
    else:
        make = {"members": records_table, "scores": scores_table, "evaluations": evaluations_table}[which]
        console.print(make(shown))
        if checked:
            console.print(Text(f"{len(checked)} records: all hashes, links and signatures are right.", style="dim"))
    if broken:
        raise StateFileError(f"the chain of access records is broken: {broken}")


def _kind_of(record: AccessRecord) -> RecordsShown:
    if record.score is not None:
        return "scores"
    return "evaluations" if record.kind in ("evaluated", "stops") else "members"


def checked_records(source: str, keys: Path) -> tuple[bytes, list[AccessRecord], str]:
    """Return the host's public key, a run's records up to a break in their chain, and what is wrong there, if it
    breaks. Arguments as of ``show_records``."""
    from shoal.swarm.errors import WireError
    from shoal.swarm.protocol.access_records import RecordCheck

    run_hash, host_key, records = _records(source, keys)
    check = RecordCheck(run_hash, host_key)
    checked: list[AccessRecord] = []
    for record in records:
        try:
            check.add(record)
            if record.score is not None and not record.score.is_signed:
                raise WireError(f"the score in record {record.number} is not signed by its validator")
            if record.evaluation is not None and not record.evaluation.is_signed(run_hash):
                raise WireError(f"the evaluation in record {record.number} is not signed by its validator")
        except WireError as error:
            return host_key, checked, str(error)
        checked.append(record)
    return host_key, checked, ""


def _records(source: str, keys: Path) -> tuple[bytes, bytes, list[AccessRecord]]:
    """Return the run's hash, the host's public key and the records, unchecked."""
    from contextlib import closing

    from shoal.peer.cli.host import ORIGIN_FILE
    from shoal.peer.history.history_file import unpack_history
    from shoal.peer.regular_file import read_regular
    from shoal.swarm.client.host_control import command_coordinator
    from shoal.swarm.coordinator.local_journal import JournalFiles
    from shoal.swarm.protocol.identity import Identity
    from shoal.swarm.protocol.invite import Invite
    from shoal.swarm.protocol.messages import CoordinatorToHostRecords, ListRecords

    if not source.startswith("shoal://"):
        folder = host_folder(source)
        try:
            origin = unpack_history(read_regular(folder / ORIGIN_FILE), str(folder / ORIGIN_FILE)).origin
        except OSError as error:
            raise StateFileError(f"{folder / ORIGIN_FILE}: cannot be read: {error}") from error
        with closing(JournalFiles(folder, live=True)) as files:
            return origin.run_hash, origin.coordinator.identity_key, files.access_records()
    invite = Invite.parse(source)
    if not keys.exists():
        raise StateFileError(f"{keys}: is missing; only a run's host may read these records: give --identity FILE")
    identity, at, named = Identity.load_or_create(keys), invite.addresses[0], (invite.run, invite.run_hash)
    found: list[AccessRecord] = []
    while True:
        ask = ListRecords(first=len(found))
        page = run_loop(command_coordinator(at, invite.key, identity, named, ask, CoordinatorToHostRecords))
        found += page.records
        if not page.more or not page.records:
            return invite.run_hash, identity.public_key, found


def records_table(records: list[AccessRecord]) -> Table:
    """Make the table of checked records, oldest first."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("when (UTC)", "what", "peer"):
        table.add_column(name, no_wrap=True)
    table.add_column("about", overflow="fold")
    for one in records:
        limits = [f"{one.uses} uses"] * bool(one.uses) + [f"until {when(one.expires_s)}"] * bool(one.expires_s)
        refused = [f"{each.count} {each.reason}" for each in one.refused]
        invite = [f"invite {one.invite}"] * bool(one.invite)
        evidence = [f"evidence {one.evidence.hex()[:16]} of round {one.round}"] if one.evidence else []
        about = ", ".join(
            filter(None, [*evidence, _plain(one.name), one.role, one.network, *invite, *limits, _plain(one.text)])
        )
        table.add_row(when(one.at_s), one.kind, one.peer, about or ", ".join(refused))
    return table


def scores_table(records: list[AccessRecord]) -> Table:
    """Make the table of validators' scores, oldest first."""
    from shoal.swarm.protocol.identity import peer_id

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("when (UTC)", "round", "member", "its work", "on random samples", "on its own", "validator"):
        table.add_column(name, no_wrap=True)
    for one in records:
        assert one.score is not None
        score = one.score.score
        gains = [f"{gain.mean:+.5f} ± {gain.error:.5f}" if gain else "–" for gain in (score.on_random, score.on_leased)]
        found = score.finding + (f" from {score.copied_from}" if score.copied_from else "")
        table.add_row(when(one.at_s), str(score.round), score.peer, found, *gains, peer_id(one.score.validator_key))
    return table


def evaluations_table(records: list[AccessRecord]) -> Table:
    """Make the table of validators' evaluations of the model, and of what ended the run by them, oldest first."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("when (UTC)", "version", "held-out loss", "accuracy", "samples"):
        table.add_column(name, no_wrap=True)
    table.add_column("validator", overflow="fold")
    for one in records:
        if one.evaluation is None:
            table.add_row(when(one.at_s), "", "", "", "", _plain(f"the run ends with round {one.round}: {one.text}"))
            continue
        found = one.evaluation.evaluation
        loss = "no number" if found.loss is None else f"{found.loss:.4f}"
        accuracy = "–" if found.accuracy is None else f"{found.accuracy:.1%}"
        table.add_row(when(one.at_s), str(found.version), loss, accuracy, str(found.samples), one.evaluation.validator)
    return table


# Tables ---------------------------------------------------------------------------------------------------------


def _all_invites(folder: Path, keys: Path | None) -> list[InviteState]:
    from shoal.swarm.protocol.messages import CoordinatorToHostInvites, ListInvites

    found: list[InviteState] = []
    while True:
        page = ask_host(folder, keys, ListInvites(first=len(found)), CoordinatorToHostInvites)
        found += page.invites
        if not page.more or not page.invites:
            return found


def invite_table(found: list[InviteState]) -> Table:
    """Make the table of invites, oldest first."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("id", "role", "used", "expires (UTC)", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("note", overflow="fold")
    for one in found:
        terms = one.terms
        used = f"{one.joined}/{terms.uses}" if terms.uses else str(one.joined)
        expires = when(terms.expires_s) if terms.expires_s else "never"
        state = invite_state(one, time.time())
        style = "green" if state == "valid" else "dim"
        table.add_row(terms.id, terms.role, used, expires, Text(state, style=style), Text(_plain(terms.note)))
    return table


def invite_state(one: InviteState, unix_s: float) -> str:
    """Say whether an invite still lets newcomers in."""
    if one.is_revoked:
        return "revoked"
    if one.terms.expires_s and unix_s >= one.terms.expires_s:
        return "expired"
    return "used up" if 0 < one.terms.uses <= one.joined else "valid"


def _all_members(folder: Path, keys: Path | None) -> list[MemberAccess]:
    from shoal.swarm.protocol.messages import CoordinatorToHostMembers, ListMembers

    found: dict[str, MemberAccess] = {}
    first = 0
    while True:
        page = ask_host(folder, keys, ListMembers(first=first), CoordinatorToHostMembers)
        found |= {one.peer: one for one in page.members}
        first += len(page.members)
        if not page.more or not page.members:
            return sorted(found.values(), key=lambda one: not one.alive)


def members_table(found: list[MemberAccess]) -> Table:
    """Make the table of members and of others that the host decided on, those that are there first."""
    from shoal.peer.terminal.views import CREDIT_CAPTION, credit_text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("peer", "name", "since (UTC)", "invite", "rounds"):
        table.add_column(name, no_wrap=True, justify="right" if name == "rounds" else "left")
    table.add_column("state, network", overflow="fold")
    for one in found:
        state = Text(_plain(one.state), style="green" if one.alive else "dim")
        if one.banned:
            where = f" with {one.banned_network}" if one.banned_network else ""
            state = Text(f"banned{where}" + (f": {_plain(one.note)}" if one.note else ""), style="red")
        elif one.allowed:
            state.append(", allowed" if one.state else "allowed")
        if one.alive and one.role in ("trainer", "contributor"):
            state.append(f"\n{'credit ' * bool(one.credit)}{credit_text(one.credit)}")
        if one.network:
            state.append(f"\n{one.network}", style="dim")
        since = when(one.since_s)[5:] if one.since_s else ""
        rounds = str(one.rounds) if one.role else ""
        table.add_row(one.peer, _plain(one.name)[:_NAME], since, one.invite, rounds, state)
    table.caption, table.caption_justify = CREDIT_CAPTION, "left"
    return table


def _invite_json(one: InviteState) -> dict[str, object]:
    about = {"made_s": one.made_s, "joined": one.joined, "state": invite_state(one, time.time())}
    return one.terms.model_dump() | about


def when(unix_s: float) -> str:
    """Write a moment for people, in UTC."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


def _plain(text: str) -> str:
    from shoal.peer.terminal.events import printable

    return printable(text)
