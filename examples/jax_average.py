"""A JAX training loop in a swarm: a small network learns two interleaved spirals, every member with points of its own.

    pip install 'shoal[jax]'
    shoal host examples/values.toml                     # prints the invite
    python examples/jax_average.py 'shoal://…'          # on as many machines as you like, whenever you like

Several on one machine need their own identities and data: --identity a.id --seed 1, --identity b.id --seed 2, …
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from shoal.peer.array_averager import ArrayAverager
from shoal.peer.options import SHOAL_HOME, SessionOptions

STEPS, BATCH, WIDTH = 20, 50, 32

Weights = list[dict[str, jax.Array]]


def spirals(rng: np.random.Generator, points: int) -> tuple[jax.Array, jax.Array]:
    """(points, 2) float32 positions, and (points,) labels 0 or 1."""
    label = rng.integers(0, 2, points)
    turn = rng.uniform(0.5, 2.0, points) * np.pi
    angle = turn + np.pi * label
    place = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) + rng.normal(0, 0.15, (points, 2))
    return jnp.asarray(place, jnp.float32), jnp.asarray(label, jnp.float32)


def make_weights(rng: np.random.Generator) -> Weights:
    sizes = [2, WIDTH, WIDTH, 1]
    return [
        {"w": jnp.asarray(rng.normal(0, n**-0.5, (n, m)), jnp.float32), "b": jnp.zeros(m)} for n, m in pairwise(sizes)
    ]


def logits(weights: Weights, place: jax.Array) -> jax.Array:
    for layer in weights[:-1]:
        place = jnp.tanh(place @ layer["w"] + layer["b"])
    return (place @ weights[-1]["w"] + weights[-1]["b"])[:, 0]


def loss(weights: Weights, place: jax.Array, label: jax.Array) -> jax.Array:
    score = logits(weights, place)
    return jnp.mean(jnp.logaddexp(0, score) - label * score)


def step(weights: Weights, place: jax.Array, label: jax.Array) -> Weights:
    gradients = jax.grad(loss)(weights, place, label)
    stepped: Weights = jax.tree.map(lambda one, gradient: one - 0.3 * gradient, weights, gradients)
    return stepped


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("invite")
    arguments.add_argument("--identity", type=Path, default=SHOAL_HOME / "identity")
    arguments.add_argument("--state", type=Path, default=SHOAL_HOME / "runs")
    arguments.add_argument("--seed", type=int, default=0, help="of this member's data")
    options = arguments.parse_args()

    rng, test = np.random.default_rng(options.seed), spirals(np.random.default_rng(123), 1000)
    compiled, weights = jax.jit(step), make_weights(np.random.default_rng(7))
    where = SessionOptions(identity=options.identity, state=options.state)
    with ArrayAverager.join(options.invite, weights, where) as averager:
        if averager.values is not None:  # others have trained already
            weights = averager.values
        while weights is not None:
            right = jnp.mean((logits(weights, test[0]) > 0) == (test[1] > 0.5))
            print(f"right {100 * right:.1f} %", flush=True)
            for _ in range(STEPS):
                weights = compiled(weights, *spirals(rng, BATCH))
            weights = averager.average_values(weights, weight=STEPS * BATCH)


if __name__ == "__main__":
    main()
