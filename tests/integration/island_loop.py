"""A training loop of one's own in all ranks of an island: ``torchrun … island_loop.py INVITE STATE EVENTS``.

It ends after two rounds."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.peer.event_schema import Event
from shoal.peer.options import SessionOptions
from shoal.peer.recipes import load_recipe
from shoal.peer.session import Session
from shoal.swarm.client.observer import look_up_run
from shoal.swarm.protocol.invite import Invite


async def run_of(invite: str) -> object:
    return (await look_up_run(Invite.parse(invite))).run_file


def main() -> None:
    import asyncio

    invite, state, events = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    recipe = load_recipe(asyncio.run(run_of(invite)))  # type: ignore[arg-type]
    model = recipe.build_model(1)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rounds = 0

    def note(event: Event) -> None:
        nonlocal rounds
        rounds += event["event"] == "committed"
        with Path(events).open("a") as file:
            file.write(json.dumps(event) + "\n")

    folder = Path(state)
    options = SessionOptions(identity=folder / "identity", state=folder, bind=("127.0.0.1", 0), on_event=note)
    with Session.join(
        invite, model=model, inner_optimizer=optimizer, options=options, clip_norm=1.0, island=mesh
    ) as session:
        for batch in session.batches(recipe.training_data()):
            loss = recipe.loss(model, batch)
            (loss * session.loss_weight).backward()
            session.step(loss)
            if rounds >= 2:
                session.request_stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
