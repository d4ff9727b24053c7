"""Lightning in a swarm: the classifier of ``own_loop.py``, in the same kind of run.

pip install -c constraints.txt '.[lightning,examples]'
shoal host examples/digits.toml                     # prints the invite
python examples/digits_lightning.py 'shoal://…'     # on as many machines as you like; --fabric: a loop with Fabric
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from own_loop import load, make_model  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shoal.integrations.lightning import RunCallback
from shoal.peer.options import SHOAL_HOME, SessionOptions
from shoal.peer.session import Session


class Digits(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def with_trainer(invite: str, options: SessionOptions) -> nn.Module:
    dataset, _, _ = load()
    module, run = Digits(), RunCallback(invite, options)
    trainer = Trainer(callbacks=[run], logger=False, enable_checkpointing=False)
    trainer.fit(module, run.leased(DataLoader(dataset, batch_size=32, shuffle=True)))
    return module


def with_fabric(invite: str, options: SessionOptions) -> nn.Module:
    dataset, _, _ = load()
    fabric = Fabric(devices=1)
    fabric.launch()
    module = Digits()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    # The session takes module and optimizer as they were before Fabric wrapped them.
    with Session.join(invite, model=module, inner_optimizer=optimizer.optimizer, options=options) as session:
        for images, labels in map(fabric.to_device, session.loader(dataset)):
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            session.stepped(len(images), loss)
    return module


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("invite")
    arguments.add_argument("--fabric", action="store_true")
    arguments.add_argument("--identity", type=Path, default=SHOAL_HOME / "identity")
    arguments.add_argument("--state", type=Path, default=SHOAL_HOME / "runs")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    train = with_fabric if options.fabric else with_trainer
    model = train(options.invite, SessionOptions(identity=options.identity, state=options.state))
    _, images, labels = load()
    with torch.no_grad():
        right = (model.cpu()(images).argmax(1) == labels).float().mean()
    print(f"{float(right):.1%} of the test images are recognised")


if __name__ == "__main__":
    main()
