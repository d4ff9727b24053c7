"""An own training loop on a model of a given width: ``small_loop.py WIDTH INVITE FOLDER``; errors as ``shoal`` does."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.errors import ShoalError


def main(width: int, invite: str, folder: Path) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = SessionOptions(
        identity=folder / "identity",
        state=folder / "state",
        bind=("127.0.0.1", 0),
        on_event=lambda event: print(event["event"], flush=True),
    )
    try:
        with Session.join(invite, model=model, inner_optimizer=optimizer, options=options) as session:
            for features, targets in session.batches(dataset):
                loss = nn.functional.mse_loss(model(features), targets)
                loss.backward()
                session.step(loss)
    except ShoalError as error:
        print(f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
