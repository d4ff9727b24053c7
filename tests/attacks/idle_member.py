"""``shoal``, but no step takes any time, as none is made: ``idle_member.py join INVITE …``."""

from typing import Any

import torch

from shoal.peer.cli.main import main
from shoal.peer.training.inner_loop import InnerLoop


def do_nothing() -> None:
    def backward(self: InnerLoop, *arguments: Any) -> Any:
        return torch.tensor(1.0)

    InnerLoop.backward = backward  # type: ignore[method-assign]


if __name__ == "__main__":
    do_nothing()
    main()
