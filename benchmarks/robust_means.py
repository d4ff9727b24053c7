"""Robust means (``averaging.robust``): held-out loss with and without attackers, and the time of a reduction.

Loss: rounds of a small gpt, really trained, as in ``uneven.py``, planned and reduced by the code of real rounds;
attackers do honest work, and then lie about it. Time: an owner's whole reduction, kinds in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import console, parser, publish
from torch import Tensor
from uneven import BATCH, CONTEXT, RUN, SLOWEST_STEPS, make_trainer, plan_of

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import named_format_map
from shoal.compression.kernels import loader
from shoal.peer.recipes import load_recipe
from shoal.peer.training.outer_optimizer import make_outer
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.averaging.reduction import PartReducer, ReducedChunk
from shoal.swarm.coordinator.influence import bounded, level_of, power_of
from shoal.swarm.coordinator.rollback import CommittedRound
from shoal.swarm.coordinator.trust import earn_credit
from shoal.swarm.protocol.rounds import RoundPlan, leaf_elements
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

KINDS = ("none", "norm", "clip", "trimmed")
UNEVEN, EVEN = (1, 1, 1, 2, 4, 4, 10, 20), (1,) * 8
ATTACKS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "random": lambda own, draws: torch.randn(own.numel(), generator=draws) * (10 * own.norm() / own.numel() ** 0.5),
    "sign flip x 10": lambda own, draws: own * -10,
    "small steady bias": lambda own, draws: own + own.norm() / own.numel() ** 0.5,
}
"""What an attacker sends instead of its own work; it claims the norm that it sends."""


def reduced(plan: RoundPlan, brought: dict[str, Tensor], codec_map: CodecMap) -> Tensor:
    """The owners' mean of ``(n,) float32`` contributions."""
    elements, group = plan.parts[-1].stop, Group.of(plan)
    size = plan.chunk_elements
    bounds = {at // size: (at, min(at + size, elements)) for at in range(0, elements, size)}
    work, mean = PartReducer(codec_map, NormBounds(plan, codec_map), group, bounds), torch.zeros(elements)
    for index, (start, stop) in bounds.items():
        for number, member in enumerate(plan.members):
            packed = codec_map.contribution(start, stop).encode(brought[member.peer][start:stop])
            work.offer(index, number, packed)
        made = work.reduce(index)
        assert isinstance(made, ReducedChunk)
        if made.included:
            codec = codec_map.result(start, stop, len(plan.members))
            codec.decode(made.result[group.header_bytes :], stop - start, mean[start:stop])
    return mean


def held_out_loss(kind: str, attack: str | None, speeds: tuple[int, ...], rounds: int, seed: int) -> float:
    """The last two of these members attack, if there is an attack. The same seed is the same work."""
    round_tokens = sum(speeds) * SLOWEST_STEPS * BATCH * CONTEXT
    tokens = rounds * round_tokens
    run: RunFile = parse_run_file(
        RUN.format(seed=seed, tokens=tokens, warmup=tokens // 10, round_tokens=round_tokens, robust=kind)
    )
    recipe, outer, power = load_recipe(run), make_outer(run.outer), power_of(run)
    trainers = [make_trainer(run, recipe, number, len(speeds), speed) for number, speed in enumerate(speeds)]
    members, lies = {one.peer: one.about for one in trainers}, torch.Generator().manual_seed(seed)
    vector = ParameterVector(trainers[0].model)
    values = torch.zeros(1 + outer.slots, vector.elements)
    vector.read(0, vector.elements, values[0])
    codec_map = CodecMap(named_format_map("float32")).by_leaf(leaf_elements(vector.elements))
    past: list[CommittedRound] = []
    for number in range(rounds):
        work = {one.peer: one.train(values[0], run, number * round_tokens, round_tokens) for one in trainers}
        if attack is not None:
            for one in trainers[-2:]:
                own, weight = work[one.peer]
                work[one.peer] = ATTACKS[attack](own, lies), weight
        plan = bounded(plan_of(number, work), run, past, members)
        mean = reduced(plan, {peer: own for peer, (own, _) in work.items()}, codec_map)
        level = level_of(plan.members, members, power)
        weight = sum(one.weight_tokens for one in plan.members)
        past.append(CommittedRound(number, bytes(32), weight, 1.0, (), level, plan.rho, None, ()))
        outer.step_(values, mean, number)
        for planned in plan.members:
            members[planned.peer].rounds_committed += 1
        earn_credit(members, {one.peer: one.weight_tokens for one in plan.members}, weight)
    vector.write(values[0])
    return recipe.held_out_loss(trainers[0].model, "cpu")


def reduction_s(kind: str, codec_map: CodecMap, plan: RoundPlan, packed: list[Tensor], chunks: int) -> float:
    """Seconds to reduce so many chunks, whose contributions are all here. ``kind``: of ``averaging.robust``."""
    members = [one.model_copy(update={"factor": 1.0 if kind == "none" else 0.9}) for one in plan.members]
    mean = kind if kind in ("clip", "trimmed") else "weighted"
    plan = plan.model_copy(update={"members": tuple(members), "mean": mean})
    bounds = {at: (at * plan.chunk_elements, (at + 1) * plan.chunk_elements) for at in range(chunks)}
    work = PartReducer(codec_map, NormBounds(plan, codec_map), Group.of(plan), bounds)
    for index in bounds:
        for number, one in enumerate(packed):
            work.offer(index, number, one)
    began = time.perf_counter()
    for index in bounds:
        work.reduce(index)
    return time.perf_counter() - began


def times(codec: str, peers: int, turns: int) -> dict[str, float]:
    """Median seconds of each kind, for 8 chunks of 2**18 int8 values of each peer."""
    chunks, size = 8, 2**18
    values = [torch.randn(size, generator=torch.Generator().manual_seed(one)) for one in range(peers)]
    brought = {"peer" + "abcdefgh"[one] * 12: (values[one].repeat(chunks), 100) for one in range(peers)}
    plan = plan_of(0, brought).model_copy(update={"chunk_elements": size})
    codec_map = CodecMap(named_format_map(codec)).by_leaf(leaf_elements(chunks * size))
    packed = [codec_map.contribution(0, size).encode(one) for one in values]
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(turns + 1):
        for kind in KINDS:
            seconds = reduction_s(kind, codec_map, plan, packed, chunks)
            if turn:  # the first only warms up
                took[kind].append(seconds)
    return {kind: median(seconds) for kind, seconds in took.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=30, help="0: times only")
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--turns", type=int, default=15)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    for thread in loader.compile_ahead(CodecMap(named_format_map("int8")).kernels):
        thread.join()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float | None] = {}
    took = times("int8", 8, options.turns)
    for kind in KINDS[1:]:
        ratios[f"robust_{kind}_time_vs_none"] = took[kind] / took["none"]
        console.print(f"{kind}: {took[kind] / took['none']:.3f} times as long as none")
    cases = [("1 to 20", UNEVEN, None), ("even", EVEN, None), *(("even", EVEN, attack) for attack in ATTACKS)]
    for name, speeds, attack in cases if options.rounds else []:
        losses = {
            kind: median(held_out_loss(kind, attack, speeds, options.rounds, seed) for seed in range(options.seeds))
            for kind in KINDS
        }
        console.print(f"{name}, {attack}: {losses}")
        rows.append({"speeds": name, "2 of 8 attack": attack or "no", **losses})
    publish(f"{options.rounds} rounds, 8 members of their own data, held-out loss", rows, ratios, options.json)


if __name__ == "__main__":
    main()
