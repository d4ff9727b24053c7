"""Two stages of a ``gpt`` on one device beside the unsplit model on it: tokens/s, forward and backward.

Both stages are in this process, each with a training thread as a peer has one, and others that pack and unpack what
goes between the two (``peer/pipeline/tensor_io.py``). In place of a network, packed bytes are copied from the memory of
the one to that of the other. No round is averaged. The unsplit model takes the same micro-batches, adds up the same
gradients, and takes turns with the stages; a figure is the median of its turns. ``apart``: of the two gradients,
relative, in the L2 norm. On a CPU all of it shares the same cores: that shows that the script runs, and no more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
from common import comma, over, parser, publish
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.range_reader import whole_vector
from shoal.compression.registry import get_codec
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, MicroBatchKey, StageCompute
from shoal.peer.pipeline.tensor_io import ComputedTensor, Staging, TensorHeader
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.training.algorithms import AccumulatedGradient
from shoal.peer.training.device import autocast, choose_device
from shoal.peer.training.inner_loop import InnerLoop
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import DeviceError
from shoal.swarm.protocol.run_file import DataSection, PipelineSection

SIZES = {"layers": 12, "width": 1024, "heads": 16, "context": 1024}
SMALL = {"layers": 2, "width": 64, "heads": 2, "context": 32}
PRECISIONS = ("bfloat16", "float32")
CODECS = ("int8", "float32")
RATIO = "stages_vs_unsplit_tokens_s"
Row = dict[str, Any]


class Unsplit:
    """The model in one piece, as a peer without ``[pipeline]`` trains it."""

    def __init__(self, recipe: GptRecipe, device: torch.device, precision: str) -> None:
        model = recipe.build_model(1).to(device)
        self._vector = ParameterVector(model)
        self._work = AccumulatedGradient(self._vector)
        self._loop = InnerLoop(model, recipe.loss, autocast(device, precision), 2**20)

    def train(self, batches: Sequence[Tensor]) -> None:
        """One micro-batch after the other."""
        self._work.restart_from(whole_vector(self._vector))
        for batch in batches:
            self._loop.backward(batch)
            self._work.step(len(batch), 1.0)

    def gradient(self) -> Tensor:
        """Return the mean gradient, (n,) float32."""
        return whole_vector(self._work.contribution(torch.zeros(0)))


@dataclass
class Side:
    """One stage's peer. ``inbox``: micro-batches and what comes with them; None: the other has failed."""

    number: int
    stage: HeldStage
    vector: ParameterVector
    compute: StageCompute
    staging: Staging
    inbox: SimpleQueue[tuple[MicroBatchKey, Future[Tensor]] | None] = field(default_factory=SimpleQueue)

    def take(self) -> tuple[MicroBatchKey, Tensor]:
        """Return the tensors that arrived first, unpacked."""
        found = self.inbox.get()
        if found is None:
            raise _OtherFailed
        key, arriving = found
        return key, arriving.result()


class TwoStages:
    """The model in two stages, each with its own threads."""

    def __init__(self, recipe: GptRecipe, device: torch.device, precision: str, codec: Codec, in_flight: int) -> None:
        layered, self._recipe, self._in_flight = recipe.layers(1), recipe, in_flight
        cast, cut = autocast(device, precision), (0, (len(layered) + 1) // 2, len(layered))
        self._sides: list[Side] = []
        for number, (first, stop) in enumerate(pairwise(cut)):
            model = layered.build(first, stop).to(device)
            vector = ParameterVector(model)
            stage = HeldStage(number, first, model, AccumulatedGradient(vector))
            settings = ComputeSettings(device, autocast=cast, max_in_flight=in_flight)
            compute = StageCompute([stage], settings, recipe if number else None)
            self._sides.append(Side(number, stage, vector, compute, Staging(device, codec)))

    def train(self, batches: Sequence[Tensor]) -> None:
        """Train as two peers would. Raises the error of either."""
        stops = [sum(len(one) for one in batches[: number + 1]) for number in range(len(batches))]
        keys = [MicroBatchKey(0, stop - len(batch), stop, job=0) for stop, batch in zip(stops, batches, strict=True)]
        samples = dict(zip(keys, batches, strict=True))
        with ThreadPoolExecutor(2 * self._in_flight) as carriers, ThreadPoolExecutor(2) as threads:
            running = [
                threads.submit(self._run, side, way, samples, carriers)
                for side, way in zip(self._sides, (self._drive, self._answer), strict=True)
            ]
        for one in running:
            with suppress(_OtherFailed):
                one.result()

    def gradient(self) -> Tensor:
        """Return the mean gradient, (n,) float32."""
        return torch.cat([whole_vector(side.stage.work.contribution(torch.zeros(0))) for side in self._sides])

    def _run(
        self, side: Side, way: Callable[..., None], samples: dict[MicroBatchKey, Tensor], carriers: ThreadPoolExecutor
    ) -> None:
        other = self._sides[1 - side.number]

        def send(key: MicroBatchKey, tensor: Tensor) -> None:
            made = ComputedTensor.on_current_stream(tensor)
            other.inbox.put((key, carriers.submit(_carried, side.staging, other.staging, made)))

        is_done = False
        try:
            with side.staging.computing():
                side.stage.work.restart_from(whole_vector(side.vector))
                way(side, samples, send)
            is_done = True
        finally:
            if not is_done:
                other.inbox.put(None)

    def _drive(
        self, side: Side, samples: dict[MicroBatchKey, Tensor], send: Callable[[MicroBatchKey, Tensor], None]
    ) -> None:
        """Run the first stage: forward up to the limit in flight; gradients that came back go first."""
        waiting, under_way = deque(samples), 0
        while waiting or under_way:
            if waiting and under_way < self._in_flight and side.inbox.empty():
                key = waiting.popleft()
                output = side.compute.forward(key, self._recipe.input_of(samples[key]))
                assert output is not None
                send(key, output)
                under_way += 1
            else:
                key, gradient = side.take()
                side.compute.backward(key, gradient, {side.number})
                under_way -= 1

    def _answer(
        self, side: Side, samples: dict[MicroBatchKey, Tensor], send: Callable[[MicroBatchKey, Tensor], None]
    ) -> None:
        """Run the last stage."""
        for _ in samples:
            key, given = side.take()
            side.compute.forward(key, given)
            gradient = side.compute.backward(key, self._recipe.targets_of(samples[key]), {side.number}).input_gradient
            assert gradient is not None
            send(key, gradient)


class _OtherFailed(Exception):
    """And raises why."""


def _carried(sender: Staging, receiver: Staging, made: ComputedTensor) -> Tensor:
    packed = sender.pack_result(made)
    arrived = receiver.allocate_host(packed.numel()).copy_(packed)
    return receiver.unpack_received(arrived, TensorHeader.of(made.tensor))[0]


# Measuring ---------------------------------------------------------------------------------------------------


def apart(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def timed_s(work: Callable[[], None], device: torch.device) -> float:
    began_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


def measured(recipe: GptRecipe, precision: str, options: argparse.Namespace) -> Iterator[Row]:
    """A row for each codec."""
    device, data = options.device, recipe.training_data()
    size, count = options.micro_batch, options.micro_batches
    indices = [number % len(data) for number in range(size * count)]
    batches = list(torch.split(data.batch(indices), size))
    in_flight = PipelineSection(stages=2, micro_batch=size).in_flight
    unsplit = Unsplit(recipe, device, precision)
    stages = {name: TwoStages(recipe, device, precision, get_codec(name), in_flight) for name in options.codecs}
    subjects: dict[str, Unsplit | TwoStages] = {"unsplit": unsplit, **stages}
    taken_s: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(1 + options.repeats):
        for name, subject in subjects.items():
            seconds = timed_s(lambda subject=subject: subject.train(batches), device)  # type: ignore[misc]
            if turn:  # the first one takes memory and loads kernels
                taken_s[name].append(seconds)
    tokens = size * count * recipe.tokens_per_sample
    alone = tokens / statistics.median(taken_s["unsplit"])
    for name, one in stages.items():
        split = tokens / statistics.median(taken_s[name])
        yield {
            "precision": precision,
            "activations": name,
            "stages tokens/s": split,
            "unsplit tokens/s": alone,
            "stages / unsplit": over(split, alone),
            "apart": apart(one.gradient(), unsplit.gradient()),
        }


def ratios_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """Ratios for a run file's defaults on a GPU, and for a run that rounds nothing."""
    found = {(row["precision"], row["activations"]): row["stages / unsplit"] for row in rows}
    return {RATIO: found.get(("bfloat16", "int8")), f"{RATIO}_float32": found.get(("float32", "float32"))}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script anywhere")
    arguments.add_argument("--precisions", type=comma(str), default=list(PRECISIONS))
    arguments.add_argument("--codecs", type=comma(str), default=list(CODECS), help="of what goes between the stages")
    arguments.add_argument("--micro-batch", type=int, default=8, help="samples")
    arguments.add_argument("--micro-batches", type=int, default=16, help="a turn")
    arguments.add_argument("--repeats", type=int, default=5, help="turns after the one that warms up")
    arguments.add_argument("--quick", action="store_true", help="a smoke run: a tiny model")
    for name, size in SIZES.items():
        arguments.add_argument(f"--{name}", type=int, default=size)
    options = arguments.parse_args()
    try:
        options.device = choose_device(options.device)
    except DeviceError as error:
        arguments.error(f"{error}. This needs a CUDA device; --device cpu --quick only tries the script")
    sizes = SMALL if options.quick else {name: getattr(options, name) for name in SIZES}
    recipe = GptRecipe({**sizes, "tie_embedding": False}, DataSection(source="stdlib"))
    rows = [row for precision in options.precisions for row in measured(recipe, precision, options)]
    parameters = sum(one.numel() for one in recipe.build_model(1).parameters())
    title = f"a gpt of {parameters / 1e6:.3g} M parameters on {options.device}, context {sizes['context']}, tokens/s"
    publish(title, rows, ratios_of(rows), options.json)


if __name__ == "__main__":
    main()
