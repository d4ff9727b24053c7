"""``shoal simulate``: predict a run on machines that one does not have yet."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from shoal.swarm.errors import UserError

if TYPE_CHECKING:
    from shoal.swarm.protocol.run_file import RunFile
    from shoal.swarm.simulation.figures import Figures
    from shoal.swarm.simulation.result import Model

app = typer.Typer()
"""Part of the ``shoal`` command in ``main.py``."""

_MOST_MEMBERS = 16_384
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def parse_number(text: str, option: str) -> int:
    """Convert a number such as ``124M``, ``1.5B`` or ``4000``. Raises ``UserError``."""
    letter = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        value = float(text.removesuffix(text[-1:]) if letter else text) * _UNITS[letter]
    except (ValueError, KeyError):
        value = math.nan
    if not 1 <= value <= 2**62:
        raise UserError(f"{option} {text}: expected a number such as 4000, 124M or 1.5B")
    return round(value)


def parse_sweep(text: str) -> list[int]:
    """Convert numbers of members, with commas. Raises ``UserError``."""
    return [check_members(parse_number(one.strip(), "--sweep"), "--sweep") for one in text.split(",")]


def check_members(members: int, option: str) -> int:
    if not 1 <= members <= _MOST_MEMBERS:
        raise UserError(f"{option} {members}: expected 1 to {_MOST_MEMBERS} members")
    return members


@app.command("simulate")
def simulate_command(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    trace: Annotated[
        str,
        typer.Option(metavar="FILE|NAME", help="volunteers, spot, cluster, or a file .toml, .json or .csv."),
    ] = "volunteers",
    members: Annotated[
        int | None, typer.Option(min=1, help="Number of machines; by default those of the file, or 100.")
    ] = None,
    sweep: Annotated[str, typer.Option(metavar="N,N,…", help="Simulate once for each of these numbers.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds to simulate.")] = 8,
    hours: Annotated[float, typer.Option(min=0.001, help="Most hours of the run to simulate.")] = 168.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of machines, sessions and grids.")] = 0,
    tokens: Annotated[
        str, typer.Option(metavar="N", help="Tokens whose time is asked for, such as 10B; by default run.tokens.")
    ] = "",
    parameters: Annotated[
        str, typer.Option(metavar="N", help="Trained parameters, such as 124M; by default the recipe's.")
    ] = "",
    tokens_per_sample: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample; by default the recipe's.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=2, max=4096, help="Layers of a model in stages, as equal blocks; by default the recipe's."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict how a run goes on given machines: rounds, goodput, bytes, time to so many tokens, the host's load, price.

    The coordinator's own rules decide, on a clock of its own; the machines, their links and when they are there are
    models. The same seed gives the same result."""
    from shoal.swarm.protocol.run_toml import read_run_toml

    read_run_toml(run)
    from shoal.swarm.protocol.run_file import load_run_file
    from shoal.swarm.simulation.figures import figures_of
    from shoal.swarm.simulation.run import horizon_s
    from shoal.swarm.simulation.run import simulate as simulate_run
    from shoal.swarm.simulation.traces import trace_of

    _, file = load_run_file(run)
    machines = trace_of(trace)
    counts = parse_sweep(sweep) if sweep else [check_members(members or machines.members or 100, "--members")]
    if sweep and members is not None:
        raise UserError("--members and --sweep: expected one of them")
    wanted = parse_number(tokens, "--tokens") if tokens else file.run.tokens
    elements = parse_number(parameters, "--parameters") if parameters else None
    model = _model_of(file, elements, tokens_per_sample, layers)
    until_s = horizon_s(file, 3600 * hours)
    errors = Console(stderr=True)
    found: list[Figures] = []
    for count in counts:
        start_s = time.monotonic()
        with errors.status(f"{count} members") as status:
            result = simulate_run(file, model, machines, count, seed, until_s, rounds, status.update)
        found.append(figures_of(result, wanted))
        if not as_json:
            errors.print(f"{count} members: simulated in {time.monotonic() - start_s:.1f} s", highlight=False)
    if as_json:
        print(json.dumps([one.as_dict() for one in found] if sweep else found[0].as_dict(), indent=1))
        return
    console = Console()
    console.print(table_of(found, machines.name, model.elements))
    for note in dict.fromkeys(note for one in found for note in one.notes):
        console.print(f"Note: {note}.", markup=False, highlight=False)


def _model_of(run: RunFile, elements: int | None, tokens_per_sample: int | None, layers: int | None) -> Model:
    """The size of the run's model: as given, as pinned, or as the recipe makes it; of one in stages with its layers.

    Raises ``UserError``."""
    from shoal.swarm.simulation.result import Model

    pins, in_stages = run.pins, run.pipeline is not None
    if layers is not None and not in_stages:
        raise UserError("--layers: the run has no [pipeline], so its model is not cut")
    needs_layers = in_stages and layers is None
    elements = elements or (pins.elements if pins else None)
    tokens_per_sample = tokens_per_sample or (pins.tokens_per_sample if pins else None) or run.data.tokens_per_sample
    if run.recipe.name == "own" and (elements is None or tokens_per_sample is None or needs_layers):
        raise UserError(
            "the members of this run bring their own model: say its size with --parameters, and --tokens-per-sample"
            + (" and --layers" if in_stages else "")
        )
    if elements is None or tokens_per_sample is None or needs_layers:
        from shoal.peer.machine_memory import machine_bytes
        from shoal.peer.recipes import load_recipe
        from shoal.peer.recipes.model_memory import outline_of

        recipe = load_recipe(run)
        tokens_per_sample = tokens_per_sample or recipe.tokens_per_sample
        if elements is None or needs_layers:
            outline = outline_of(run, recipe, machine_bytes())
            elements, layers = elements or outline.trained, layers or (len(outline.layers) if in_stages else None)
    return Model.decoder(elements, tokens_per_sample, layers) if layers else Model(elements, tokens_per_sample)


def table_of(found: list[Figures], trace: str, elements: int) -> Table:
    """Return the figures as a table, a column for each number of members."""
    table = Table(title=f"Simulated: {trace}, {elements:,} parameters", title_justify="left")
    table.add_column("")
    for one in found:
        table.add_column(f"{one.members:,} machines", justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("there at a time", [f"{one.members_there:,.1f}" for one in found]),
        ("in a round", [f"{one.members_in_round:,.0f} in {one.rows} rows" for one in found]),
        ("rounds committed, aborted", [f"{one.rounds_committed}, {one.rounds_aborted}" for one in found]),
        ("a round", [f"{one.round_s:,.1f} s" for one in found]),
        ("rounds an hour", [f"{one.rounds_per_hour:.1f}" for one in found]),
        ("tokens/s", [f"{one.tokens_per_s:,.0f}" for one in found]),
        ("goodput", [f"{one.goodput:.1%}" for one in found]),
    ]
    if found[0].tokens_wanted is not None:
        rows.append((f"time to {found[0].tokens_wanted:,} tokens", [_hours(one.hours_to_tokens) for one in found]))
    if found[0].pipeline is not None:
        stages = [one.pipeline for one in found if one.pipeline is not None]
        rows += [
            ("stages; fewest replicas", [f"{one.stages}; {one.fewest_replicas}" for one in stages]),
            ("planned tokens/s", [f"{one.planned_tokens_per_s:,.0f}" for one in stages]),
            ("members moved; a stage stood still", [f"{one.moves}; {one.stalled:.1%}" for one in stages]),
            ("a member sends between stages", [f"{one.between_stages_gb_per_hour:,.2f} GB/h" for one in stages]),
            ("states fetched", [f"{one.state_gb:,.1f} GB" for one in stages]),
        ]
    for phase in ("compute", "packing", "exchange", "waiting", "applying"):
        rows.append((f"members' time: {phase}", [f"{one.spent[phase]:.1%}" for one in found]))
    rows += [
        ("exchange", [f"{one.exchange_s:,.1f} s" for one in found]),
        ("a member sends", [f"{one.member_sent_gb_per_hour:,.2f} GB/h" for one in found]),
        ("work lost with its member", [f"{one.samples_lost_share:.2%}" for one in found]),
        ("host sends", [f"{one.host_sent_mbit:,.2f} Mbit/s" for one in found]),
        ("host receives", [f"{one.host_received_mbit:,.2f} Mbit/s" for one in found]),
        ("host's processor", [f"{one.host_cores:.3f} cores" for one in found]),
        ("largest view", [f"{one.largest_view_mb:,.3f} MB" for one in found]),
        ("over relays", [f"{one.relayed_mbit:,.1f} Mbit/s" for one in found]),
        ("joins refused", [f"{one.refused_joins:,}" for one in found]),
        ("price an hour", [f"{one.price_per_hour:,.2f}" for one in found]),
        ("price of 1e9 tokens", ["-" if (p := one.price_per_1e9_tokens) is None else f"{p:,.3f}" for one in found]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _hours(hours: float | None) -> str:
    if hours is None:
        return "-"
    return f"{hours:,.1f} h" if hours < 96 else f"{hours / 24:,.1f} days"
