"""``shoal`` with named steps at which it carries out orders of a test: ``faulty.py ORDERS [--after MARK] join …``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "integration"))

from inflict import SIGNALS, Corruption, Silence, cut, rss_bytes
from orders import COORDINATOR, Order, Orders, cast
from slow_member import slow_down

from shoal.peer.cli.main import main
from shoal.peer.member.member import LocalMember
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.reduction import Reduction
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.coordinator.events import JournalEvent, VerdictGiven
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.transport.bulk.data_plane import DataPlane

_LOOK_S = 0.01
_REST_S = 0.05


class Process:
    """This process, the round that it is in, and what it has been told to do. Steps are numbered by nothing: each asks
    whether an order is due."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.silence = Silence()
        self.corruption = Corruption()
        self.me = ""
        self.plan: RoundPlan | None = None
        self.sent: dict[str, int] = {}
        self.first_receiver = b""
        self.node: Any = None
        self.coordinator_key = b""
        self.coordinator_port = 0

    def enter(self, plan: RoundPlan, me: str) -> None:
        self.plan, self.me = plan, me
        self.sent, self.first_receiver = {}, b""
        self.orders.mark(me, str(os.getpid()))

    @property
    def roles(self) -> dict[str, str]:
        return cast(self.plan) if self.plan is not None else {}

    def plays(self, role: str) -> bool:
        return self.roles.get(role) == self.me

    def due(self, *moments: str) -> Order | None:
        """An order for this moment, for us or, if it is the coordinator's, for anybody."""
        if self.plan is None or not self.roles:
            return None
        for order in self.orders.open(self.plan.round):
            is_ours = order.role == COORDINATOR or (self.plays(order.role) and order.peer in ("", self.me))
            if order.moment in moments and is_ours:
                return order
        return None

    def comes_to(self, *moments: str) -> None:
        order = self.due(*moments)
        if order is not None:
            self.carry_out(order)

    def carry_out(self, order: Order) -> None:
        assert self.plan is not None
        victim = COORDINATOR if order.role == COORDINATOR else self.roles[order.role]
        pid = int(self.orders.marked(victim))
        if not self.orders.claim(order, round=self.plan.round, peer=victim, pid=pid):
            return
        if order.fault in SIGNALS:
            os.kill(pid, SIGNALS[order.fault])
        elif order.role == COORDINATOR:
            self._trouble_with_coordinator(order)
        else:
            self._trouble_with_members(order)

    def _trouble_with_coordinator(self, order: Order) -> None:
        """Of the link between it and us; in its own process, of all its links."""
        match order.fault:
            case "cut":
                port = self.coordinator_port
                cut(order.seconds, lambda own, other: not port or other == port)
            case "half-open":
                self.silence.mute(order.seconds, lambda key: key == self.coordinator_key)
            case _:
                raise AssertionError(order)

    def _trouble_with_members(self, order: Order) -> None:
        assert self.plan is not None
        other = self.key_of(self.roles["owner" if order.role == "contributor" else "witness"])
        match order.fault:
            case "cut":
                cut(order.seconds, lambda own, other: True)
            case "half-open":
                self.silence.mute(order.seconds, lambda key: key == other)
            case "half-open to all":
                self.silence.mute(order.seconds, lambda key: True)
            case "corrupted bytes":
                self.corruption.begin(self.plan.round, lambda key: True)
            case "corrupted bytes to one":
                self.corruption.begin(self.plan.round, lambda key: key == other)
            case _:
                raise AssertionError(order)

    def key_of(self, peer: str) -> bytes:
        key: bytes = self.node._rosters.entry(peer, 0).certificate.curve_key
        return key

    def peer_of(self, key: bytes) -> str:
        return str(self.node.peer_with(key))

    # Steps of the exchange ------------------------------------------------------------------------------------

    async def has_plan(self, number: int) -> None:
        """Who is who stands in the plan: while there are orders for contributors, nothing is sent ahead of it."""
        await until(
            lambda: (
                (self.plan is not None and self.plan.round >= number)
                or all("contributing" not in one.moment for one in self.orders.open(number))
            )
        )

    async def sends(self, kind: str, chunk: int, to: bytes) -> None:
        """A chunk is about to be sent."""
        if kind == "contribution":
            self.comes_to("while contributing" if self.sent.get(kind) else "before contributing")
        elif kind == "result" and self.is_last_of_first_part(chunk):
            await self._sends_last_result(to)
        self.sent[kind] = self.sent.get(kind, 0) + 1

    def is_last_of_first_part(self, chunk: int) -> bool:
        assert self.plan is not None
        return chunk == -(-self.plan.parts[0].stop // self.plan.chunk_elements) - 1

    async def _sends_last_result(self, to: bytes) -> None:
        """The first that asks for it gets it, and the others when it has all of the part."""
        if self.due("some have the result") is None:
            return
        self.first_receiver = self.first_receiver or to
        if to != self.first_receiver:
            assert self.plan is not None
            name = f"{self.plan.round}-{self.peer_of(self.first_receiver)}"
            await until(lambda: bool(self.orders.marked(name)))
            self.comes_to("some have the result")

    async def has_exchanged(self) -> None:
        """About to report: the witness lets others do so first, or the verdict would be there at once."""
        assert self.plan is not None
        number = self.plan.round
        await until(
            lambda: (
                not self.plays("witness") or all(one.moment != "after the report" for one in self.orders.open(number))
            )
        )


async def until(others_are_there: Callable[[], bool]) -> None:
    """Other processes say so with files."""
    while not others_are_there():  # noqa: ASYNC110 - no event comes from them
        await asyncio.sleep(_LOOK_S)


def arm_exchange(process: Process) -> None:
    begin, run, make, put = AllReduce.__init__, AllReduce.run, Reduction._make, ResultStore.put
    send_chunks = DataPlane._send_chunks

    def entered(exchange: Any, endpoint: Any, store: Any, signer: Any, *rest: Any) -> None:
        process.enter(store.plan, signer.peer)
        begin(exchange, endpoint, store, signer, *rest)

    async def ran(exchange: Any) -> Any:
        done = await run(exchange)
        await process.has_exchanged()
        return done

    async def made(reduction: Any, collector: Any, index: int) -> Any:
        await collector.wait_complete(index)
        if reduction.without or process.plays("owner"):
            process.comes_to("while reducing")
        return await make(reduction, collector, index)

    async def received(store: Any, chunk: int, result: memoryview) -> None:
        await put(store, chunk, result)
        if store.has(store.plan.parts[0]):
            process.orders.mark(f"{store.plan.round}-{process.me}")

    async def stream(plane: Any, link: Any, outgoing: Any, ask: Any, source: Any, *rest: Any) -> None:
        await send_chunks(plane, link, outgoing, ask, Watched(process, ask.blob, link.remote_key, source), *rest)

    AllReduce.__init__ = entered  # type: ignore[method-assign]
    AllReduce.run = ran  # type: ignore[method-assign]
    Reduction._make = made  # type: ignore[method-assign]
    ResultStore.put = received  # type: ignore[method-assign]
    DataPlane._send_chunks = stream  # type: ignore[method-assign]


class Watched:
    """A source whose chunks are steps."""

    def __init__(self, process: Process, blob: Any, to: bytes, source: Any) -> None:
        self._process, self._blob, self._to, self._source = process, blob, to, source

    async def chunk(self, index: int) -> memoryview:
        if self._blob.kind == "contribution":
            await self._process.has_plan(self._blob.number)
        payload: memoryview = await self._source.chunk(index)
        plan = self._process.plan
        if plan is None or self._blob.number != plan.round:
            return payload
        await self._process.sends(self._blob.kind, index, self._to)
        return self._process.corruption.changed(self._blob.kind, self._blob.number, self._to, payload)


def tasks_of_channels(node: Any) -> int:
    """Of each that was dialed: one that receives, one that watches."""
    return 2 * len(node.control._dialed)


def arm_member(process: Process, levels: Path) -> None:
    """What it asks of the coordinator, and how much it holds after each round."""
    ask, beat, hold = CoordinatorClient.ask, CoordinatorClient.heartbeat, LocalMember._take_possession

    async def asked(client: Any, message: Any, reply: Any) -> Any:
        process.node, process.coordinator_key, process.coordinator_port = (
            client.node,
            client.invite.key,
            client.invite.addresses[0].control_port,
        )
        answer = await ask(client, message, reply)
        if isinstance(message, PeerToCoordinatorRoundReport):
            process.comes_to("after the report")
        return answer

    def held(member: Any, state: Any) -> None:
        hold(member, state)
        data = member.node._data
        level = {
            "pid": os.getpid(),
            "version": state.version,
            "rss_bytes": rss_bytes(os.getpid()),
            "tasks": len(asyncio.all_tasks()) - tasks_of_channels(member.node),
            "threads": threading.active_count(),
            "files": len(os.listdir("/dev/fd")),
            "blobs": len(data._sources),
            "links": len(data._links),
            "streams": sum(len(link.incoming) + len(link.outgoing) for link in data._links.values()),
        }
        with levels.open("a") as file:
            file.write(json.dumps(level) + "\n")

    async def beaten(client: Any, heartbeat: Any) -> None:
        # All links are as fast, so that every trainer owns a part.
        await beat(client, heartbeat.model_copy(update={"bandwidth_bps": 0.0}))

    CoordinatorClient.ask = asked  # type: ignore[method-assign]
    CoordinatorClient.heartbeat = beaten  # type: ignore[method-assign]
    LocalMember._take_possession = held  # type: ignore[method-assign]


def arm_host(process: Process) -> None:
    """When a verdict is in the journal and nobody has heard of it."""
    real = LocalJournal.append

    def write(journal: LocalJournal, expected_index: int, events: Sequence[JournalEvent]) -> None:
        real(journal, expected_index, events)
        for event in events:
            if isinstance(event, VerdictGiven) and event.verdict.plan is not None:
                process.plan = event.verdict.plan
                for order in process.orders.open(process.plan.round):
                    if order.moment == "before the verdict is announced" and process.roles:
                        process.carry_out(order)

    LocalJournal.append = write  # type: ignore[method-assign]
    process.orders.mark(COORDINATOR, str(os.getpid()))


def wait_at_the_door(orders: Orders, name: str) -> None:
    """Everything is imported by now."""
    print("at the door", flush=True)
    while not orders.marked(name):
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    _, folder, *arguments = sys.argv
    this = Process(Orders(Path(folder)))
    if arguments[0] == "--after":
        _, name, *arguments = arguments
        wait_at_the_door(this.orders, name)
    this.silence.install()
    if arguments[0] == "host":
        arm_host(this)
    else:
        slow_down(_REST_S)
        arm_exchange(this)
        arm_member(this, Path("levels.jsonl").absolute())
    sys.argv = ["shoal", *arguments]
    main()
