"""Averaging only, in a loop of any framework: linear regression by NumPy, every member with data of its own.

    shoal host examples/average.toml                    # prints the invite
    python examples/numpy_average.py 'shoal://…'        # on as many machines as you like

Several on one machine need their own identities: --identity a.id, --identity b.id, …
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from shoal.peer.array_averager import ArrayAverager
from shoal.peer.options import SHOAL_HOME, SessionOptions

SAMPLES, INPUTS = 256, 20
TRUE = np.linspace(-1.0, 1.0, INPUTS)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("invite")
    arguments.add_argument("--identity", type=Path, default=SHOAL_HOME / "identity")
    arguments.add_argument("--state", type=Path, default=SHOAL_HOME / "runs")
    arguments.add_argument("--seed", type=int, default=0, help="of this member's data")
    options = arguments.parse_args()

    random = np.random.default_rng(options.seed)
    weights = np.zeros(INPUTS)
    where = SessionOptions(identity=options.identity, state=options.state)
    with ArrayAverager.join(options.invite, {"gradient": weights}, where) as averager:
        while True:
            inputs = random.normal(size=(SAMPLES, INPUTS))
            targets = inputs @ TRUE + random.normal(size=SAMPLES)
            gradient = inputs.T @ (inputs @ weights - targets) / SAMPLES
            means = averager.average({"gradient": gradient}, weight=SAMPLES)
            if means is None:
                break
            weights = weights - 0.5 * means["gradient"]
            print(f"error {np.abs(weights - TRUE).max():.3f}", flush=True)


if __name__ == "__main__":
    main()
