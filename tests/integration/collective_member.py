"""A member of a run of collectives: INVITE FOLDER NUMBER KIND [STEP ARMED]; one JSON line a call, until the run ends.

It takes each collective in turn. KIND: ``numpy`` or ``torch`` arrays; STEP: of ``doomed_member.py``, at which it kills
itself once the file ARMED is there."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from doomed_member import STEPS, Doom

from shoal.peer.array_trees import as_numpy, named_arrays
from shoal.peer.collectives import Collectives
from shoal.peer.options import SessionOptions


def digest(tree: Any) -> str:
    digest = blake3()
    for name, array in named_arrays(tree):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(as_numpy(array)).tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    invite, folder, number, kind, *doom = sys.argv[1:]
    if doom:
        STEPS[doom[0]](Doom(1, Path(doom[1])))
    options = SessionOptions(identity=Path(folder) / "id", state=Path(folder), bind=("127.0.0.1", 0))
    mine = float(number)
    values: Any = np.arange(6, dtype=np.float32).reshape(3, 2) + np.float32(mine)
    arrays = {"own": values if kind == "numpy" else torch.from_numpy(values), "parts": [np.int64(2**40 + int(mine))]}
    with Collectives.join(invite, options) as run:
        print(json.dumps({"peer": run.peer}), flush=True)
        at = 0
        while True:
            name = ("sum", "mean", "max", "gather", "scatter", "broadcast")[at % 6]
            if name == "gather":
                found = run.all_gather(arrays)
            elif name == "scatter":
                found = run.reduce_scatter({"own": arrays["own"]}, "sum")
            elif name == "broadcast":
                found = run.broadcast(arrays, source=number == "1")
            else:
                found = run.all_reduce(arrays, name)
            if found is None:
                break
            own = found.value[0]["own"] if name == "gather" else found.value["own"]
            assert type(own) is type(arrays["own"]), type(own)
            line = {
                "call": name,
                "round": found.round,
                "members": found.members,
                "rank": found.rank,
                "digest": "" if name == "scatter" else digest(found.value),
                "own": as_numpy(own).tolist(),
            }
            print(json.dumps(line), flush=True)
            at += 1


if __name__ == "__main__":
    main()
