"""Steps a second of Hugging Face's Trainer and of Lightning inside a run, beside the same script alone.

Both train the same model in one process, in turns, and the round is so long that none ends meanwhile: what is measured
is the price of leases, counting and heartbeats between rounds. Joining and the first steps are left out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import await_invite, comma, end_on_sigterm, parser, publish
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shoal.peer.demo.processes import Child
from shoal.peer.options import SessionOptions

RUN = """
algorithm = "diloco"
averaging.codec = "int8"
[run]
name = "{name}"
[recipe]
name = "own"
[data]
source = "own"
[inner]
batch_samples = {batch}
[round]
tokens = 1_000_000_000
max_s = 36_000
patience_s = 10
"""
BATCH, LENGTH, TOKENS = 4, 64, 256
_FIRST_STEPS = 3


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens, which a model learns as fast as others."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(TOKENS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, **sizes))


class Clock:
    """Seconds, and CPU seconds of this process, of each step."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, float]] = []

    def note(self) -> None:
        self._moments.append((time.perf_counter(), time.process_time()))

    def step(self) -> tuple[float, float]:
        """Return the median step's seconds, and the mean step's CPU seconds."""
        moments = self._moments[_FIRST_STEPS:]
        times = [after[0] - before[0] for before, after in pairwise(moments)]
        return median(times), (moments[-1][1] - moments[0][1]) / (len(moments) - 1)


def with_trainer(invite: str | None, options: SessionOptions, steps: int) -> Clock:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shoal.integrations.transformers import join

    clock = Clock()

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note()

    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    batches = {"per_device_train_batch_size": BATCH, "max_steps": steps, "logging_strategy": "no"}
    args = TrainingArguments(str(options.state.parent / "output"), **{**quiet, **batches})
    trainer = Trainer(make_model(), args, train_dataset=Texts(), callbacks=[Ticks()])
    with join(trainer, invite, options) if invite else nullcontext():
        trainer.train()
    return clock


def with_lightning(invite: str | None, options: SessionOptions, steps: int) -> Clock:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from shoal.integrations.lightning import RunCallback

    clock = Clock()

    class Ticks(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            clock.note()

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module = make_model()

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-5)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callbacks: list[Any] = [RunCallback(invite, options)] if invite else []
    loader: Any = DataLoader(Texts(), BATCH, shuffle=True)
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, callbacks=[*callbacks, Ticks()], enable_model_summary=False, **quiet
    )
    trainer.fit(Module(), callbacks[0].leased(loader) if invite else loader)
    return clock


KINDS: dict[str, Callable[[str | None, SessionOptions, int], Clock]] = {
    "Trainer": with_trainer,
    "Lightning": with_lightning,
}


def measure(kind: str, turns: int, steps: int, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Return the rows of a framework, and the median ratio of the steps a second: in a run over alone."""
    run_file = folder / "run.toml"
    run_file.write_text(RUN.format(name=kind.lower(), batch=BATCH))
    host = Child(
        "host", folder / "host", ["host", str(run_file), "--bind", "127.0.0.1:0", "--no-supervisor", "--no-keep-model"]
    )
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "in a run": []}
    try:
        invite = await_invite(host, time.monotonic() + 120)
        options = SessionOptions(folder / "identity", folder / "state", bind=("127.0.0.1", 0), checkpoints=None)
        for turn in range(turns):
            for where in ("alone", "in a run") if turn % 2 == 0 else ("in a run", "alone"):
                clock = KINDS[kind](invite if where == "in a run" else None, options, steps)
                found[where].append(clock.step())
    finally:
        host.ask_to_end()
        host.end()
    rows = [
        {
            "framework": kind,
            "where": where,
            "steps/s": 1 / median(one[0] for one in each),
            "CPU s a step": median(one[1] for one in each),
        }
        for where, each in found.items()
    ]
    ratios = [alone[0] / inside[0] for alone, inside in zip(found["alone"], found["in a run"], strict=True)]
    return rows, median(ratios)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kinds", type=comma(str), default=list(KINDS))
    options.add_argument("--turns", type=int, default=6)
    options.add_argument("--steps", type=int, default=40)
    chosen = options.parse_args()
    end_on_sigterm()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float | None] = {}
    for kind in chosen.kinds:
        with tempfile.TemporaryDirectory() as folder:
            of_kind, ratio = measure(kind, chosen.turns, chosen.steps, Path(folder))
        rows += of_kind
        ratios[f"steps/s in a run over alone, {kind}"] = ratio
    publish("Frameworks inside of a run", rows, ratios, chosen.json)


if __name__ == "__main__":
    main()
