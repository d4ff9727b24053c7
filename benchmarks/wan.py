"""The exchange of a round between 4 peers, each in a network namespace of its own with a shaped link.

As ``allreduce.py``: plan in hand, from the contribution in memory to every mean in the store and its digest; links are
open, the first round does not count. Ideal: the time that a peer's sealed bytes alone take at its link's rate. The link
share is ideal / actual; headers of IP and TCP cost some 3.5 % that nobody can have. With a slow member, parts are sized
by bandwidth, and the prediction is that of the closed form (``partition.owner_shares``).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from common import entry_of, parser, publish
from shaped_links import NoShapedLinks, Site, check_machine, enter, shaped_links

PEERS = 4
_PATIENCE_S = 120.0
_SIZES = {"1M": 1_000_000, "10M": 10_000_000, "50M": 50_000_000}


@dataclass(frozen=True)
class Case:
    """One row: ``rates_mbit`` by peer, up and down alike."""

    codec: str
    elements: int
    rates_mbit: tuple[float, ...]
    round_trip_ms: float
    rounds: int


def run_peer(pipe: Connection, site: Site, case: Case) -> None:
    """In a process of its own. Imports come after ``enter``: their threads belong into the namespace too."""
    enter(site.namespace)
    torch.set_num_threads(1)
    asyncio.run(_run_peer(pipe, site, case))


async def _run_peer(pipe: Connection, site: Site, case: Case) -> None:
    from shoal.compression import fast
    from shoal.compression.error_feedback import ErrorFeedback
    from shoal.compression.registry import get_coding
    from shoal.swarm.averaging.allreduce import AllReduce
    from shoal.swarm.averaging.results import ResultStore
    from shoal.swarm.deadlines import Deadlines
    from shoal.swarm.identity import CurveKeys, Identity
    from shoal.swarm.messages import Blob, RosterEntry, RoundPlan
    from shoal.swarm.transport import Node

    identity, keys, coding = Identity.generate(), CurveKeys.fresh(), get_coding(case.codec)
    for thread in fast.compile_ahead(coding.kernels):
        await asyncio.to_thread(thread.join)
    node: Node

    async def admit(key: bytes) -> bool:
        return node.knows_key(key)

    async with Node.open(keys, site.address, (0, 0), admit) as node:
        me = entry_of(node, identity, keys).model_copy(update={"host": site.address})
        pipe.send(me.model_dump())
        roster, plans = await asyncio.to_thread(pipe.recv)
        node.update_roster(tuple(RosterEntry.model_validate(one) for one in roster))
        feedback = ErrorFeedback(case.elements)
        loop = asyncio.get_running_loop()
        for number, dump in enumerate(plans):
            plan = RoundPlan.model_validate(dump)
            contribution = torch.randn(case.elements, generator=torch.Generator().manual_seed(number))
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            sent, received, start = node.meter.sent_bytes, node.meter.received_bytes, loop.time()
            feedback.begin(contribution)
            store = ResultStore(plan, coding)
            node.publish(Blob(kind="result", number=number), store)
            trouble = (await AllReduce(node, store, identity.peer_id, feedback, Deadlines(_PATIENCE_S)).run()).trouble
            assert not trouble, trouble
            for part in plan.parts:
                await asyncio.to_thread(store.digest, part)
            seconds = loop.time() - start
            pipe.send((seconds, node.meter.sent_bytes - sent, node.meter.received_bytes - received))
            await asyncio.to_thread(pipe.recv)
            feedback.commit()
        pipe.send("end")
        await asyncio.to_thread(pipe.recv)


def make_plans(peers: Sequence[str], case: Case) -> list[dict[str, Any]]:
    """One for each round; parts as a coordinator sizes them that has measured these bandwidths."""
    from shoal.swarm.averaging.partition import chunk_elements, owner_shares, split
    from shoal.swarm.messages import Part, PlanMember, RoundPlan

    order = sorted(range(len(peers)), key=lambda index: peers[index])
    shares = owner_shares([1e6 * case.rates_mbit[index] for index in order], [True] * len(peers))
    chunk = chunk_elements(case.elements, len(peers))
    parts = split(case.elements, shares, chunk)
    plan = RoundPlan(
        round=0,
        anchor_version=0,
        state_digest=bytes(32),
        chunk_elements=chunk,
        members=tuple(PlanMember(peer=peers[index], weight_tokens=1) for index in order),
        parts=tuple(Part(owner=owner, start=start, stop=stop) for owner, start, stop in parts),
    )
    return [plan.model_copy(update={"round": number}).model_dump() for number in range(case.rounds)]


def predicted_s(case: Case, vector_bytes: float) -> float:
    """When the slowest member is done, by the closed form: (1 + (n - 2) w) V / b."""
    from shoal.swarm.averaging.partition import owner_shares

    rates = [1e6 * rate for rate in case.rates_mbit]
    shares = owner_shares(rates, [True] * len(rates))
    return max(
        8 * vector_bytes * (1 + (len(rates) - 2) * share) / rate for share, rate in zip(shares, rates, strict=True)
    )


def measure(case: Case) -> dict[str, Any]:
    """A row of the table."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[Any] = []
    rounds: list[list[tuple[float, int, int]]] = []
    with shaped_links(case.rates_mbit, case.round_trip_ms / 2) as sites:
        try:
            for site in sites:
                ours, theirs = context.Pipe()
                processes.append(context.Process(target=run_peer, args=(theirs, site, case), daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            roster = [pipe.recv() for pipe in pipes]
            plans = make_plans([entry["peer"] for entry in roster], case)
            for pipe in pipes:
                pipe.send((roster, plans))
            for _ in range(case.rounds):
                for step in ("ready", "times"):
                    answers = [pipe.recv() for pipe in pipes]
                    if step == "times":
                        rounds.append(answers)
                    for pipe in pipes:
                        pipe.send("go")
        finally:
            for process in processes:
                process.kill()
                process.join()
    counted = rounds[1:] or rounds
    actual_s = median(max(seconds for seconds, _, _ in answers) for answers in counted)
    ideal_s = median(
        max(8 * max(one[1:]) / (1e6 * rate) for one, rate in zip(answers, case.rates_mbit, strict=True))
        for answers in counted
    )
    vector_bytes = median(sum(sent for _, sent, _ in answers) for answers in counted) / (2 * (PEERS - 1))
    return {
        "codec": case.codec,
        "M elements": case.elements / 1e6,
        "Mbit/s": "/".join(f"{rate:g}" for rate in case.rates_mbit)
        if len(set(case.rates_mbit)) > 1
        else case.rates_mbit[0],
        "round trip ms": case.round_trip_ms,
        "s a round": actual_s,
        "ideal s": ideal_s,
        "link share": ideal_s / actual_s,
        "predicted s": predicted_s(case, vector_bytes),
        "first round s": max(seconds for seconds, _, _ in rounds[0]),
    }


def cases(options: Any) -> list[Case]:
    """Everything at the goals' link; the smallest size at all rates and delays; a member at a tenth of the rate."""
    made = []
    for size in options.sizes:
        for codec in options.codecs:
            for rate in options.rates:
                for delay in options.delays:
                    made.append(Case(codec, _SIZES[size], (rate,) * PEERS, delay, options.rounds))
            if options.slow_of:
                rates = (options.slow_of,) * (PEERS - 1) + (options.slow_of / 10,)
                made.append(Case(codec, _SIZES[size], rates, 50.0, options.rounds))
    return made


def ratios_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The goals' figures, of those rows that were measured."""
    ratios: dict[str, float] = {}
    for row in rows:
        if row["codec"] != "int8" or row["round trip ms"] != 50.0:
            continue
        if isinstance(row["Mbit/s"], str):
            ratios.setdefault("slow_member_vs_predicted", row["s a round"] / row["predicted s"])
        elif row["Mbit/s"] == 100.0:
            ratios[f"wan_100mbit_25ms_{row['M elements']:g}M_link_share"] = row["link share"]
    return ratios


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", nargs="+", choices=sorted(_SIZES), default=["10M"])
    arguments.add_argument("--codecs", nargs="+", default=["int8", "float32"])
    arguments.add_argument("--rates", nargs="+", type=float, default=[20.0, 100.0, 500.0], help="Mbit/s, up and down")
    arguments.add_argument("--delays", nargs="+", type=float, default=[10.0, 50.0, 150.0], help="round trip, ms")
    arguments.add_argument(
        "--slow-of", type=float, default=100.0, help="rate beside a member at a tenth of it; 0: none"
    )
    arguments.add_argument("--rounds", type=int, default=4, help="the first one does not count")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go
    try:
        check_machine()
        rows = []
        for case in cases(options):
            rows.append(measure(case))
            print(rows[-1], flush=True)
    except NoShapedLinks as error:
        print(f"benchmarks/wan.py: {error}", file=sys.stderr)
        sys.exit(2)
    publish(f"{PEERS} peers behind shaped links", rows, ratios_of(rows), options.json)


if __name__ == "__main__":
    main()
