"""Checkpoints of tiny language models, as runs leave them."""

from pathlib import Path
from typing import Any

import torch
from tests.peer.checkpoints.making import signed, verdict_chain
from tests.swarm.coordinator.world import SIGNER

from shoal.peer.checkpoints.checkpoint import CheckpointContents, OwnContents
from shoal.peer.checkpoints.local_state import LocalStateContent
from shoal.peer.checkpoints.manifest import CheckpointAbout
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.recipes import load_recipe
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.outcome import CarriedResidual
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.verdict_chain import genesis

OWNER = Identity.generate()
PEERS = ("a" * 16, "b" * 16)


def gpt_toml(data: str = "stdlib", **settings: Any) -> str:
    given = {"layers": 2, "heads": 2, "width": 16, "context": 24, **settings}
    lines = "".join(f"{name} = {str(value).lower()}\n" for name, value in given.items())
    return f"""
[run]
name = "reef"
[recipe]
name = "gpt"
[recipe.settings]
{lines}
[data]
source = "{data}"
[round]
tokens = 100
[card]
title = "A <b>reef</b>"
"""


def keep_run(folder: Path, toml: str, buffers: dict[str, torch.Tensor] | None = None) -> torch.nn.Module:
    """Write the checkpoint of a run's second round to ``folder``; return the model in it."""
    run = parse_run_file(toml)
    recipe = load_recipe(run)
    model = recipe.build_model(3)
    with torch.no_grad():
        for one in model.parameters():  # norms too: weights of ones hide what is mixed up
            one += 0.1 * torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel()))
    vector = ParameterVector(model)
    anchor = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    state = AnchorState.of(anchor[None].clone(), 2)
    verdicts = []
    for number, blank in enumerate(verdict_chain(2, run.hash)):
        members = tuple(PlanMember(peer=peer, weight_tokens=5) for peer in PEERS[: number + 1])
        plan = RoundPlan(
            round=number,
            anchor_version=number,
            state_digest=bytes(32),
            chunk_elements=1,
            members=members,
            parts=(Part(owner=0, start=0, stop=1),),
        )
        before = verdicts[-1].chain if verdicts else genesis(run.hash)
        verdicts.append(signed(blank.model_copy(update={"plan": plan, "previous_chain": before, "run_hash": run.hash})))
    about = CheckpointAbout(
        run=run.run.name,
        run_hash=run.hash.hex(),
        run_toml=toml,
        recipe=recipe.config(),
        layout=vector.layout,
        outer_vectors=0,
        round=1,
        anchor_version=2,
        state_digest=state.digest.hex(),
        chain=verdicts[-1].chain.hex(),
        tokens=20,
        coordinator_key=SIGNER.public_key.hex(),
    )
    own = None
    if buffers is not None:
        own = OwnContents(LocalStateContent.of({"buffers": buffers}), CarriedResidual(torch.zeros(3), 0))
    store = CheckpointStore(folder / "checkpoints", run.hash, OWNER, Retention())
    store.write(CheckpointContents(about, state, own, tuple(verdicts)))
    return model
