"""Lightning's Trainer inside of a run: it trains for real, on a session without a network."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tests.peer.memory_session import Exchanges, Loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from shoal.integrations.lightning import RunCallback
from shoal.peer.session import Session
from shoal.peer.training.data import run_order
from shoal.swarm.errors import UserError

RUN = "inner.batch_samples = 4\nschedule.warmup_tokens = 100"
DATA = TensorDataset(torch.arange(48.0).unsqueeze(1))


class Line(LightningModule):
    """A model of one weight, which notes samples and learning rates."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.number = optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        self.seen += batch[0].flatten().int().tolist()
        loss = (self.weight - batch[0] / 48).square().mean()
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.number)]
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 1)]


def make_trainer(*callbacks: Any, **settings: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", callbacks=list(callbacks), enable_model_summary=False, **quiet, **settings)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A run of 64 samples."""
    loop = Loop(RUN)
    loop.leases = 4
    session: Any = loop.session
    session.start_own_loop = lambda model, optimizer: None
    session._close = lambda error: setattr(loop, "error", error)

    def lease(samples: int) -> None:
        if len(loop.asked) >= 4:
            loop.session.request_stop()
        loop._lease(samples)

    session.fetch_lease = lease
    monkeypatch.setattr(Session, "connect", lambda *_: session)
    return loop


def test_lightning_trains_on_leased_samples_until_the_run_ends(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.view.tokens_in_round = 10
    exchanges = Exchanges(loop)
    run, module = RunCallback("invite"), Line()
    trainer = make_trainer(run, accumulate_grad_batches=2, gradient_clip_val=1.0, val_check_interval=6)
    trainer.fit(module, run.leased(DataLoader(DATA, 4, shuffle=True)), DataLoader(DATA, 24))
    assert module.seen == run_order(loop.run, range(48), 1).indices(0, 64).tolist()
    assert (trainer.global_step, loop.samples.in_round) == (8, 64)
    assert loop.samples.mean_loss() == pytest.approx(sum(module.losses) / 16)
    assert module.rates == pytest.approx([0.1 * (0.01 + 0.99 * 0.1)] * 8), (
        "the run's warm-up, not the module's schedule"
    )
    assert "the schedulers of configure_optimizers have no effect" in caplog.text
    assert exchanges.did[:3] == ["offer", "offer", "conclude"]
    assert vars(loop)["error"] is None


def test_what_cannot_work_is_refused(loop: Loop) -> None:
    run = RunCallback("invite")
    with pytest.raises(UserError, match=r"has not got its training data by RunCallback\.leased"):
        make_trainer(run).fit(Line(), DataLoader(DATA, 4))
    assert isinstance(vars(loop)["error"], UserError)
    with pytest.raises(UserError, match="it has 2 optimizers, and a member has one"):
        make_trainer(run).fit(Line(2), run.leased(DataLoader(DATA, 4)))
    with pytest.raises(UserError, match="has a WeightedRandomSampler, whose order would be lost"):
        run.leased(DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 48, 48)))
    with pytest.raises(UserError, match="give the loader a batch_size"):
        run.leased(DataLoader(DATA, batch_size=None))
