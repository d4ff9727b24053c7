"""An own training loop in a swarm: a classifier of handwritten digits (scikit-learn's, 8x8 pixels).

    shoal host examples/digits.toml                     # prints the invite
    python examples/own_loop.py 'shoal://…'             # on as many machines as you like

Several on one machine need their own identities: --identity a.id, --identity b.id, …
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.peer.options import SHOAL_HOME, SessionOptions
from shoal.peer.session import Session


def load() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """1,500 images to train on; the other 297 and their labels to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), images[1500:], labels[1500:]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("invite")
    arguments.add_argument("--identity", type=Path, default=SHOAL_HOME / "identity")
    arguments.add_argument("--state", type=Path, default=SHOAL_HOME / "runs")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    dataset, test_images, test_labels = load()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    where = SessionOptions(identity=options.identity, state=options.state, on_event=print)
    with Session.join(options.invite, model=model, inner_optimizer=optimizer, options=where) as session:
        for images, labels in session.batches(dataset):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            session.step(loss)
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).float().mean()
    print(f"{float(right):.1%} of the test images are recognised")


if __name__ == "__main__":
    main()
