"""Small swarms for the planner's tests, and what it answers, worked out the slow and obvious way."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from statistics import median
from typing import Any

from hypothesis import strategies as st

from shoal.swarm.memory_account import MemoryDemand
from shoal.swarm.pipeline.planner.model import LayerCost, PeerCapability, StagePlan

IN_FLIGHT = 2
DEMAND = MemoryDemand(device=5.0, host=4.5, shared=8.2)
LIMITS: dict[str, Any] = {"max_in_flight": IN_FLIGHT, "demand": DEMAND}

Layers = Sequence[LayerCost]
Spans = dict[str, tuple[int, int]]


def span_rate(
    layers: Layers,
    peer: PeerCapability,
    boundaries: Sequence[int],
    span: tuple[int, int],
    peers: Sequence[PeerCapability],
    in_flight: int = IN_FLIGHT,
) -> float:
    """Micro-batches a second, 0 if it does not fit; as the planner's docstrings define it. ``peers``: all of them."""
    first, last = span
    start, stop = boundaries[first], boundaries[last + 1]

    def crossing(boundary: int) -> int:
        return layers[boundary - 1].activation_bytes if 0 < boundary < len(layers) else 0

    parameters = sum(layer.parameters_bytes for layer in layers[start:stop])
    sent = in_flight * (crossing(start) + crossing(stop))

    def fits(activations: int) -> bool:
        if peer.device_bytes is None:
            return DEMAND.shared * parameters + sent + activations <= peer.host_bytes
        on_host = DEMAND.host * parameters + sent <= peer.host_bytes
        return on_host and DEMAND.device * parameters + activations <= peer.device_bytes

    kept = [sum(one.kept_bytes for one in layers[boundaries[s] : boundaries[s + 1]]) for s in range(first, last + 1)]
    inputs = sum(crossing(boundaries[stage]) for stage in range(first, last + 1))
    seconds = sum(peer.layer_s[start:stop])
    if not fits(in_flight * sum(kept)):
        if not fits(in_flight * inputs + max(kept)):
            return 0.0
        seconds *= 4 / 3
    one_way_s = 8 * (crossing(start) + crossing(stop)) / peer.bandwidth_bps
    stay_s = seconds + 2 * one_way_s + peer.rtt_s * ((start > 0) + (stop < len(layers)))
    stay_s += sum(median(one.layer_s[layer] for one in peers) for layer in range(stop, len(layers)))
    for boundary in boundaries[last + 2 : -1]:
        stay_s += 2 * 8 * crossing(boundary) / median(one.bandwidth_bps for one in peers)
        stay_s += median(one.rtt_s for one in peers)
    return 1 / max(seconds, one_way_s, stay_s / in_flight)


def rate(layers: Layers, peers: Sequence[PeerCapability], plan: StagePlan, in_flight: int = IN_FLIGHT) -> float:
    by_stage = [0.0] * plan.stages
    for peer in peers:
        if (span := plan.spans.get(peer.peer)) is not None:
            for stage in range(span[0], span[1] + 1):
                by_stage[stage] += span_rate(layers, peer, plan.boundaries, span, peers, in_flight)
    return min(by_stage)


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def assignments(
    layers: Layers, peers: Sequence[PeerCapability], boundaries: tuple[int, ...], held: Spans | None = None
) -> Iterator[tuple[Spans, float]]:
    """All of them, with their rates; ``held``: of the others, what they hold and keep."""
    stages = len(boundaries) - 1
    spans = [(first, last) for first in range(stages) for last in range(first, stages)]
    options = []
    for peer in peers:
        open_to_it = [held[peer.peer]] if held is not None and peer.peer in held else spans
        rated = [(span, span_rate(layers, peer, boundaries, span, peers)) for span in open_to_it]
        options.append([(span, one) for span, one in rated if one > 0] or [(None, 0.0)])
    for chosen in product(*options):
        by_stage = [0.0] * stages
        for span, one in chosen:
            if span is not None:
                for stage in range(span[0], span[1] + 1):
                    by_stage[stage] += one
        yield (
            {peer.peer: span for peer, (span, _) in zip(peers, chosen, strict=True) if span is not None},
            min(by_stage),
        )


def best_rate(layers: Layers, peers: Sequence[PeerCapability], stages: int) -> float:
    """Over all cuts and assignments; 0 if there is no plan."""
    return max(one for boundaries in cuts(len(layers), stages) for _, one in assignments(layers, peers, boundaries))


@st.composite
def small_swarms(draw: st.DrawFn, most_layers: int = 5, most_peers: int = 4) -> tuple[Layers, list[PeerCapability]]:
    """Unequal in everything; about half of them hold everything with ease, the others little or nothing."""
    numbers = st.integers
    layers = [
        LayerCost(draw(numbers(1, 9)) * 100_000, draw(numbers(1, 9)) * 10_000, draw(numbers(1, 9)) * 100_000)
        for _ in range(draw(numbers(1, most_layers)))
    ]
    peers = [
        PeerCapability(
            peer=f"peer-{number}",
            host_bytes=draw(numbers(1, 60)) * 1_000_000,
            layer_s=tuple(draw(numbers(1, 20)) / 1_000 for _ in layers),
            bandwidth_bps=draw(st.sampled_from([1e6, 1e7, 1e8])),
            rtt_s=draw(st.sampled_from([0.0, 0.02, 0.1])),
            device_bytes=draw(st.none() | numbers(1, 60).map(lambda size: size * 1_000_000)),
        )
        for number in range(draw(numbers(1, most_peers)))
    ]
    return layers, peers


def swarm_of(seed: int, peers: int, layers: int) -> tuple[Layers, list[PeerCapability]]:
    """A large one: peers hold a tenth to all of the model."""
    chance = random.Random(seed)
    costs = [LayerCost(chance.randint(3, 5) * 10**6, 200_000, 2 * 10**6) for _ in range(layers)]
    whole = 8.2 * sum(one.parameters_bytes for one in costs)
    return costs, [member(f"peer-{number:04}", chance, layers, whole) for number in range(peers)]


def member(name: str, chance: random.Random, layers: int, whole_bytes: float) -> PeerCapability:
    speed = chance.uniform(1, 4)
    return PeerCapability(
        peer=name,
        host_bytes=int(whole_bytes * chance.uniform(0.15, 1.1)),
        layer_s=tuple(0.02 / speed * chance.uniform(0.9, 1.1) for _ in range(layers)),
        bandwidth_bps=chance.uniform(2e7, 1e9),
        rtt_s=chance.uniform(0.001, 0.03),
    )
