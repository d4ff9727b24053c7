"""Held-out loss and bytes at equal tokens: one process on the global batch, against 4 peers in a swarm.

One process with AdamW on the global batch; ``virtual_batch`` (the same mathematics, spread over peers); ``diloco``
with several codecs; ``sparseloco`` at its published settings and at others. All at the same learning rate and over a
whole schedule: averaging seldom costs loss in the first rounds and some dozens of rounds win it back, so that a few
rounds say nothing. Bytes are what each peer really sent in bulk frames; float32 data-parallel's are the ring
all-reduce's 2 (N - 1) / N x 4 bytes x parameters for every step on the global batch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Trained, console, parser, publish, train_swarm
from torch import nn
from torch.optim import AdamW

from shoal.peer.exports.model_file import read_model
from shoal.peer.recipes import Recipe, load_recipe
from shoal.peer.training.data import SampleOrder
from shoal.peer.training.lr_schedule import lr_factor
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

PEERS = 4
BATCH = 8
CONTEXT = 64

RUN = """
algorithm = "{algorithm}"
[run]
name = "convergence"
seed = 1
tokens = {tokens}
[recipe]
name = "gpt"
settings = {{ layers = 2, width = 64, heads = 2, context = {context} }}
[inner]
lr = {lr}
weight_decay = 0.1
batch_samples = {batch}
[schedule]
kind = "cosine"
warmup_tokens = {warmup}
final_factor = 0.1
{settings}
[round]
tokens = {round_tokens}
max_s = 600
patience_s = 6
"""

ADAMW = '[outer]\noptimizer = "adamw"\nlr = {lr}\nbetas = [0.9, 0.95]\nweight_decay = 0.1'

VARIANTS = {
    "virtual_batch float32": ("virtual_batch", '[averaging]\ncodec = "float32"\n' + ADAMW),
    "diloco float32": ("diloco", '[averaging]\ncodec = "float32"'),
    "diloco int8": ("diloco", '[averaging]\ncodec = "int8"'),
    "diloco int4": ("diloco", '[averaging]\ncodec = "int4"'),
    "diloco auto": ("diloco", '[averaging]\ncodec = "auto"'),
    "sparseloco published": ("sparseloco", ""),
    "sparseloco tuned": (
        "sparseloco",
        '[averaging]\ncodec = {{ name = "topk", k = 256 }}\n[outer]\noptimizer = "nesterov"\nlr = 1.2\nmomentum = 0.5',
    ),
}
"""Name: algorithm, and what its run file has beside the common settings."""


def run_toml(name: str, steps: int, steps_a_round: int, lr: float) -> str:
    """All variants see ``steps`` global batches of ``PEERS * BATCH`` windows."""
    algorithm, settings = VARIANTS[name]
    step_tokens = PEERS * BATCH * CONTEXT
    return RUN.format(
        algorithm=algorithm,
        tokens=steps * step_tokens,
        context=CONTEXT,
        lr=lr,
        batch=BATCH,
        warmup=min(100, steps // 10) * step_tokens,
        settings=settings.format(lr=lr),
        round_tokens=steps_a_round * step_tokens,
    )


def train_alone(run: RunFile, recipe: Recipe) -> nn.Module:
    """One process, the whole global batch at every step: the optimizer that ``virtual_batch`` has as its outer one."""
    assert run.run.tokens is not None
    model = recipe.build_model(run.run.seed)
    outer = run.outer
    optimizer = AdamW(model.parameters(), outer.lr, outer.betas, outer.eps, outer.weight_decay)
    data = recipe.training_data()
    order = SampleOrder(len(data), run.run.seed)
    samples = PEERS * BATCH
    step_tokens = samples * recipe.tokens_per_sample
    for step in range(run.run.tokens // step_tokens):
        factor = lr_factor(run.schedule, run.run.tokens, step * step_tokens)
        optimizer.param_groups[0]["lr"] = outer.lr * factor
        loss = recipe.loss(model, data.batch(order.indices(step * samples, (step + 1) * samples)))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def row(name: str, loss: float, tokens: int, sent: float, ddp: float, trained: Trained | None) -> dict[str, Any]:
    return {
        "variant": name,
        "held-out loss": loss,
        "tokens": tokens,
        "rounds": trained.rounds if trained else 0,
        "MB sent a peer": sent / 1e6,
        "share of float32 data-parallel": sent / ddp if trained else 1.0,
        "parity": str(trained.parity) if trained else "-",
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=3200, help="steps on the global batch")
    arguments.add_argument("--inner-steps", type=int, default=40, help="between two rounds (H)")
    arguments.add_argument("--only", action="append", choices=VARIANTS, help="beside the one process; may be repeated")
    arguments.add_argument("--lr", type=float, default=4e-3)
    options = arguments.parse_args()
    torch.set_num_threads(1)

    alone = parse_run_file(run_toml("virtual_batch float32", options.steps, 1, options.lr))
    recipe = load_recipe(alone)
    console.print(f"one process: {options.steps} steps of {PEERS * BATCH * CONTEXT} tokens")
    model = train_alone(alone, recipe)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ddp = 2 * (PEERS - 1) / PEERS * 4 * parameters * options.steps
    single_loss = recipe.held_out_loss(model, "cpu")
    assert alone.run.tokens is not None
    rows = [row("one process, float32 data-parallel's bytes", single_loss, alone.run.tokens, ddp, ddp, None)]
    ratios: dict[str, float] = {}
    wanted = [variant for variant in VARIANTS if not options.only or variant in options.only]
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            algorithm, _ = VARIANTS[name]
            console.print(f"{name}: {PEERS} peers")
            steps_a_round = 1 if algorithm == "virtual_batch" else options.inner_steps
            toml = run_toml(name, options.steps, steps_a_round, options.lr)
            trained = train_swarm(toml, PEERS, Path(folder) / name.replace(" ", "-"), 3600)
            loss = recipe.held_out_loss(read_model(trained.model), "cpu")
            sent = sum(trained.bytes_sent) / len(trained.bytes_sent)
            rows.append(row(name, loss, trained.tokens, sent, ddp, trained))
            key = algorithm if algorithm == "virtual_batch" else name.replace(" ", "_")
            ratios[f"{key}_loss_vs_single"] = loss / single_loss
            ratios[f"{key}_bytes_vs_float32_ddp"] = sent / ddp
    publish(f"{parameters:,} parameters, {PEERS} peers", rows, ratios, options.json)


if __name__ == "__main__":
    main()
