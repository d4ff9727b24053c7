"""The Trainer inside of a run: it trains for real, on a session without a network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.peer.memory_session import Exchanges, Loop
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from shoal.integrations.transformers import check, join
from shoal.peer.session import Session
from shoal.peer.training.data import run_order
from shoal.swarm.errors import UserError

RUN = "inner.batch_samples = 4\nschedule.warmup_tokens = 100"


class Line(nn.Module):
    """A model of one weight, which notes the samples that it has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def forward(self, number: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen += number.tolist()
        return {"loss": (self.weight - labels).square().mean()}


class Lines(torch.utils.data.Dataset[dict[str, float]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"number": index, "labels": index / 48}


def make_trainer(tmp_path: Path, **settings: Any) -> Trainer:
    plain = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.1}
    args = TrainingArguments(str(tmp_path), **{**plain, **batches, "logging_steps": 1, **settings})
    return Trainer(Line(), args, train_dataset=Lines(), eval_dataset=Lines())


class InMemory(Loop):
    """A session that a trainer joins, and that stops when there are no more leases."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, leases: int) -> None:
        super().__init__(RUN)
        self.leases = leases
        session: Any = self.session
        session.start_own_loop = lambda model, optimizer: self.started.append(optimizer)
        session._close = lambda error: None
        session.fetch_lease = self._lease_or_stop
        self.started: list[torch.optim.Optimizer] = []
        monkeypatch.setattr(Session, "connect", lambda *_: session)

    def _lease_or_stop(self, samples: int) -> None:
        if len(self.asked) >= self.leases:
            self.session.request_stop()
        self._lease(samples)


def test_a_trainer_trains_on_leased_samples_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 samples in 8 steps of two batches each, over the border of an epoch of 48."""
    loop, trainer = InMemory(monkeypatch, leases=4), make_trainer(tmp_path)
    arguments = trainer.args.to_dict()
    loop.view.tokens_in_round = 10
    with join(trainer, "invite") as session:
        assert session is loop.session
        result = trainer.train()
    order = run_order(loop.run, range(48), 1)
    assert isinstance(trainer.model, Line)
    assert trainer.model.seen == order.indices(0, 64).tolist()
    assert result.global_step == 8
    assert loop.samples.in_round == 64
    assert len(loop.started) == 1
    logs = [one for one in trainer.state.log_history if "loss" in one]
    assert loop.samples.mean_loss() == pytest.approx(sum(one["loss"] for one in logs) / 8, rel=1e-3)
    assert [one["learning_rate"] for one in logs] == pytest.approx([0.1 * (0.01 + 0.99 * 0.1)] * 8), "the run's warm-up"
    assert not {"get_train_dataloader", "training_step"} & set(vars(trainer))
    assert trainer.args.to_dict() == arguments


def test_a_trainer_on_its_own_data_stops_at_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, trainer = InMemory(monkeypatch, leases=100), make_trainer(tmp_path, max_steps=9)
    loop.view.phase = "closing"
    with join(trainer, "invite", own_data=True):
        assert trainer.train().global_step == 9
        with pytest.raises(UserError, match="has trained already: join again"):
            trainer.train()
    assert isinstance(trainer.model, Line)
    assert sorted(trainer.model.seen[:48]) == list(range(48)), "an epoch in the trainer's own order"
    assert loop.samples.in_round == 9 * 8


def test_an_evaluation_takes_part_in_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges = Exchanges(InMemory(monkeypatch, leases=4))
    trainer = make_trainer(tmp_path, eval_strategy="steps", eval_steps=6, per_device_eval_batch_size=24)
    with join(trainer, "invite"):
        trainer.train()
    assert exchanges.did == ["offer", "offer", "conclude"], "two batches, and their end"


class Predicting(TrainerCallback):
    """Predicts after the second step, and notes the steps."""

    def __init__(self, did: list[str]) -> None:
        self.did = did
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.did.append("step")
        if state.global_step == 2:
            self.trainer.predict(self.trainer.eval_dataset)


def test_predictions_in_a_training_do_not_leave_a_round_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step would change the model that the others still fetch."""
    exchanges = Exchanges(InMemory(monkeypatch, leases=3))
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=24)
    callback = Predicting(exchanges.did)
    callback.trainer = trainer
    trainer.add_callback(callback)
    with join(trainer, "invite"):
        trainer.train()
    assert exchanges.did[:6] == ["step", "step", "offer", "offer", "conclude", "step"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
            "load_best_model_at_end",
        ),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, "eval_steps = 0.5 is a share of a training whose length only"),
        ({"save_strategy": "steps", "save_steps": 0.1}, "save_steps = 0.1 is a share"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"this trainer cannot train in a run: {sentence}"):
        check(make_trainer(tmp_path, **settings))


def test_more_than_one_device_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    check(trainer)
    trainer.args._n_gpu = 2
    with pytest.raises(UserError, match="set CUDA_VISIBLE_DEVICES to one of them"):
        check(trainer)


class Stream(torch.utils.data.IterableDataset[dict[str, float]]):
    def __iter__(self) -> Any:
        return iter(Lines())


def test_a_stream_is_trained_on_as_own_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def streaming(**settings: Any) -> Trainer:
        trainer = make_trainer(tmp_path, **settings)
        trainer.train_dataset = Stream()
        return trainer

    with pytest.raises(UserError, match="a stream and the arguments have no max_steps"):
        check(streaming(max_steps=-1), own_data=True)
    loop = InMemory(monkeypatch, leases=4)
    trainer = streaming(max_steps=3)
    with join(trainer, "invite"), pytest.raises(UserError, match="the training data is a stream"):
        trainer.train()
    trainer = streaming(max_steps=3)
    with join(trainer, "invite", own_data=True):
        trainer.train()
    assert loop.samples.in_round == 3 * 8


def test_an_order_with_a_meaning_is_not_dropped_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    InMemory(monkeypatch, leases=4)
    trainer = make_trainer(tmp_path, max_steps=3)
    monkeypatch.setattr(
        trainer, "_get_train_sampler", lambda *_: torch.utils.data.WeightedRandomSampler([1.0] * 48, 48)
    )
    with (
        join(trainer, "invite"),
        pytest.raises(UserError, match="has a WeightedRandomSampler, whose order would be lost"),
    ):
        trainer.train()


def test_a_virtual_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = InMemory(monkeypatch, leases=4)
    session: Any = loop.session
    session.run_file = Loop("algorithm = 'virtual_batch'").run
    with pytest.raises(UserError, match="no member steps an optimizer"), join(make_trainer(tmp_path), "invite"):
        pass
