"""Training scripts of frameworks in a run: ``framework_loop.py KIND INVITE FOLDER``; errors as ``shoal`` does.

Events go to ``FOLDER/events.jsonl``; the last one, ``trained``, says what the framework has seen. INVITE may be
``alone``: the same script without Shoal, for as many steps as the environment's ``STEPS`` says."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.errors import ShoalError

os.environ["HF_HUB_OFFLINE"] = "1"
LR = 5e-3
WORDS = ("reef", "shoal", "tide", "coral", "wave", "sand", "moon", "salt")


class Report:
    """Events of this process, in a file. ``options``: of the session."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "events.jsonl").open("a")
        self.options = SessionOptions(
            folder / "identity", folder / "state", bind=("127.0.0.1", 0), on_event=lambda event: self.say(**event)
        )

    def say(self, **event: Any) -> None:
        print(json.dumps(event, default=str), file=self._file, flush=True)


def stop_on_signals(session: Session | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: session.request_stop() if session else None)


# Hugging Face ---------------------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    """Make a tokenizer of bytes, of which nothing has to be downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {one: number for number, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab={**letters, "<|end|>": 256, "<|pad|>": 257}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>")


def make_causal_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=64, eos_token_id=256, **sizes))


def sentences(number: int) -> list[str]:
    return [f"{WORDS[one % 8]} {WORDS[one * 3 // 8 % 8]} {one % 10}" for one in range(number)]


def supervised(lora: bool, more: dict[str, Any]) -> Callable[[str, Report], None]:
    """TRL's trainer with accumulation, evaluation, clipping, gradient checkpointing and bf16 autocast, its defaults."""

    def train(invite: str, report: Report) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer

        from shoal.integrations.transformers import join

        alone = invite == "alone"
        settings = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": LR,
            "lr_scheduler_type": "constant",
            "max_length": 32,
            "logging_steps": 5,
            "eval_strategy": "steps",
            "eval_steps": 10,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "max_steps": int(os.environ["STEPS"]) if alone else -1,
            **more,
        }
        folder = report.options.state.parent
        trainer = SFTTrainer(
            model=make_causal_model(),
            args=SFTConfig(output_dir=str(folder / "output"), **settings),
            train_dataset=Dataset.from_dict({"text": sentences(512)}),
            eval_dataset=Dataset.from_dict({"text": sentences(16)}),
            processing_class=make_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules="all-linear", lora_alpha=16) if lora else None,
        )
        frozen = [one.detach().clone() for one in trainer.model.parameters() if not one.requires_grad]
        with nullcontext() if alone else join(trainer, invite, report.options) as session:
            stop_on_signals(session)
            result = trainer.train(resume_from_checkpoint=more.get("save_strategy") == "steps" and has_saved(folder))
            after = [one for one in trainer.model.parameters() if not one.requires_grad]
            assert all(map(torch.equal, frozen, after))
            trainer.save_model(str(folder / "saved"))
            loss = trainer.evaluate()["eval_loss"]
        rates = [one["learning_rate"] for one in trainer.state.log_history if "learning_rate" in one]
        evaluations = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
        report.say(event="trained", steps=result.global_step, loss=loss, rates=rates, evaluations=evaluations)

    return train


def has_saved(folder: Path) -> bool:
    return any((folder / "output").glob("checkpoint-*"))


# Lightning ------------------------------------------------------------------------------------------------------


def sums(number: int = 512) -> TensorDataset:
    inputs = torch.randn(number, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Small(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]


def make_small() -> Small:
    """Make the model, whose names are the same in a Lightning module."""
    torch.manual_seed(0)
    return Small(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))


def with_lightning(invite: str, report: Report) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from shoal.integrations.lightning import RunCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_small().net
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            inputs, targets = batch
            return F.mse_loss(self.net(inputs), targets)

        def validation_step(self, batch: list[Tensor], number: int) -> None:
            self.losses.append(float(self.training_step(batch, number)))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    alone = invite == "alone"
    run, module, loader = RunCallback(invite, report.options), Module(), DataLoader(sums(), 8, shuffle=True)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[] if alone else [run],
        max_steps=int(os.environ["STEPS"]) if alone else -1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    signal.signal(signal.SIGINT, lambda *_: run.session.request_stop())
    trainer.fit(module, loader if alone else run.leased(loader), DataLoader(sums(32), 8))
    report.say(event="trained", steps=trainer.global_step, loss=module.losses[-1], evaluations=module.losses)


def with_fabric(invite: str, report: Report) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    module = make_small()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=LR))
    steps, loss = 0, torch.zeros(())
    with Session.join(invite, model=module, inner_optimizer=optimizer.optimizer, options=report.options) as session:
        stop_on_signals(session)
        for inputs, targets in session.loader(sums(), batch_size=8):
            loss = F.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.stepped(len(inputs), loss)
            steps += 1
    report.say(event="trained", steps=steps, loss=float(loss))


KINDS: dict[str, Callable[[str, Report], None]] = {
    "full": supervised(False, {}),
    "resumed": supervised(False, {"save_strategy": "steps", "save_steps": 10}),
    "lora": supervised(True, {}),
    "lightning": with_lightning,
    "fabric": with_fabric,
}


def main(kind: str, invite: str, folder: Path) -> int:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    try:
        KINDS[kind](invite, Report(folder))
    except ShoalError as error:
        print(f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
