"""Ranks of an island that hold stages of a pipeline, compared by rank 0 with one process that holds them.

``python island_stages.py FOLDER RANK RANKS TENSOR_PARALLEL RECOMPUTE RECIPE``: rank 0 prints the largest relative
differences as JSON. Two spans come one after the other: stages 0 and 1, and the model's last one."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shoal.peer.island.group import Island, init_process_group
from shoal.peer.island.stages import FollowingStages, StageRanks
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, MicroBatchKey, StageCompute
from shoal.peer.recipes import find_recipe
from shoal.peer.training.algorithms import AccumulatedGradient, local_work
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.run_file import DataSection, RunFile, parse_run_file

TOML = """
algorithm = "virtual_batch"
averaging.codec = "float32"
[run]
name = "reef"
seed = 1
rounds = 1
[recipe]
name = "gpt"
[recipe.settings]
layers = 3
heads = 2
width = 16
context = 8
tie_embedding = false
[data]
source = "stdlib"
[pipeline]
micro_batch = 5
activations = "float32"
max_in_flight = 8
[inner]
precision = "float32"
[round]
tokens = 120
max_s = 60
"""
BOUNDARIES = (0, 2, 3, 5)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""The same sizes for the recipe ``hf``, whose blocks run within the architecture's own code."""
CPU = torch.device("cpu")
SIZES = (5, 4, 1)
"""Samples of the micro-batches: unequal shares, equal ones, and one of which some ranks have none."""


class Held:
    """Stages held by this process alone or by the island; ``found``: all tensors that they made, in order."""

    def __init__(self, run: RunFile, recipe: Any, span: Sequence[int], island: StageRanks | None, recompute: bool):
        self.recipe, self.found = recipe, list[Tensor]()
        layered, is_last = recipe.layers(run.run.seed), span[-1] == len(BOUNDARIES) - 2
        held, self.works, vectors = [], [], []
        settings = {}
        for stage in span:
            layers = BOUNDARIES[stage], BOUNDARIES[stage + 1]
            model = layered.build(*layers)
            lead = None if island is None else island.enter_stage(stage, layers, model, mixes=False)
            vector = ParameterVector(model) if lead is None else lead.vector(model, None)
            own = AccumulatedGradient(vector) if lead is None else local_work(run, vector, None)
            self.works.append(own if lead is None else lead.work(own))
            vectors.append(vector)
            held.append(HeldStage(stage, layers[0], model, own))
            shares = None if island is None else island.shares()
            shape = (8, 16) if stage else None
            settings[stage] = ComputeSettings(
                CPU, max_in_flight=8, recompute=recompute, seed=1, input_shape=shape, shares=shares
            )
        make: Callable[..., StageCompute] = StageCompute
        if island is not None:
            make = island.begin_span(settings, is_last=is_last)
        self.make, self.held, self.settings = make, held, settings
        loss = recipe if is_last else None
        self.computes = {one.number: make(held[at:], settings[one.number], loss) for at, one in enumerate(held)}
        self.loss, self.is_last = loss, is_last
        for work, vector in zip(self.works, vectors, strict=True):
            anchor = torch.empty(vector.elements)
            vector.read(0, vector.elements, anchor)
            work.restart_from(anchor * 1.5)  # not what the layers are built with

    def repeat(self, key: MicroBatchKey, given: Tensor, received: Tensor | None) -> None:
        self.found += [one for one in self.again().repeat(key, given, received) if one is not None]

    def again(self) -> StageCompute:
        return self.make(self.held, self.settings[self.held[0].number], self.loss)

    def contribute(self) -> None:
        for work in self.works:
            reader = work.contribution(torch.empty(0))
            out = torch.empty(reader.elements)
            reader.read(0, reader.elements, out)
            self.found.append(out)


def go_through(held: Held) -> list[Tensor]:
    """Compute several micro-batches at a time, from both entries, drop one, and repeat others' work."""
    first, generator = held.held[0].number, torch.Generator().manual_seed(3)
    jobs: list[tuple[StageCompute, MicroBatchKey, Tensor, list[int]]] = []
    for job, size in enumerate(SIZES * 2):
        entry = held.held[job % len(held.held)].number
        tokens = torch.randint(256, (size, 9), generator=generator)
        given = torch.randn((size, 8, 16), generator=generator) if entry else held.recipe.input_of(tokens)
        key = MicroBatchKey(0, 10 * job, 10 * job + size, job)
        output = held.computes[entry].forward(key, given)
        received = held.recipe.targets_of(tokens) if held.is_last else torch.randn((size, 8, 16), generator=generator)
        if output is not None:
            held.found.append(output)
        if job == 1:
            held.computes[entry].drop(key)
            continue
        granted = [stage.number for stage in held.held if stage.number >= entry]
        if job == 2:
            granted = granted[-1:]
        if job == 4:
            granted = []
        jobs.append((held.computes[entry], key, received, granted))
        if job == 3:
            try:
                held.computes[entry].backward(key, received[:1], granted)
            except WireError:
                held.found.append(torch.ones(1))
        if first:
            held.repeat(MicroBatchKey(0, key.start, key.stop, -1), given, received)
    for compute, key, received, granted in jobs:
        back = compute.backward(key, received, granted)
        held.found += [one for one in (back.input_gradient, back.loss) if one is not None]
    held.contribute()
    return held.found


def main() -> None:
    folder, rank, ranks, tensor_parallel, recompute, name = sys.argv[1:]
    torch.set_num_threads(1)
    init_process_group(folder, int(rank), int(ranks), on_gpus=False)
    shape = (int(ranks) // int(tensor_parallel), int(tensor_parallel))
    island = Island(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))
    run = parse_run_file(TOML)
    settings = run.recipe.settings if name == "gpt" else {"context": 8, "config": LLAMA}
    recipe: Any = find_recipe(name)(settings, DataSection(source="stdlib"), ())
    cuts = recipe.tensor_parallel() if name == "gpt" else {}
    if not island.leads:
        FollowingStages(island, run, recipe, CPU, cuts).serve()
        return
    differences = []
    lead = StageRanks(island, cuts)
    for span in ((0, 1), (2,)):
        alone = go_through(Held(run, recipe, span, None, recompute == "true"))
        together = go_through(Held(run, recipe, span, lead, recompute == "true"))
        lead.leave_span()
        assert len(alone) == len(together)
        differences.append(
            max(float((one - two).norm() / two.norm()) for one, two in zip(together, alone, strict=True) if two.norm())
        )
    lead.end()
    print(json.dumps({"differences": differences, "compared": len(alone)}))


if __name__ == "__main__":
    main()
