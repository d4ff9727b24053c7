"""Command line: ``host prepare join status doctor demo`` and the commands of ``files``; errors become exit codes.

Each command imports its implementation when it runs, so that help, wrong arguments and a host load no torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from shoal.peer.cli.access import app as access_commands
from shoal.peer.cli.command import INVITE_VARIABLE, UNSUPERVISED
from shoal.peer.cli.data import app as data_commands
from shoal.peer.cli.files import IdentityOption, console, start_of, start_place
from shoal.peer.cli.files import app as file_commands
from shoal.peer.cli.guest import (
    HoursOption,
    MaxDownload,
    MaxUpload,
    MonthlyData,
    NiceOption,
    PowerOption,
    given_terms,
)
from shoal.peer.cli.guest import app as guest_commands
from shoal.peer.cli.runs import DirectoryOption
from shoal.peer.cli.runs import app as finding_commands
from shoal.peer.cli.simulate import app as simulation_commands
from shoal.peer.data_places import DataPlaces
from shoal.peer.guest.spot import SpotNotices, SpotProvider
from shoal.peer.options import (
    DEFAULT_METRICS_PORT,
    DEFAULT_PORT,
    DEFAULT_WEB_PORT,
    SHOAL_HOME,
    STOPPED_AT_ONCE,
    StartFrom,
)
from shoal.swarm import system
from shoal.swarm.errors import ShoalError, UserError
from shoal.swarm.protocol.run_toml import read_run_toml
from shoal.swarm.system import run_loop

if TYPE_CHECKING:
    from shoal.peer.cli.host import Hosting
    from shoal.peer.event_schema import Event

log = logging.getLogger(__name__)

_MOST_DESCRIPTORS = 8192
"""Limit of open files and sockets that is asked for: four times what the members of a full run need."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one model together, on machines that nobody owns together.",
)
app.add_typer(file_commands)
app.add_typer(access_commands)
app.add_typer(finding_commands)
app.add_typer(data_commands)
app.add_typer(simulation_commands)
app.add_typer(guest_commands)
errors = Console(stderr=True)


JoinRole = Literal["trainer", "contributor", "validator", "follower"]
"""Roles of a member in a run, as in ``SessionOptions.role``."""

InviteArgument = Annotated[
    str,
    typer.Argument(
        envvar=INVITE_VARIABLE,
        help="The run's invite, in quotes: 'shoal://HOST:PORT/RUN?key=…&run=…&t=…'; or a file with it, @FILE.",
    ),
]
JoinArgument = Annotated[
    str,
    typer.Argument(
        metavar="INVITE|NAME",
        envvar=INVITE_VARIABLE,
        help="The run's invite, in quotes, or a file with it, @FILE; or an open run's name in `shoal runs`.",
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="FOLDER|URL",
        help="Folder in which the run may read the files it names, or folder or URL with the run's shards; repeatable.",
    ),
]
DataCacheOption = Annotated[
    str, typer.Option(metavar="SIZE", help="Most disk for downloaded blocks of shards, such as 50G; by default 8G.")
]
LogJson = Annotated[Path | None, typer.Option(help="Append events to this file, one JSON object a line.")]
TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND[:WHERE]",
        help="Send each round's metrics to wandb[:PROJECT], trackio[:PROJECT], mlflow[:URI] or tensorboard[:FOLDER]; "
        "repeatable.",
    ),
]
PortMapping = Annotated[
    bool,
    typer.Option(
        "--port-mapping/--no-port-mapping", help="Ask the router to forward ports (PCP, NAT-PMP, UPnP) if it is needed."
    ),
]
WebOption = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:PORT]",
        help="Serve a page for browsers there; without an address for this machine only.",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:PORT]",
        help="Serve /metrics for Prometheus there, without a page; without an address for this machine only.",
    ),
]
_BARE = {"--web": f"127.0.0.1:{DEFAULT_WEB_PORT}", "--metrics": f"127.0.0.1:{DEFAULT_METRICS_PORT}"}
"""Values of options that may be given without one."""

EveryOption = Annotated[
    float, typer.Option("--every", min=1.0, metavar="SECONDS", help="Least time between two looks; big runs take more.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more details.")]


@app.command("host")
def host_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.toml…", help="The run file, or several of them.")],
    bind: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")] = (
        f"0.0.0.0:{DEFAULT_PORT}"
    ),
    advertise: Annotated[
        str,
        typer.Option(help="HOST[:PORT] that the invite names; several with commas: A:1,B:2."),
    ] = "",
    state: Annotated[Path, typer.Option(help="Folder for the journal and the keys; each run has its own in it.")] = (
        SHOAL_HOME / "host"
    ),
    backup: Annotated[Path | None, typer.Option(help="Keep an up-to-date copy of it in this folder.")] = None,
    identity: Annotated[Path | None, typer.Option(help="The host's keys; by default each run has its own.")] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FOLDER|URL",
            help="Start the run from this checkpoint, the newest in this folder, or a model of transformers there.",
        ),
    ] = None,
    parameters_only: Annotated[
        bool, typer.Option(help="Take only the parameters of --from; schedule, samples and outer optimizer start at 0.")
    ] = False,
    no_pins: Annotated[
        bool,
        typer.Option("--no-pins", help="Let the first member define model, data and first state."),
    ] = False,
    data: DataOption = None,
    publish: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Keep the run's card up to date at this path or URL, with fsspec; a folder or *.json."
        ),
    ] = "",
    via: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Be reached over this relay, without an open port here; repeatable."),
    ] = None,
    no_relay: Annotated[
        bool, typer.Option("--no-relay", help="Run no relay beside, for members that cannot be dialed.")
    ] = False,
    keep_model: Annotated[
        bool | None,
        typer.Option(
            "--keep-model/--no-keep-model",
            help="Fetch the last model from the members when the run ends; by default one of 100M parameters or fewer.",
        ),
    ] = None,
    web: WebOption = None,
    metrics: MetricsOption = None,
    journal: Annotated[
        str | None,
        typer.Option(
            envvar="SHOAL_JOURNAL",
            metavar="URL",
            help="Journal that several hosts share: etcd://A,B,C/PREFIX or postgres://USER@HOST/DB.",
        ),
    ] = None,
    standby_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Public key (`shoal identity`) of a machine that may lead, too; repeatable."),
    ] = None,
    lease: Annotated[
        float, typer.Option(min=1.0, max=120.0, help="Seconds after which another host takes over from a silent one.")
    ] = 5.0,
    log_json: LogJson = None,
    track: TrackOption = None,
    verbose: Verbose = False,
    _: Annotated[
        bool, typer.Option(UNSUPERVISED, help="Run as one process, for service managers that restart it themselves.")
    ] = False,
) -> None:
    """Host a run: its coordinator keeps membership, rounds and verdicts. After a stop, the same command goes on.

    Several runs share the port, and nothing else: one that fails begins again, while the others go on."""
    for file in runs:
        read_run_toml(file)
    from shoal.peer.cli.host import HostOptions, host, say_pins, say_reach, warn_descriptors
    from shoal.peer.cli.host_screen import HostScreen
    from shoal.peer.cli.standby import SharedPlace
    from shoal.peer.integrations.trackers import RunTrackers, TrackedRun, TrackerChoice
    from shoal.peer.terminal.reporter import Reporter, setup_logging
    from shoal.swarm.protocol.addresses import split_host_port
    from shoal.swarm.protocol.invite import parse_advertised
    from shoal.swarm.protocol.relay_url import RelayUrl

    setup_logging(console, verbose)
    warn_descriptors(allow_descriptors())
    if len(runs) > 1 and (start_from is not None or identity is not None or via):
        raise UserError("--from, --identity and --via are for one run: give each run a host of its own for that")
    options = HostOptions(
        identity,
        state,
        split_host_port(bind, DEFAULT_PORT),
        parse_advertised(advertise),
        backup,
        start_of(start_place(start_from) if start_from else None, identity, only_parameters=parameters_only),
        pin=not no_pins,
        data=DataPlaces.of(data or ()),
        publish=publish,
        via=tuple(RelayUrl.parse(url) for url in via or ()),
        relay=not no_relay,
        keep_model=keep_model,
        web=None if web is None else split_host_port(web, DEFAULT_WEB_PORT),
        metrics=None if metrics is None else split_host_port(metrics, DEFAULT_METRICS_PORT),
        journal=SharedPlace(journal, tuple(standby_key or ()), SHOAL_HOME / "identity", lease) if journal else None,
    )
    if standby_key and not journal:
        raise UserError("--standby-key: gives a run's keys to hosts that share its journal: name that with --journal")

    screen = HostScreen(console, backup, several=len(runs) > 1)
    choices = [TrackerChoice.parse(text) for text in track or ()]
    with Reporter(console, log_json) as reporter, RunTrackers(choices) as trackers:

        def on_start(hosting: Hosting) -> None:
            screen.show_start(hosting, say_pins(hosting.run.pins), say_reach(hosting.invite.addresses))
            trackers.start(TrackedRun.of(hosting.run, "host"))

        def on_event(event: Event) -> None:
            reporter.record(event)
            trackers.on_event(event)
            screen.show_event(event)

        run_loop(host(runs, options, on_start, on_event))


@app.command("trials")
def trials_command(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.")],
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the study and its report; by default in ~/.shoal/studies.")
    ] = None,
    bind: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")] = (
        f"0.0.0.0:{DEFAULT_PORT}"
    ),
    advertise: Annotated[str, typer.Option(help="HOST[:PORT] that the invite names; several with commas.")] = "",
    device: Annotated[str, typer.Option(help="Where the held-out loss is computed: auto, cpu, cuda, …")] = "auto",
    no_pins: Annotated[
        bool, typer.Option("--no-pins", help="Let the first member of each trial define model, data and first state.")
    ] = False,
    data: DataOption = None,
    no_relay: Annotated[
        bool, typer.Option("--no-relay", help="Run no relay beside, for members that cannot be dialed.")
    ] = False,
    log_json: LogJson = None,
    verbose: Verbose = False,
) -> None:
    """Look for good settings of a run: each trial is a short run on the peers that have joined the study.

    After a stop or a crash, the same command goes on. Trials that look worse than others are ended early."""
    from shoal.peer.cli.host import HostOptions, warn_descriptors
    from shoal.peer.terminal.events import plain_line
    from shoal.peer.terminal.reporter import Reporter, setup_logging
    from shoal.peer.trials.study_file import load_study
    from shoal.swarm.protocol.addresses import split_host_port
    from shoal.swarm.protocol.invite import Invite, parse_advertised

    setup_logging(console, verbose)
    warn_descriptors(allow_descriptors())
    loaded = load_study(study)
    from shoal.peer.training.device import choose_device
    from shoal.peer.trials.conduct import StudyConductor, StudyOptions
    from shoal.peer.trials.ledger import TrialRow
    from shoal.peer.trials.report import trials_table, write_plot, write_results

    place = folder or SHOAL_HOME / "studies" / loaded.study.name
    addresses = split_host_port(bind, DEFAULT_PORT), parse_advertised(advertise)
    host = HostOptions(None, place, *addresses, pin=not no_pins, data=DataPlaces.of(data or ()), relay=not no_relay)

    def on_start(invite: Invite) -> None:
        console.print(f"Study   [bold]{loaded.study.name}[/]  hash {loaded.hash.hex()[:16]}")
        console.print(f"Files   {place}")
        console.print("Invite  (this command joins a machine to all trials)")
        console.print(f"\n  shoal join '{invite}'\n", soft_wrap=True, highlight=False)

    def on_trial(row: TrialRow) -> None:
        console.print(row.text, markup=False, highlight=False, soft_wrap=True)

    with Reporter(console, log_json) as reporter:

        def on_event(event: Event) -> None:
            reporter.record(event)
            console.print(plain_line(event, event["run"]), markup=False, highlight=False, soft_wrap=True)

        options = StudyOptions(place, host, choose_device(device))
        rows = run_loop(StudyConductor(loaded, options, on_start, on_event, on_trial).run())
    write_results(loaded, rows, place)
    write_plot(loaded, rows, place)
    console.print(trials_table(loaded, rows))


@app.command("relay")
def relay_command(
    bind: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one, 443 works, too.")] = (
        f"0.0.0.0:{DEFAULT_PORT + 1}"
    ),
    advertise: Annotated[str, typer.Option(help="Host that its URL names; by default the one it listens on.")] = "",
    identity: Annotated[Path, typer.Option(help="The relay's keys; with the same ones its URL stays the same.")] = (
        SHOAL_HOME / "relay"
    ),
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="KEY", help="Serve this host's runs without the token; repeatable."),
    ] = None,
    is_open: Annotated[bool, typer.Option("--open", help="Serve the runs of every host.")] = False,
    rate: Annotated[str, typer.Option(help="Most that it passes on, such as 1Gbit; by default all it can.")] = "",
    member_rate: Annotated[str, typer.Option(help="The same of what one member sends.")] = "",
    links: Annotated[int, typer.Option(min=1, help="Connections that it passes on at once.")] = 1024,
    beside: Annotated[bool, typer.Option("--beside", hidden=True)] = False,
    verbose: Verbose = False,
) -> None:
    """Pass on what members send each other, sealed, where they cannot reach each other. Sees no key and no content."""
    from shoal.peer.cli.relay import RelayOptions, relay
    from shoal.peer.guest.terms import parse_rate
    from shoal.peer.terminal.reporter import setup_logging
    from shoal.swarm.protocol.addresses import split_host_port
    from shoal.swarm.protocol.identity import parse_key
    from shoal.swarm.protocol.relay_url import RelayUrl
    from shoal.swarm.transport.relay.books import RelayLimits

    setup_logging(errors if beside else console, verbose)
    allow_descriptors()
    bytes_s, member_bytes_s = (
        parse_rate(text, option) / 8 if text else 0.0
        for text, option in ((rate, "--rate"), (member_rate, "--member-rate"))
    )
    limits = RelayLimits(bytes_s, member_bytes_s, links)
    known = tuple(parse_key(key) for key in hosts or ())
    place = split_host_port(bind, DEFAULT_PORT + 1)
    options = RelayOptions(identity, place, advertise, known, is_open=is_open, limits=limits)

    def on_start(url: RelayUrl) -> None:
        if beside:
            print(url, flush=True)
            return
        console.print("Relay   (this option has a host reached over it)")
        console.print(f"\n  shoal host RUN.toml --via '{url}'\n", soft_wrap=True, highlight=False)

    run_loop(relay(options, on_start, beside=beside))


@app.command("prepare")
def prepare_command(
    run: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    out: Annotated[Path, typer.Option(help="Where to write the prepared run file, for `shoal host`.")],
    data: DataOption = None,
) -> None:
    """Build a run's model here and write a run file that pins model and data; any machine can host that file."""
    read_run_toml(run)
    from shoal.peer.cli.host import say_pins
    from shoal.peer.cli.prepare import prepare

    prepared = prepare(run, out, console.print, DataPlaces.of(data or ()))
    console.print(f"Pins    {say_pins(prepared.pins)}", soft_wrap=True)


@app.command("start-section", hidden=True)
def start_section_command(
    run: Path,
    out: Annotated[Path, typer.Option()],
    start_from: Annotated[str, typer.Option("--from")],
    identity: Annotated[Path | None, typer.Option()] = None,
    parameters_only: Annotated[bool, typer.Option()] = False,
) -> None:
    """Write a run file with the [start] of a checkpoint; `shoal host --from` runs this as a process of its own."""
    from shoal.peer.cli.start_section import write_started
    from shoal.peer.terminal.reporter import setup_logging

    setup_logging(console, verbose=False)
    write_started(run, out, StartFrom(start_place(start_from), identity, parameters_only))


@app.command("join")
def join_command(
    invite: JoinArgument,
    directory: DirectoryOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    devices: Annotated[
        str,
        typer.Option(
            metavar="all|0,1,…|cpu:N", help="Train on several GPUs, or in N processes on the CPU, as one member."
        ),
    ] = "",
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="With --devices: cut layers among N of them, which share their samples."),
    ] = 1,
    max_memory: Annotated[str, typer.Option(help="Memory of this machine that the run may use, such as 8G.")] = "",
    max_device_memory: Annotated[str, typer.Option(help="The same of the GPU's own memory.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads for training; 0 uses all.")] = 0,
    name: Annotated[str, typer.Option(help="Name of this machine in the run; by default its host name.")] = "",
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on; data uses the port after it.")] = "0.0.0.0",
    advertise: Annotated[str, typer.Option(help="HOST[:PORT] where other peers reach this one.")] = "",
    port_mapping: PortMapping = True,
    relay_for_others: Annotated[
        str,
        typer.Option(
            "--relay-for-others",
            metavar="50Mbit",
            help="Pass on so much for members that cannot reach each other, on the second port after PORT.",
        ),
    ] = "",
    role: Annotated[
        JoinRole,
        typer.Option(help="trainer; contributor: reduce nothing; validator: score work; follower: only follow."),
    ] = "trainer",
    state: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = SHOAL_HOME / "runs",
    keep_checkpoints: Annotated[str, typer.Option(metavar="N|off", help="Keep the newest N checkpoints.")] = "3",
    keep_every: Annotated[int, typer.Option(min=0, help="Keep one of every so many rounds for ever; 0: none.")] = 0,
    copy_to: Annotated[str, typer.Option(metavar="URL", help="Also copy checkpoints to this URL, with fsspec.")] = "",
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FOLDER|URL",
            help="Where the checkpoint or model is that the run starts from, or a folder above it.",
        ),
    ] = None,
    copy_every: Annotated[
        int,
        typer.Option(min=1, metavar="K", help="With --copy-to: K rounds or more between copies."),
    ] = 1,
    data: DataOption = None,
    data_cache: DataCacheOption = "",
    accept: Annotated[
        str,
        typer.Option(metavar="RUNHASH", help="Agree to this run without being asked: its hash, or 16 digits of it."),
    ] = "",
    accept_amendments: Annotated[
        bool, typer.Option("--accept-amendments", help="Go on where the host makes the run longer than it was.")
    ] = False,
    identity: IdentityOption = SHOAL_HOME / "identity",
    max_upload: MaxUpload = "",
    max_download: MaxDownload = "",
    monthly_data: MonthlyData = "",
    hours: HoursOption = "",
    power: PowerOption = None,
    nice: NiceOption = None,
    spot: Annotated[
        SpotProvider | None,
        typer.Option(help="Leave when this provider's metadata service says that it takes the machine back."),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(metavar="INVITE|NAME", help="Join this run when the one before has ended; repeatable."),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="What this machine's devices cost an hour, in the run's currency, for others to read.",
        ),
    ] = None,
    web: WebOption = None,
    metrics: MetricsOption = None,
    log_json: LogJson = None,
    track: TrackOption = None,
    verbose: Verbose = False,
    resume_at: Annotated[int, typer.Option("--resume-at", hidden=True)] = 0,
    resume_as: Annotated[str, typer.Option("--resume-as", hidden=True)] = "",
) -> None:
    """Join a run and train until it ends. Ctrl-C leaves after saving; a second Ctrl-C leaves at once.

    The exit code is 0 after that and at the run's end; SIGTERM leaves in the same way, with 143.

    Before a run trains on files of this machine, it is shown, and you are asked. What this machine lends to runs is
    kept in a file: see `shoal terms`."""
    from shoal.peer.checkpoints.retention import parse_retention
    from shoal.peer.cli.runs import is_named
    from shoal.swarm.protocol.addresses import split_host_port
    from shoal.swarm.protocol.invite import Invite

    runs = [invite, *(then or ())]
    for text in runs:  # names are looked up when their turn has come
        if not is_named(text):
            Invite.read(text)
    from shoal.peer.guest.terms import parse_rate
    from shoal.peer.options import SessionOptions

    options = SessionOptions(
        identity=identity,
        state=state,
        name=name,
        bind=split_host_port(bind),
        maps_ports=port_mapping,
        relay_bps=parse_rate(relay_for_others, "--relay-for-others") if relay_for_others else 0.0,
        advertise=split_host_port(advertise) if advertise else ("", 0),
        role=role,
        checkpoints=parse_retention(keep_checkpoints, keep_every),
        start_from=start_place(start_from) if start_from else None,
        accept_amendments=accept_amendments,
        price_per_hour=price_per_hour,
        data=DataPlaces.of(data or (), _memory("--data-cache", data_cache)),
    )
    memory = _memory("--max-memory", max_memory), _memory("--max-device-memory", max_device_memory)
    terms = given_terms(max_upload, max_download, monthly_data, hours, power, nice)
    from shoal.peer.cli.joining import Compute, Copies, Joiner, Lending, Reports
    from shoal.peer.integrations.trackers import TrackerChoice
    from shoal.peer.terminal.reporter import setup_logging

    setup_logging(console, verbose)
    choices = [TrackerChoice.parse(text) for text in track or ()]
    page = split_host_port(web, DEFAULT_WEB_PORT) if web is not None else None
    scraped = split_host_port(metrics, DEFAULT_METRICS_PORT) if metrics is not None else None
    joiner = Joiner(
        options,
        Compute(device, devices, tensor_parallel, *memory, threads),
        Copies(copy_to, copy_every),
        Lending(terms, SpotNotices(spot) if spot is not None else None, accept),
        Reports(console, log_json, choices, page, scraped),
        directory,
    )
    joiner.join_all(runs, resume_at, resume_as)


@app.command("status")
def status_command(
    invite: InviteArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh it in place, until Ctrl-C or q.")] = False,
    every: EveryOption = 2.0,
) -> None:
    """Show a run: its round and loss, and each member's device, speed and share of the work.

    By the name or the folder of a run that this machine hosts, what is in its journal, also when the run has ended and
    nobody answers."""
    from shoal.swarm.protocol.invite import Invite, invite_text, is_run_name

    if watch and as_json:
        raise UserError("--watch shows a run to people: give --json alone, as often as you like")
    text = invite_text(invite)
    read = None if Path(text).is_dir() or is_run_name(text) else Invite.parse(text)
    if read is None and watch:
        raise UserError("--watch follows a run that is hosted: give its invite")
    if watch and read is not None:
        from shoal.peer.cli.watch import watch as watch_run

        run_loop(watch_run(read, console, every))
        return
    from shoal.peer.terminal.views import status_table
    from shoal.swarm.protocol.json_values import status_json

    if read is not None:
        from shoal.swarm.client.observer import get_status

        status = run_loop(get_status(read))
    else:
        from shoal.peer.cli.page_copy import kept_status

        _, _, status = kept_status(text)
    if as_json:
        console.print_json(data=status_json(status))
    else:
        console.print(status_table(status))


@app.command("top")
def top_command(
    invite: InviteArgument,
    sort: Annotated[
        Literal["share", "speed", "waited", "name"],
        typer.Option(help="Order of the members; the keys s, t, w and n change it."),
    ] = "share",
    every: EveryOption = 2.0,
) -> None:
    """Watch the members of a run, by their share, speed, or how long the run has waited for them. Ends on q."""
    from shoal.swarm.protocol.invite import Invite

    run = Invite.read(invite)
    from shoal.peer.cli.watch import watch
    from shoal.peer.terminal.top import SortBy

    run_loop(watch(run, console, every, SortBy(sort)))


@app.command("trace")
def trace_command(
    invite: InviteArgument,
    number: Annotated[
        int | None, typer.Option("--round", min=0, help="One of the last rounds; by default the newest that has ended.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write, by default RUN-round-N.trace.json.")] = None,
) -> None:
    """Write what all members did in a round as a trace for chrome://tracing or https://ui.perfetto.dev."""
    from shoal.swarm.protocol.invite import Invite

    read = Invite.read(invite)
    from shoal.peer.cli.trace import write_trace

    written = write_trace(read, number, out)
    console.print(f"{written.path}: round {written.round} of {written.members} members", soft_wrap=True)
    console.print(f"the members' clocks are put on the coordinator's, to within {1000 * written.error_s:.0f} ms")
    if written.silent:
        console.print(f"nothing is known of that round from {', '.join(written.silent)}", soft_wrap=True, markup=False)


@app.command("doctor")
def doctor_command(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="[RUN.toml|INVITE]",
            help="Run file with the model to measure, by default a gpt; or a run's invite, to try the network with it.",
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    max_memory: Annotated[str, typer.Option(help="Memory of this machine that a run could use, such as 8G.")] = "",
    max_device_memory: Annotated[str, typer.Option(help="The same of the GPU's own memory.")] = "",
    gpu_memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Predict only what GPUs of this size, such as 24G, could train of the run file; may be repeated.",
        ),
    ] = None,
    data: DataOption = None,
    bind: Annotated[str, typer.Option(help="HOST[:PORT] to listen on, as for `shoal join`.")] = "0.0.0.0",
    port_mapping: PortMapping = True,
    relay: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A relay that tells the type of the NAT; two of them, without an invite."),
    ] = None,
) -> None:
    """Show what this machine can do for a run, with advice: memory, speed of each layer, and how others reach it.

    With an invite the run's coordinator tries this machine's ports from outside."""
    from shoal.swarm.protocol.addresses import split_host_port
    from shoal.swarm.protocol.invite import Invite

    invite = Invite.read(subject) if subject.startswith(("shoal://", "@")) else None
    if subject and invite is None:
        read_run_toml(Path(subject))
    from shoal.peer.cli.doctor_network import examine_network, network_report
    from shoal.swarm.protocol.relay_url import RelayUrl

    if gpu_memory:
        from shoal.peer.cli.doctor_gpu import predict, prediction_report

        if invite is not None or not subject:
            raise UserError("--gpu-memory is for a run file: shoal doctor RUN.toml --gpu-memory 24G")
        sizes = [size for text in gpu_memory if (size := _memory("--gpu-memory", text)) is not None]
        with console.status("Predicting the memory of a step"):
            predicted = predict(Path(subject), DataPlaces.of(data or ()))
        console.print(prediction_report(predicted, sizes))
        return
    bind_to, relays = split_host_port(bind), [RelayUrl.parse(url).address for url in relay or ()]
    if invite is None:
        from shoal.peer.cli.doctor import examine, report
        from shoal.peer.training.device import MemoryLimits

        host_bytes, device_bytes = (
            _memory("--max-memory", max_memory),
            _memory("--max-device-memory", max_device_memory),
        )
        run, limits = Path(subject) if subject else None, MemoryLimits(host_bytes, device_bytes)
        with console.status("Looking at this machine and measuring the model's layers"):
            found = examine(run, device, limits, data=DataPlaces.of(data or ()))
        console.print(report(found))
    with console.status("Looking at this machine's network"):
        network = run_loop(examine_network(invite, bind_to, relays, maps_ports=port_mapping))
    console.print(network_report(network))


@app.command("demo")
def demo_command(
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Train a model in stages that no peer can hold as a whole.")
    ] = False,
    peers: Annotated[
        int | None, typer.Option(min=2, max=16, help="Peers at the start; by default 4, or 5 with --pipeline.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.2, help="How long to train, about.")] = 3.0,
    preset: Annotated[str | None, typer.Option(help="Algorithm: diloco (the default) or sparseloco.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this JSON file.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("shoal-demo"),
    web: WebOption = None,
) -> None:
    """Train a small model with several peers on this machine; one is killed, and one joins late.

    With --pipeline two peers are killed. The second one was the only one with its stage; it comes back."""
    from shoal.peer.demo.run import run_demo
    from shoal.peer.demo.scenario import make_scenario

    scenario = make_scenario(peers, minutes, preset, pipeline=pipeline)
    raise typer.Exit(run_demo(scenario, out, json_file, console, web or ""))


def _memory(option: str, text: str) -> int | None:
    from shoal.peer.machine_memory import parse_memory

    return parse_memory(text, option) if text else None


def allow_descriptors() -> int:
    """Raise the soft limit of open files towards ``_MOST_DESCRIPTORS``; returns the limit reached."""
    return system.allow_files(_MOST_DESCRIPTORS)


def with_bare_options(arguments: Sequence[str]) -> list[str]:
    """Add their values to options that are given without one, at the end or before another option: typer wants one."""
    following = [*arguments, "-"][1:]
    return [
        f"{one}={_BARE[one]}" if one in _BARE and after.startswith("-") else one
        for one, after in zip(arguments, following, strict=True)
    ]


def main() -> None:
    """Run the ``shoal`` command."""
    allow_descriptors()
    try:
        app(with_bare_options(sys.argv[1:]), prog_name="shoal")
    except ShoalError as error:
        from shoal.peer.terminal.events import printable_lines

        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.print(printable_lines(str(error)), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(STOPPED_AT_ONCE)
