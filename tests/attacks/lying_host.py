"""A host that serves what it likes: ``lying_host.py FOLDER``.

``FOLDER/runs.json`` has a list of runs: ``name``; ``invited``, the run file (TOML) whose hash the invite names;
``served``, the run files that are answered with, one request after the other, the last one for ever; ``owns_up``:
whether the hash that it says is that of the file that it serves, and not the invite's. Writes ``FOLDER/invites.json``,
by name, and each message that anybody sends it to ``FOLDER/heard.jsonl``.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from shoal.swarm.errors import UnknownRun
from shoal.swarm.protocol import run_file
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import MESSAGES, CoordinatorToPeerRun, PeerToCoordinatorGetRun
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import Address, Message
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.node import Node

HOST = "127.0.0.1"


def harmless(source: str) -> None:
    """A host need not check what its volunteers check."""


async def main(folder: Path) -> None:
    runs: dict[str, dict[str, Any]] = {one["name"]: one for one in json.loads((folder / "runs.json").read_text())}
    hashes = {name: parse_run_file(one["invited"]).hash for name, one in runs.items()}
    identity = Identity.generate()
    keys = identity.coordinator_keys()

    async def admit(key: bytes) -> bool:
        return True

    async def answer(channel: Channel, message: Message) -> Message:
        with (folder / "heard.jsonl").open("a") as heard:
            heard.write(json.dumps({"kind": type(message).__name__, "all": repr(message)}) + "\n")
        if not isinstance(message, PeerToCoordinatorGetRun):
            raise UnknownRun("that is all we wanted to hear")
        one = runs[message.run]
        toml = one["served"].pop(0) if len(one["served"]) > 1 else one["served"][0]
        said = parse_run_file(toml).hash if one.get("owns_up") else hashes[message.run]
        return CoordinatorToPeerRun(run_toml=toml, run_hash=said, coordinator=identity.certify(keys))

    async with Node.open(keys, HOST, (0, None), admit) as node:
        for name, kind in MESSAGES.items():
            if name.startswith("PeerToCoordinator"):
                node.control.handle(kind, answer)
        address = (Address(host=HOST, control_port=node.control_port),)
        invites = {name: str(Invite(address, name, keys.public, hashes[name])) for name in runs}
        (folder / "invites.json").write_text(json.dumps(invites))
        print("listening", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    run_file.check_source = harmless
    asyncio.run(main(Path(sys.argv[1])))
