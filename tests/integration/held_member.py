"""``shoal`` that makes no step while there is a file at GATE: ``held_member.py GATE SECONDS join INVITE …``.

It says so when it first waits there. Once the file is gone each step takes SECONDS longer than it would.
"""

import sys
import time
from pathlib import Path
from typing import Any

from slow_member import slow_down

from shoal.peer.cli.main import main
from shoal.peer.training.inner_loop import InnerLoop


def hold_at(gate: Path) -> None:
    real = InnerLoop.backward

    def backward(self: InnerLoop, *arguments: Any) -> Any:
        if gate.exists():
            print("waits at the gate", flush=True)
        while gate.exists():
            time.sleep(0.02)
        return real(self, *arguments)

    InnerLoop.backward = backward  # type: ignore[method-assign]


if __name__ == "__main__":
    _, gate, seconds, *arguments = sys.argv
    slow_down(float(seconds))
    hold_at(Path(gate))
    sys.argv = ["shoal", *arguments]
    main()
