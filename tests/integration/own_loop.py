"""Training loops of one's own, as people write them: ``own_loop.py KIND INVITE FOLDER``; errors as ``shoal`` does.

Events go to ``FOLDER/events.jsonl``; the last one, ``trained``, has the indices of all samples that were counted.
"""

import itertools
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.errors import ShoalError

BASE_LR = 0.02


class Sums:
    """Eight numbers, their sum, and the sample's index; so many samples that no epoch ends."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum(0, keepdim=True), index


def make_model(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    """Make the model; ``LayerNorm`` takes batches of a single sample, too."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), norm(16), nn.Tanh(), nn.Linear(16, 1))


class LowRank(nn.Module):
    """A frozen linear layer and a trainable update of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 8)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(self.base.weight.dtype)).float()
        return base + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


def make_adapted(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a model with a base of this seed, whose values fit into bfloat16, in this type, and a float32 adapter."""
    torch.manual_seed(seed)
    base = nn.Linear(8, 16).bfloat16().to(dtype)
    torch.manual_seed(1)
    return nn.Sequential(LowRank(base), nn.Tanh(), nn.Linear(16, 1))


class Loop:
    """One loop. ``trained``: indices of the samples that were counted; ``committed``: the newest such round."""

    def __init__(self, model: nn.Module, invite: str, folder: Path) -> None:
        self.model = model
        trainable = [one for one in model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, lr=BASE_LR)
        self.dataset = Sums()
        self.trained: list[int] = []
        self.committed = -1
        self._events = (folder / "events.jsonl").open("a")
        options = SessionOptions(
            folder / "identity", folder / "state", bind=("127.0.0.1", 0), on_event=lambda event: self.report(**event)
        )
        self.session = Session.join(invite, model=model, inner_optimizer=self.optimizer, options=options)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.session.request_stop())

    def report(self, **event: Any) -> None:
        if event["event"] == "committed":
            self.committed = event["round"]
        print(json.dumps(event, default=str), file=self._events, flush=True)

    def run(self, train: Callable[["Loop"], None]) -> None:
        with self.session:
            train(self)
            self.report(event="trained", indices=self.trained)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, targets, _ = batch
        dtype = next(self.model.parameters()).dtype
        return F.mse_loss(self.model(inputs.to(dtype)).float(), targets)

    def count(self, indices: Tensor) -> None:
        self.trained += indices.tolist()


def simple(loop: Loop) -> None:
    for batch in loop.session.batches(loop.dataset):
        loss = loop.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        loop.count(batch[2])
        loop.session.step(loss)


def scaled(loop: Loop) -> None:
    """Loss scaling, with gradients of the first batch that overflow, so that its step is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=10**6)
    skipped = 0
    for number, batch in enumerate(loop.session.batches(loop.dataset)):
        loss = loop.loss(batch)
        scale = scaler.get_scale()
        scaler.scale(loss * (1.0 if number else 2.0**100)).backward()
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        scaler.step(loop.optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        loop.optimizer.zero_grad()
        loop.count(batch[2])
        loop.session.stepped(len(batch[2]), loss)
    loop.report(event="scaled", skipped=skipped)


def accumulated(loop: Loop) -> None:
    """Three batches a step, the last of which may be smaller."""
    indices: list[Tensor] = []
    for number, batch in enumerate(loop.session.batches(loop.dataset), 1):
        loss = loop.loss(batch)
        (loss / 3).backward()  # type: ignore[no-untyped-call]
        indices.append(batch[2])
        if number % 3 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.count(torch.cat(indices))
            loop.session.stepped(sum(map(len, indices)), loss)
            indices = []


def scheduled(loop: Loop) -> None:
    """A scheduler that halves the learning rate in every step down to 0, and checks each step's length."""
    halves = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 0.5**step if step < 20 else 0.0)
    rates = []
    for step, batch in enumerate(loop.session.batches(loop.dataset)):
        loss = loop.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        weight = loop.model[0].weight  # type: ignore[index]
        rate = BASE_LR * (0.5**step if step < 20 else 0.0)
        expected = weight.detach() - rate * weight.grad
        loop.count(batch[2])
        rounds = loop.session.view.round
        with torch.no_grad():
            stepping = StepWatch(loop.optimizer, weight)
            loop.session.step(loss)
        torch.testing.assert_close(stepping.after, expected)
        rates.append(rate)
        halves.step()
        loop.report(event="rate", rate=rate, round=rounds)


def watched(loop: Loop) -> None:
    """Reports a parameter's values in the anchor, after the last step of each round, and in the next anchor."""
    weight = loop.model[0].weight  # type: ignore[index]
    anchor, seen = weight.detach().clone(), loop.committed
    for batch in loop.session.batches(loop.dataset):
        if loop.committed != seen:  # a round has ended between two steps
            anchor, seen = weight.detach().clone(), loop.committed
        loss = loop.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        loop.count(batch[2])
        stepping = StepWatch(loop.optimizer, weight)
        loop.session.step(loss)
        if loop.committed != seen:
            values = {"anchor": anchor, "local": stepping.after, "next": weight.detach()}
            lists = {name: one.flatten().tolist() for name, one in values.items()}
            loop.report(event="watched", round=loop.committed, **lists)
            anchor, seen = weight.detach().clone(), loop.committed


def idle(loop: Loop) -> None:
    """A learning rate of 0: the work is nothing."""
    loop.optimizer.param_groups[0]["lr"] = 0.0
    simple(loop)


class StepWatch:
    """Value of a parameter right after the optimizer's next step, before a round may change it. ``after``: that."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        self.after = torch.empty(0)

        def note(*_: object) -> None:
            self.after = parameter.detach().clone()
            hook.remove()

        hook = optimizer.register_step_post_hook(note)


def fetched_ahead(loop: Loop) -> None:
    """The next batches are fetched before a step, as accelerate and transformers do."""
    for batch in ahead(loop.session.batches(loop.dataset), 2):
        loss = loop.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        loop.count(batch[2])
        loop.session.step(loss)


def ahead(batches: Iterable[Any], number: int) -> Iterator[Any]:
    source = iter(batches)
    waiting = list(itertools.islice(source, number))
    for batch in source:
        waiting.append(batch)
        yield waiting.pop(0)
    yield from waiting


def collate(samples: list[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    inputs, targets, indices = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets), torch.tensor(indices)


def loaded(loop: Loop) -> None:
    batches = loop.session.loader(loop.dataset, batch_size=24, num_workers=2, collate_fn=collate)
    for batch in batches:
        loss = loop.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.count(batch[2])
        loop.session.stepped(len(batch[2]), loss)


def loaded_for_a_virtual_batch(loop: Loop) -> None:
    for batch in loop.session.loader(loop.dataset, num_workers=2, collate_fn=collate):
        loss = loop.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        loop.count(batch[2])
        loop.session.step(loss)


def distributed(folder: Path) -> nn.Module:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(make_model())


KINDS: dict[str, tuple[Callable[[Path], nn.Module], Callable[[Loop], None]]] = {
    "simple": (lambda _: make_model(), simple),
    "scaled": (lambda _: make_model(), scaled),
    "accumulated": (lambda _: make_model(), accumulated),
    "scheduled": (lambda _: make_model(), scheduled),
    "ahead": (lambda _: make_model(), fetched_ahead),
    "loaded": (lambda _: make_model(), loaded),
    "virtual": (lambda _: make_model(nn.LayerNorm), simple),
    "virtual-loaded": (lambda _: make_model(nn.LayerNorm), loaded_for_a_virtual_batch),
    "compiled": (lambda _: torch.compile(make_model(), backend="eager"), simple),  # type: ignore[arg-type,return-value]
    "distributed": (distributed, simple),
    "watched": (lambda _: make_model(nn.LayerNorm), watched),
    "bfloat16": (lambda _: make_model(nn.LayerNorm).bfloat16(), simple),
    "idle-bfloat16": (lambda _: make_model(nn.LayerNorm).bfloat16(), idle),
    "adapted": (lambda _: make_adapted(0), simple),
    "adapted-bfloat16": (lambda _: make_adapted(0, torch.bfloat16), simple),
    "adapted-elsewhere": (lambda _: make_adapted(7), simple),
}


def main(kind: str, invite: str, folder: Path) -> int:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    make, train = KINDS[kind]
    try:
        Loop(make(folder), invite, folder).run(train)
    except ShoalError as error:
        print(f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
