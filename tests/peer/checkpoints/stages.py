"""A tiny pipeline: the verdicts on its stages, tied together, and the checkpoints that peers keep."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.peer.checkpoints.making import signed, state_of, verdict_chain
from tests.swarm.coordinator.world import SIGNER

from shoal.peer.checkpoints.checkpoint import CheckpointContents
from shoal.peer.checkpoints.manifest import CheckpointAbout, StageAbout
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CHECKPOINTS, CheckpointStore
from shoal.peer.folders import stage_folder
from shoal.peer.member.memberships import scope_of
from shoal.peer.offline.whole_model import StageState
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.protocol.verdict_chain import genesis, tied_together

TOML = """
algorithm = "virtual_batch"
[run]
name = "reef"
[recipe]
name = "gpt"
[recipe.settings]
layers = 2
heads = 2
width = 8
context = 8
tie_embedding = false
[pipeline]
stages = 3
micro_batch = 2
[round]
tokens = 64
"""
RUN = parse_run_file(TOML)
IDENTITY = Identity.generate()


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape)


LAYOUTS = ((spec("embedding", 4, 3),), (spec("block.weight", 3, 3), spec("block.bias", 3)), (spec("head", 2, 3),))


def stage_chains(rounds: int, aborted: Sequence[int] = (), stages: int = len(LAYOUTS)) -> list[tuple[Verdict, ...]]:
    """The verdicts of so many rounds of each stage, committed but for the given ones."""
    chains: list[list[Verdict]] = [[] for _ in range(stages)]
    version = 0
    for number, blank in enumerate(verdict_chain(rounds, RUN.hash)):
        version += number not in aborted
        changes = {
            "committed": number not in aborted,
            "reason": "too few" * (number in aborted),
            "anchor_version": version,
            "tokens_total": 10 * version,
            "run_hash": RUN.hash,
        }
        bare = [
            blank.model_copy(
                update={
                    **changes,
                    "plan": _plan(stage, chain),
                    "previous_chain": chain[-1].chain if chain else genesis(RUN.hash, scope_of(stage)),
                }
            )
            for stage, chain in enumerate(chains)
        ]
        for chain, verdict in zip(chains, tied_together(bare), strict=True):
            chain.append(signed(verdict))
    return [tuple(chain) for chain in chains]


def _plan(stage: int, before: Sequence[Verdict]) -> RoundPlan:
    """The plan of a stage's next round, which names the present state."""
    version = before[-1].anchor_version if before else 0
    return RoundPlan(
        round=len(before),
        anchor_version=version,
        state_digest=stage_state(stage, version).digest if stage < len(LAYOUTS) else bytes(32),
        chunk_elements=1,
        members=(PlanMember(peer="a" * 16, weight_tokens=10),),
        parts=(Part(owner=0, start=0, stop=1),),
    )


def stage_state(stage: int, version: int, layout: Iterable[TensorSpec] | None = None) -> AnchorState:
    values = state_of(100 * stage + version, layout=tuple(layout or LAYOUTS[stage])).values
    return AnchorState.of(values, version)


def about(number: int, state: AnchorState, verdict: Verdict, **changes: Any) -> CheckpointAbout:
    """Description of a stage's checkpoint."""
    fields = {
        "run": RUN.run.name,
        "run_hash": RUN.hash.hex(),
        "run_toml": TOML,
        "recipe": {"name": "gpt", "settings": {}},
        "layout": LAYOUTS[number],
        "outer_vectors": 1,
        "round": verdict.round,
        "anchor_version": state.version,
        "state_digest": state.digest.hex(),
        "chain": verdict.chain.hex(),
        "tokens": verdict.tokens_total,
        "coordinator_key": SIGNER.public_key.hex(),
        "stage": StageAbout(number=number, stages=len(LAYOUTS)),
    }
    return CheckpointAbout(**{**fields, **changes})


def given(chains: Sequence[Sequence[Verdict]], number: int) -> list[StageState]:
    """All stages of the state that round ``number`` made."""
    found = []
    for stage, chain in enumerate(chains):
        state = stage_state(stage, chain[number].anchor_version)
        found.append(
            StageState(about(stage, state, chain[number]), tuple(chain[: number + 1]), lambda state=state: state)
        )
    return found


def whole_values(version: int) -> torch.Tensor:
    """The values of all stages together, (2, n)."""
    return torch.cat([stage_state(stage, version).values for stage in range(len(LAYOUTS))], dim=1)


def keep(
    peer: Path,
    number: int,
    chain: Sequence[Verdict],
    of_round: int,
    identity: Identity = IDENTITY,
    state: AnchorState | None = None,
    sealed_for: Iterable[bytes] | None = None,
    **changes: Any,
) -> Path:
    """Write the checkpoint of that stage and round to a peer's folder."""
    verdict = chain[of_round]
    state = state or stage_state(number, verdict.anchor_version)
    place = stage_folder(peer, number) / CHECKPOINTS
    store = CheckpointStore(place, RUN.hash, identity, Retention(9), sealed_for)
    contents = CheckpointContents(about(number, state, verdict, **changes), state, None, tuple(chain[: of_round + 1]))
    return store.write(contents).folder
