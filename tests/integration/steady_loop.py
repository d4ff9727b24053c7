"""An own training loop that does not depend on time: ``steady_loop.py INVITE FOLDER VERSION BIND`` trains the same four
batches a round and leaves at that anchor version. It draws from every random generator."""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from shoal.peer.network_thread import Interrupted
from shoal.peer.options import SessionOptions
from shoal.peer.session import Readiness, Session
from shoal.swarm.protocol.addresses import split_host_port

BATCH, BATCHES = 8, 4


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        noise = 0.1 * float(np.random.standard_normal()) + random.gauss(0.0, 0.1) + 0.1 * torch.randn(x.shape)
        return self.layers(x + noise)  # type: ignore[no-any-return]


def main(invite: str, folder: Path, version: int, bind: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    inputs = torch.randn(4096, 8)
    targets = inputs.sum(1, keepdim=True)
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = SessionOptions(folder / "identity", folder / "state", bind=split_host_port(bind))
    with Session.join(invite, model=model, inner_optimizer=optimizer, options=options) as session:
        samples = session.samples
        while session.view.anchor_version < version:
            if session.settle() is not Readiness.READY:
                continue
            missing = BATCH * BATCHES - samples.in_round
            if missing <= 0:
                try:
                    session.wait_for_change()
                except Interrupted:
                    break
            elif (bounds := samples.next_batch(BATCH)) is None:
                session.fetch_lease(missing)
            else:
                at = slice(*bounds)
                loss = nn.functional.mse_loss(model(inputs[at]), targets[at])
                loss.backward()  # type: ignore[no-untyped-call]
                session.step(loss)
        state = session._replica.state
        assert state is not None
        print(f"version {state.version} {state.digest.hex()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
