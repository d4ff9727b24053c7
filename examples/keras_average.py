"""A Keras model in a swarm, by a callback of ``model.fit``: handwritten digits (scikit-learn's, 8x8 pixels).

    pip install 'shoal[keras,examples]'                 # Keras on torch; KERAS_BACKEND names another one
    shoal host examples/values.toml                     # prints the invite
    python examples/keras_average.py 'shoal://…'        # on as many machines as you like, whenever you like

Several on one machine need their own identities and data: --identity a.id --seed 1, --identity b.id --seed 2, …
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # before keras is imported

import keras
import numpy as np
from sklearn.datasets import load_digits

from shoal.peer.array_averager import ArrayAverager
from shoal.peer.options import SHOAL_HOME, SessionOptions

BATCH, BATCHES = 25, 40


class Averaging(keras.callbacks.Callback):  # type: ignore[misc]
    """Move the model to the mean of all members' models after each epoch, until the run ends."""

    def __init__(self, averager: ArrayAverager) -> None:
        super().__init__()
        self.averager = averager

    def on_train_begin(self, logs: Any = None) -> None:
        if self.averager.values is not None:  # others have trained already
            self.model.set_weights(self.averager.values)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weights = self.averager.average_values(self.model.get_weights(), weight=BATCH * BATCHES)
        if weights is None:
            self.model.stop_training = True
        else:
            self.model.set_weights(weights)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("invite")
    arguments.add_argument("--identity", type=Path, default=SHOAL_HOME / "identity")
    arguments.add_argument("--state", type=Path, default=SHOAL_HOME / "runs")
    arguments.add_argument("--seed", type=int, default=0, help="of this member's data and first weights")
    options = arguments.parse_args()

    keras.utils.set_random_seed(options.seed)
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target
    mine = np.random.default_rng(options.seed).choice(1500, BATCH * BATCHES, replace=False)
    model = keras.Sequential(
        [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    model.build((None, 8, 8))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    where = SessionOptions(identity=options.identity, state=options.state)
    with ArrayAverager.join(options.invite, model.get_weights(), where) as averager:
        showing = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: print(
                f"right {100 * model.evaluate(images[1500:], labels[1500:], verbose=0)[1]:.1f} %", flush=True
            )
        )
        model.fit(
            images[mine],
            labels[mine],
            batch_size=BATCH,
            epochs=10**6,
            verbose=0,
            callbacks=[Averaging(averager), showing],
        )


if __name__ == "__main__":
    main()
