"""Faults: what each does, and how it heals."""

import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.chaos.attack import COMEBACKS, COORDINATOR_AWAY_S, FAULTS, PARTITIONS, Attack
from tests.fakes.memory_network import Step
from tests.fakes.processes import the_loop

if TYPE_CHECKING:
    from tests.chaos.scene import Scene

Infliction = tuple[Callable[[], object], float, Callable[[], object] | None]
"""What is done, after how many seconds it heals, and how; None: never."""


def infliction(scene: "Scene", attack: Attack) -> Infliction:
    match attack.role:
        case "coordinator":
            return _of_coordinator(scene, attack.fault, scene.victim(attack))
        case "network":
            return _of_network(scene, attack.fault)
    return _of_member(scene, attack.fault, scene.victim(attack), scene.other(attack))


def _of_coordinator(scene: "Scene", fault: str, member: str) -> Infliction:
    """``member``: at the other end of the link that fails."""
    coordinator, channel = scene.run.coordinator, scene.life(member).channel
    match fault:
        case "SIGKILL":
            return partial(setattr, coordinator, "away", True), COORDINATOR_AWAY_S, coordinator.restart
        case "SIGSTOP" | "SIGSTOP, long":
            wake = partial(setattr, coordinator, "stopped", False)
            return partial(setattr, coordinator, "stopped", True), FAULTS[fault], wake
        case "cut" | "cut, long":
            return partial(setattr, channel, "open", False), FAULTS[fault], partial(setattr, channel, "open", True)
        case "half-open":
            return partial(setattr, channel, "silent", True), FAULTS[fault], partial(setattr, channel, "silent", False)
    raise AssertionError(fault)


def _of_member(scene: "Scene", fault: str, peer: str, other: str) -> Infliction:
    network, loop = scene.run.network, the_loop()
    pair, everybody = frozenset((peer, other)), {one.peer for one in scene.run.members}
    match fault:
        case "SIGKILL":
            return scene.life(peer).die, 0.0, None
        case "SIGKILL, back at once" | "SIGKILL, back late":
            return scene.life(peer).die, COMEBACKS[fault], partial(scene.come_back, peer)
        case "SIGSTOP" | "SIGSTOP, long":
            return partial(loop.stop_process, peer), FAULTS[fault], partial(loop.resume_process, peer)
        case "cut" | "cut, long":
            return partial(network.cut.add, pair), FAULTS[fault], partial(network.cut.discard, pair)
        case "half-open" | "half-open to all":
            ways = {(peer, one) for one in (everybody if fault == "half-open to all" else {other})}
            return partial(network.silent.update, ways), FAULTS[fault], partial(network.silent.difference_update, ways)
        case "corrupted bytes" | "corrupted bytes to one":
            whom = everybody if fault == "corrupted bytes" else {other}
            return partial(scene.corrupt.update, {peer: whom}), 0.0, None
        case "huge values":
            return partial(scene.huge.add, peer), 0.0, None
        case "many faces":
            return partial(scene.many_faces.add, peer), 0.0, None
    raise AssertionError(fault)


def _of_network(scene: "Scene", fault: str) -> Infliction:
    """Split the network into two halves; the coordinator is with the owner, or with both."""
    network = scene.run.network
    here = {scene.named("owner"), scene.named("contributor")}
    there = {one.peer for one in scene.run.members} - here
    pairs = {frozenset((one, other)) for one in here for other in there}
    alone = [scene.life(peer).channel for peer in there] if "coordinator" in fault else []

    def divide() -> None:
        network.cut.update(pairs)
        for channel in alone:
            channel.open = False

    def heal() -> None:
        network.cut.difference_update(pairs)
        for channel in alone:
            channel.open = True

    return divide, PARTITIONS[fault], heal


def changed(scene: "Scene", step: Step, payload: bytes) -> bytes:
    """What arrives: contributions and partials that are no numbers, results that are too short or, to one receiver,
    others; of all of them, values that nobody claims to have."""
    if step.holder in scene.huge and payload:
        return payload[: len(payload) % 4] + struct.pack("<f", 1e30) * (len(payload) // 4)  # with its header
    if step.holder in scene.many_faces and step.blob.kind == "result":
        return payload[:-4] + struct.pack("<f", scene.run.index(scene.life(step.to)))
    if step.to not in scene.corrupt.get(step.holder, ()) or not payload:
        return payload
    if step.blob.kind in ("contribution", "partial"):
        return b"\xff" * len(payload)
    return payload[:-4] + bytes(4) if len(scene.corrupt[step.holder]) == 1 else payload[:-1]
