"""``shoal``, but every step takes longer: ``slow_member.py SECONDS join INVITE …``."""

import sys
import time
from typing import Any

from shoal.peer.cli.main import main
from shoal.peer.training.inner_loop import InnerLoop


def slow_down(seconds: float) -> None:
    real = InnerLoop.backward

    def backward(self: InnerLoop, *arguments: Any) -> Any:
        time.sleep(seconds)
        return real(self, *arguments)

    InnerLoop.backward = backward  # type: ignore[method-assign]


if __name__ == "__main__":
    _, seconds, *arguments = sys.argv
    slow_down(float(seconds))
    sys.argv = ["shoal", *arguments]
    main()
