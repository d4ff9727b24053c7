"""Reference of a run with virtual batches: one process, one optimizer, the batches in order."""

import torch
from torch import Tensor

from shoal.peer.recipes import load_recipe
from shoal.peer.training.data import SampleOrder
from shoal.swarm.protocol.run_file import parse_run_file


def plain_loop(toml: str, rounds: int, batch: int) -> dict[str, Tensor]:
    """Return the parameters after so many rounds of ``batch`` samples, by name, in the model's order. The run's outer
    optimizer is AdamW with ``lr = 2e-3`` and ``weight_decay = 0.01``."""
    run = parse_run_file(toml)
    recipe = load_recipe(run)
    model, data = recipe.build_model(run.run.seed), recipe.training_data()
    order = SampleOrder(len(data), run.run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for number in range(rounds):
        samples = data.batch(order.indices(number * batch, (number + 1) * batch))
        optimizer.zero_grad()
        recipe.loss(model, samples).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
