"""Checkpoints of tiny models, and their files in memory."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.swarm.coordinator.world import SIGNER

from shoal.peer.checkpoints.checkpoint import CheckpointContents, OwnContents
from shoal.peer.checkpoints.local_state import LocalStateContent
from shoal.peer.checkpoints.manifest import CheckpointAbout
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.history.history_file import HistoryOrigin, pack_origin
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.averaging.outcome import CarriedResidual
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.protocol.verdict_chain import chain_hash, genesis, pack_verdict, signed_bytes

RUN_TOML = "[run]\nname = 'reef'\n[recipe]\nname = 'own'\n[round]\ntokens = 100\n"
RUN = parse_run_file(RUN_TOML)
LAYOUT = (
    TensorSpec(name="one.weight", shape=(2, 3)),
    TensorSpec(name="one.bias", shape=()),
    TensorSpec(name="none", shape=(0, 4)),
)
ELEMENTS = 7
IDENTITY = Identity.generate()


def state_of(version: int, outer: int = 1, layout: tuple[TensorSpec, ...] = LAYOUT) -> AnchorState:
    generator = torch.Generator().manual_seed(version)
    elements = sum(spec.elements for spec in layout)
    return AnchorState.of(torch.randn(1 + outer, elements, generator=generator), version)


def pack_history(origin: HistoryOrigin, verdicts: Iterable[Verdict]) -> bytes:
    """The bytes of a history file."""
    return b"".join([pack_origin(origin), *map(pack_verdict, verdicts)])


def verdict_chain(rounds: int, run_hash: bytes = RUN.hash, signer: Identity = SIGNER) -> tuple[Verdict, ...]:
    """Verdicts of committed rounds 0, 1, …, without plans: round r makes anchor version r + 1."""
    verdicts: list[Verdict] = []
    for number in range(rounds):
        blank = Verdict(
            round=number,
            committed=True,
            reason="",
            anchor_version=number + 1,
            plan=None,
            digests=(),
            tokens=10,
            tokens_total=10 * (number + 1),
            loss=None,
            ended_s=1.5e9,
            sent_bytes=0,
            previous_chain=verdicts[-1].chain if verdicts else genesis(run_hash),
            chain=bytes(32),
            signature=b"",
        )
        verdicts.append(signed(blank, signer))
    return tuple(verdicts)


def signed(verdict: Verdict, signer: Identity = SIGNER) -> Verdict:
    chain = chain_hash(verdict)
    return verdict.model_copy(update={"chain": chain, "signature": signer.sign(signed_bytes(chain))})


def contents(
    number: int = 0, own: Mapping[str, Any] | None = None, layout: tuple[TensorSpec, ...] = LAYOUT, **changes: Any
) -> CheckpointContents:
    """Contents of a checkpoint of the state that round ``number`` made."""
    verdicts = verdict_chain(number + 1)
    state = state_of(number + 1, layout=layout)
    about: dict[str, Any] = {
        "run": "reef",
        "run_hash": RUN.hash.hex(),
        "run_toml": RUN_TOML,
        "recipe": {"depth": 2, "rate": 0.1},
        "layout": layout,
        "outer_vectors": 1,
        "round": number,
        "anchor_version": number + 1,
        "state_digest": state.digest.hex(),
        "chain": verdicts[-1].chain.hex(),
        "tokens": verdicts[-1].tokens_total,
        "coordinator_key": SIGNER.public_key.hex(),
    }
    kept = None
    if own is not None:
        carried = CarriedResidual(own.get("residual", torch.zeros(3)), 12)
        tree = {name: one for name, one in own.items() if name != "residual"}
        kept = OwnContents(LocalStateContent.of(tree), carried)
    return CheckpointContents(CheckpointAbout(**{**about, **changes}), state, kept, verdicts)


def open_store(folder: Path, retention: Retention | None = None) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", RUN.hash, IDENTITY, retention or Retention())


def sealing_store(folder: Path, *readers: bytes) -> CheckpointStore:
    return CheckpointStore(folder, RUN.hash, IDENTITY, Retention(), sealed_for=readers)


@dataclass
class MemorySource:
    """The files of a checkpoint in memory; ``files`` may be changed."""

    files: dict[str, bytes]

    @classmethod
    def of(cls, folder: Path) -> "MemorySource":
        return cls({path.name: path.read_bytes() for path in folder.iterdir()})

    def place(self, name: str) -> str:
        return name

    def read(self, name: str, limit_bytes: int) -> bytes:
        if name not in self.files:
            raise StateFileError(f"{name}: is missing")
        return self.files[name][: limit_bytes + 1]

    @contextmanager
    def open(self, name: str) -> Iterator["MemoryContent"]:
        if name not in self.files:
            raise StateFileError(f"{name}: is missing")
        yield MemoryContent(name, self.files[name])

    def size_bytes(self, name: str) -> int:
        if name not in self.files:
            raise StateFileError(f"{name}: is missing")
        return len(self.files[name])

    def has(self, name: str) -> bool:
        return name in self.files

    def changed(self, name: str, data: bytes) -> "MemorySource":
        return MemorySource({**self.files, name: data})


@dataclass
class MemoryContent:
    """An open file of a ``MemorySource``; ``most_bytes``: of one read."""

    name: str
    data: bytes
    most_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read_into(self, at: int, out: memoryview) -> None:
        self.most_bytes = max(self.most_bytes, out.nbytes)
        if at + out.nbytes > len(self.data):
            raise StateFileError(f"{self.name}: is shorter")
        out[:] = self.data[at : at + out.nbytes]
