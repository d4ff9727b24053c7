"""Training of a run's recipe by an island: rank 0 is the process of ``shoal join`` and starts the others.

``python -m shoal.peer.island.training LIFELINE RANK FOLDER`` is another rank. It reads its task from the folder, which
is the island's own, and ends with rank 0, however that ends."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from shoal.peer.data_places import DataPlaces
from shoal.peer.island.group import TENSOR_PARALLEL, Island, init_process_group
from shoal.peer.island.ranks import FollowingSession, IslandLead
from shoal.peer.island.spreading import DATA_PARALLEL, check_cuts, spread_model
from shoal.peer.island.stages import FollowingStages, StageRanks
from shoal.peer.lifeline import end_with_parent
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.pipeline.peer import PipelinePeer
from shoal.peer.recipes import Recipe, layered_recipe, load_recipe
from shoal.peer.session import Session
from shoal.peer.training.data import DataAbout
from shoal.peer.training.device import (
    MemoryLimits,
    allow_tf32,
    autocast,
    demanded_memory,
    has_own_memory,
    usable_bytes,
)
from shoal.peer.training.inner_loop import InnerLoop
from shoal.peer.training.inner_optimizer import make_inner
from shoal.peer.training.parameters import MasterWeights
from shoal.peer.training.step_memory import plan_micro_batch, recompute_activations
from shoal.peer.training.tensor_parallel import Cut, TensorParallelRecipe
from shoal.swarm.errors import IslandBroken, RecipeError, ShoalError
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.system import fcntl

log = logging.getLogger(__name__)

_TASK, _LOCK, _FOLDER = "task.json", "lock", "shoal-island-"
_CPU = torch.device("cpu")

_DEATH_IS_KNOWN_S = 2.0
"""Time within which the end of a rank is known here after its connections have broken."""


@dataclass(frozen=True)
class RankTask:
    """What the ranks of an island do. ``data``: arguments of ``DataPlaces.of``; ``devices``: one for each rank."""

    run_toml: str
    data: dict[str, Any]
    devices: list[str]
    tensor_parallel: int
    threads: int | None

    @property
    def ranks(self) -> int:
        return len(self.devices)

    def begin(self, folder: str, rank: int) -> Island:
        """Meet the other ranks in a folder."""
        device = torch.device(self.devices[rank])
        if device.type == "cpu":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(self.threads or max(1, cores // self.ranks))
        else:
            torch.cuda.set_device(device)
            torch.cuda.init()  # type: ignore[no-untyped-call]
        init_process_group(folder, rank, self.ranks, on_gpus=device.type == "cuda")
        shape, names = (self.ranks // self.tensor_parallel, self.tensor_parallel), (DATA_PARALLEL, TENSOR_PARALLEL)
        return Island(init_device_mesh(device.type, shape, mesh_dim_names=names))


@dataclass(frozen=True)
class StartedRanks:
    """Ranks that rank 0 has started, and the folder in which they meet. ``has_failed``: whether rank 0's training has,
    which says itself what has happened then."""

    task: RankTask
    folder: str
    has_failed: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.has_failed.set()
            raise


def _meeting_folder() -> tuple[str, int]:
    """Make a folder in which ranks meet, and remove those of islands that have ended all at once.

    Returns it and a descriptor that locks it for as long as this process lives."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOCK}"):
        with suppress(OSError), lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_FOLDER)
    made = Path(folder, f"{_LOCK}-new")
    descriptor = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    made.rename(made.with_name(_LOCK))
    return folder, descriptor


@contextmanager
def started_ranks(task: RankTask, on_death: Callable[[str], None]) -> Iterator[StartedRanks]:
    """Start all ranks but 0, and yield them; at the end they have to end, too.

    ``on_death``: called once in a thread when one of them fails before that, with words about it. Raises
    ``IslandBroken`` for a ``RuntimeError`` that comes with such a failure."""
    lifeline, held = os.pipe()
    folder, lock = _meeting_folder()
    ranks = StartedRanks(task, folder)
    is_ending, first, died = threading.Event(), threading.Lock(), threading.Event()
    words = ""
    started: list[subprocess.Popen[bytes]] = []

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        nonlocal words
        code = process.wait()
        if code and not is_ending.is_set() and first.acquire(blocking=False):
            how = f"with exit code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
            words = f"rank {rank} of this island has ended {how}"
            died.set()
            shutil.rmtree(folder, ignore_errors=True)  # on_death may end this process, and no other rank may be left
            # What a rank has failed of by itself, rank 0 may fail of, too, and say it.
            if code < 0 or not ranks.has_failed.wait(_DEATH_IS_KNOWN_S):
                on_death(words)

    try:
        Path(folder, _TASK).write_text(json.dumps(asdict(task)))
        for rank in range(1, task.ranks):
            command = [sys.executable, "-m", "shoal.peer.island.training", str(lifeline), str(rank), folder]
            # In a process group of its own, so that the terminal's Ctrl-C is for rank 0, which has the others stop.
            started.append(subprocess.Popen(command, pass_fds=[lifeline], process_group=0))
        os.close(lifeline)
        for rank, process in enumerate(started, 1):
            threading.Thread(target=watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        yield ranks
    except RuntimeError as error:  # of a collective in the model, maybe
        if died.wait(_DEATH_IS_KNOWN_S):
            raise IslandBroken(
                f"{words}, and here: {error}. What the island has contributed is kept; give the same command again"
            ) from error
        raise
    finally:
        is_ending.set()
        os.close(held)
        for process in started:
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def lead_stages(peer: PipelinePeer, recipe: Recipe, run: RunFile, ranks: StartedRanks) -> None:
    """Train stages with the other ranks until the run ends, as rank 0.

    Raises as ``PipelinePeer.train``, ``IslandBroken``, and ``DeviceError`` for layers that cannot be cut."""
    with ranks.noting_failure():
        cuts = _cuts_of(recipe, run, ranks.task.tensor_parallel)
        lead = StageRanks(ranks.task.begin(ranks.folder, 0), cuts)
        peer.train(lead)
        lead.end()


def lead_island(session: Session, recipe: Recipe, ranks: StartedRanks, limits: MemoryLimits) -> None:
    """Train with the other ranks until the run ends, as rank 0; the session's end is theirs, too.

    Raises as ``Session``, ``IslandBroken``, and ``DeviceError`` for a model that does not fit or cannot be cut."""
    with ranks.noting_failure():
        _lead_island(session, recipe, ranks.task, ranks.folder, limits)


def _lead_island(session: Session, recipe: Recipe, task: RankTask, folder: str, limits: MemoryLimits) -> None:
    run, device = session.run_file, torch.device(task.devices[0])
    cuts = _cuts_of(recipe, run, task.tensor_parallel)
    model = recipe.build_model(run.run.seed)
    check_cuts(model, cuts, task.tensor_parallel)
    micro_batch = _plan(model, recipe, run, device, task, limits)
    island = task.begin(folder, 0)
    island.send_bytes(json.dumps(asdict(micro_batch)).encode())
    spread = spread_model(model, island, cuts)
    masters, inner = _inner(model, run, task.tensor_parallel)
    data = recipe.training_data()
    about = DataAbout(recipe.corpus_digest, recipe.corpus_about, recipe.tokens_per_sample, len(data))
    lead = IslandLead(island, spread)
    session.start(TrainingSetup(model, inner, about, recipe.config(), masters=masters, island=lead))
    loop = InnerLoop(model, recipe.loss, autocast(device, run.inner.precision), micro_batch.samples)
    for batch in session.batches(data):
        session.step(loop.backward(batch, session.share))


def _follow(task: RankTask, rank: int, folder: str) -> None:
    """Train as another rank than 0."""
    run, device = parse_run_file(task.run_toml), torch.device(task.devices[rank])
    allow_tf32(device, run.inner.precision)
    recipe = load_recipe(run, DataPlaces.of(**task.data))
    cuts = _cuts_of(recipe, run, task.tensor_parallel)
    island = task.begin(folder, rank)
    if run.pipeline is not None:
        FollowingStages(island, run, layered_recipe(recipe, run), device, cuts).serve()
        return
    micro_batch = MicroBatch(**json.loads(island.receive_bytes()))
    model = recipe.model_from_config(recipe.config())  # without values, so its memory is not touched
    if micro_batch.recomputes:
        recompute_activations(model)
    spread = spread_model(model, island, cuts)
    masters, inner = _inner(model, run, task.tensor_parallel)
    with FollowingSession(island, model, inner, masters=masters, spread=spread) as session:
        loop = InnerLoop(model, recipe.loss, autocast(device, run.inner.precision), micro_batch.samples)
        for batch in session.batches(recipe.training_data()):
            session.step(loop.backward(batch, session.share))


@dataclass(frozen=True)
class MicroBatch:
    """Samples that a rank computes at once; ``recomputes``: whether it computes activations again for the gradients."""

    samples: int
    recomputes: bool


def _inner(model: nn.Module, run: RunFile, tensor_parallel: int) -> tuple[MasterWeights | None, Optimizer | None]:
    if run.algorithm == "virtual_batch":
        return None, None
    masters = MasterWeights(model)
    inner = make_inner(model, run.inner, masters)
    if tensor_parallel > 1:  # parameters of several meshes cannot be stepped in one operation
        for group in inner.param_groups:
            group.update({"foreach": False, "fused": False} if "fused" in group else {"foreach": False})
    return masters, inner


def _cuts_of(recipe: Recipe, run: RunFile, tensor_parallel: int) -> Mapping[str, Cut]:
    if tensor_parallel == 1:
        return {}
    if not isinstance(recipe, TensorParallelRecipe):
        raise RecipeError(
            f"--tensor-parallel {tensor_parallel}: recipe {run.recipe.name!r} does not say how its layers are cut "
            "(docs/user-guide.md); leave the option out, and the ranks share each batch"
        )
    return recipe.tensor_parallel()


def _plan(
    model: nn.Module, recipe: Recipe, run: RunFile, device: torch.device, task: RankTask, limits: MemoryLimits
) -> MicroBatch:
    """Return how a rank computes its share of a batch, as measured on the whole model on the CPU."""
    trained = [one for one in model.parameters() if one.requires_grad]
    elements, trained_bytes = sum(one.numel() for one in trained), sum(one.nbytes for one in trained)
    account = account_of(run, value_bytes=trained_bytes / max(1, elements), ranks=task.ranks)
    needed = demanded_memory(device, account.demand(), elements)
    if has_own_memory(device):
        room = usable_bytes(device, limits.device_bytes) - needed.computing
    else:  # the whole model is in it already
        room = (usable_bytes(_CPU, limits.host_bytes) + trained_bytes - needed.computing) // task.ranks
    data, cast = recipe.training_data(), autocast(device, run.inner.precision)

    def loss_of(samples: int) -> Tensor:
        with cast():
            return recipe.loss(model, data.batch([0] * samples))

    most = -(-run.inner.batch_samples * task.tensor_parallel // task.ranks)
    micro_batch = plan_micro_batch(model, loss_of, most, room)
    return MicroBatch(micro_batch, any("forward" in vars(one) for one in model.modules()))


def main() -> None:
    """Run a rank that rank 0 has started."""
    lifeline, rank, folder = sys.argv[1:]
    end_with_parent(int(lifeline), lambda: shutil.rmtree(folder, ignore_errors=True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 has this one stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s")
    task = RankTask(**json.loads(Path(folder, _TASK).read_text()))
    try:
        _follow(task, int(rank), folder)
    except IslandBroken as error:
        log.info("%s", error)
        sys.exit(error.exit_code)
    except ShoalError as error:
        log.error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
