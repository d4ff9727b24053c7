"""Copies of tensors in the machine's memory, made beside the training and complete before it changes the tensors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.peer.training.device_streams import streams_of
from shoal.peer.training.tensor_sequence import pieces_of

_TOGETHER = 8
"""Pieces that a thread takes at a time, so that one crosses the bus while another leaves the pinned memory."""


class DeferredCopy:
    """Copies of tensors as the work that the calling thread has queued leaves them; ``copies`` has them by name.

    On a GPU they go through the ring of pinned memory, beside work that is queued later and does not change them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.copies = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in tensors.items()}
        devices = {one.device for one in tensors.values()}
        self._after = {device: streams_of(device).mark() for device in devices}
        self._left = deque(piece for name, one in tensors.items() for piece in pieces_of(one, self.copies[name]))
        self._copying = 0
        self._changed = threading.Condition()

    def complete(self) -> None:
        """Copy what is left. Several threads share that work, and each returns when all of it is done.

        So a training thread that is about to change the tensors never waits for a thread that has not begun."""
        while taken := self._take():
            try:
                for device, after in self._after.items():
                    streams_of(device).read([one for one in taken if one[0].device == device], after)
            except BaseException:
                with self._changed:  # whoever waits tries it itself, instead of taking it for done
                    self._left.extendleft(reversed(taken))
                raise
            finally:
                with self._changed:
                    self._copying -= 1
                    self._changed.notify_all()

    def _take(self) -> list[tuple[Tensor, Tensor]]:
        """Take pieces that nobody copies yet; none once all are copied."""
        with self._changed:
            while not self._left and self._copying:
                self._changed.wait()
            taken = [self._left.popleft() for _ in range(min(_TOGETHER, len(self._left)))]
            self._copying += bool(taken)
            return taken
