"""Ranks of an island that train without a network, compared by rank 0 with one process that trains alone.

``python island_ranks.py FOLDER RANK RANKS TENSOR_PARALLEL``: rank 0 prints the largest differences as JSON."""

import json
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shoal.peer.island.group import Island, init_process_group
from shoal.peer.island.optimizer import IslandOptimizer
from shoal.peer.island.ranks import FollowingSession, IslandLead
from shoal.peer.island.spreading import spread_model
from shoal.peer.recipes import find_recipe
from shoal.peer.training.algorithms import LocalWork, local_work
from shoal.peer.training.inner_loop import InnerLoop
from shoal.peer.training.inner_optimizer import make_inner
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.protocol.run_file import DataSection, RunFile, parse_run_file

SIZES = (6, 5, 1, 4)
"""Samples of the batches: equal shares, unequal ones, and one of which some ranks have none."""

TOML = """
algorithm = "{algorithm}"
averaging.codec = "int8"
averaging.overlap = {overlap}
[run]
name = "reef"
seed = 1
rounds = 1
[recipe]
name = "gpt"
[recipe.settings]
layers = 2
heads = 2
width = 16
context = 8
[data]
source = "stdlib"
[inner]
lr = 1e-2
batch_samples = 6
clip_norm = 0.5
precision = "float32"
[round]
tokens = 1000
max_s = 60
"""


class Samples:
    """Random windows of bytes."""

    def __init__(self) -> None:
        self._tokens = torch.randint(256, (64, 9), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self._tokens[index]

    def batch(self, indices: Any) -> Tensor:
        return self._tokens[torch.as_tensor(indices)]


def batches() -> Iterator[list[int]]:
    at = 0
    for size in SIZES:
        yield list(range(at, at + size))
        at += size


def factor_of(number: int) -> float:
    """Return the schedule's factor that loops are told with a batch."""
    return 1 / (1 + number)


def read(reader: Any) -> Tensor:
    out = torch.empty(reader.elements)
    reader.read(0, reader.elements, out)
    return out


def alone(run: RunFile, recipe: Any) -> Iterator[tuple[list[float], Tensor]]:
    """Train as one process; yield losses and contribution of a round, and the same of one after it."""
    model, data = recipe.build_model(1), Samples()
    vector, optimizer = ParameterVector(model), make_inner(model, run.inner)
    work = local_work(run, vector, optimizer)
    loop = InnerLoop(model, recipe.loss, lambda: torch.autocast("cpu", enabled=False), 2)
    anchor = read(vector)
    work.restart_from(anchor)
    yield from rounds(work, anchor, lambda indices: loop.backward(data.batch(indices)))
    yield [], read(vector.settled())


def rounds(work: LocalWork, anchor: Tensor, backward: Any) -> Iterator[tuple[list[float], Tensor]]:
    for _ in range(2):
        losses = []
        for indices in batches():
            losses.append(float(backward(indices)))
            work.step(len(indices), 1.0)
        contribution = read(work.contribution(anchor))
        anchor = anchor - 0.5 * contribution
        work.continue_from(anchor)
        yield losses, contribution


def main() -> None:
    folder, rank, ranks, tensor_parallel, algorithm, overlap = sys.argv[1:]
    torch.set_num_threads(1)
    init_process_group(folder, int(rank), int(ranks), on_gpus=False)
    shape = (int(ranks) // int(tensor_parallel), int(tensor_parallel))
    island = Island(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))
    toml = TOML.format(algorithm=algorithm, overlap=overlap)
    run = parse_run_file(toml)
    recipe: Any = find_recipe("gpt")(run.recipe.settings, DataSection(source="stdlib"), ())
    model = recipe.build_model(1) if island.leads else recipe.model_from_config(recipe.config())
    spread = spread_model(model, island, recipe.tensor_parallel())
    optimizer = make_inner(model, run.inner)
    loop = InnerLoop(model, recipe.loss, lambda: torch.autocast("cpu", enabled=False), 2)
    if not island.leads:
        with FollowingSession(island, model, optimizer, spread=spread) as session:
            for number, batch in enumerate(session.batches(Samples())):
                assert session.lr_factor == factor_of(number)
                session.step(loop.backward(batch, session.share))
        return

    lead = IslandLead(island, spread)
    lead.introduce(toml)
    vector = lead.vector(model, None)
    work = lead.work(local_work(run, vector, optimizer))
    whole = lead.optimizer(optimizer, vector)
    anchor = read(vector)
    work.restart_from(anchor)
    lead.resume(1.0)
    data = Samples()

    numbers = count()

    def backward(indices: list[int]) -> Tensor:
        mine = lead.give_out(torch.tensor(indices).numpy(), factor_of(next(numbers)))
        return lead.mean_loss(loop.backward(data.batch(mine), lead.share))

    class Resuming:
        """Steps after which the other ranks go on, as a session's."""

        def step(self, samples: int, lr_factor: float) -> None:
            work.step(samples, lr_factor)
            lead.resume(1.0)

        def contribution(self, anchor: Tensor) -> Any:
            return work.contribution(anchor)

        def continue_from(self, anchor: Tensor) -> None:
            work.continue_from(anchor)

    found = list(rounds(Resuming(), anchor, backward))  # type: ignore[arg-type]
    check_optimizer(whole, optimizer)
    parameters = work.contribution(torch.zeros(vector.elements))
    found.append(([], -read(parameters) if run.algorithm == "diloco" else read(vector)))
    lead.end()
    report(list(alone(run, recipe)), found)


def check_optimizer(whole: IslandOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Gather the optimizer's state, lose it, and spread it again."""
    saved = whole.state_dict()
    optimizer.state.clear()
    whole.load_state_dict(saved)
    again = whole.state_dict()
    for number, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(value, again["state"][number][name]), (number, name)


def report(expected: list[tuple[list[float], Tensor]], found: list[tuple[list[float], Tensor]]) -> None:
    assert len(expected) == len(found)
    losses = [
        abs(a - b) for (one, _), (two, _) in zip(expected, found, strict=True) for a, b in zip(one, two, strict=True)
    ]
    values = [float((one - two).abs().max()) for (_, one), (_, two) in zip(expected, found, strict=True)]
    scale = [float(one.abs().max()) for _, one in expected]
    print(json.dumps({"losses": max(losses), "values": values, "scale": scale}))


if __name__ == "__main__":
    main()
