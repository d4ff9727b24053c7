"""What goes over a link: frames, each of a kind, and in which order they leave."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shoal.swarm.transport.frame_crypto import CHUNK


class Frame(NamedTuple):
    """A chunk's bytes that are to be sent in a stream, or what is said of one: see ``sealing`` for the kinds;
    ``scope``: of the blob that they are of."""

    stream: int
    chunk: int
    payload: memoryview
    scope: int = 0
    kind: int = CHUNK


class FrameQueue:
    """What waits to be sent over a link: messages and credit first, then what others wait for to go on, then everything
    else."""

    ORDER, CREDIT, URGENT, USUAL = range(4)

    def __init__(self) -> None:
        self._frames: tuple[deque[Frame], ...] = tuple(deque() for _ in range(4))
        # Each of the two threads counts in one of them.
        self._put_bytes = self._taken_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    def put(self, frame: Frame, rank: int) -> None:
        self._put_bytes += frame.payload.nbytes
        self._frames[rank].append(frame)

    def take(self, *, orders: bool = True) -> Frame | None:
        """The next one; without ``orders`` no message: they keep their order on one connection of a link."""
        for frames in self._frames if orders else self._frames[1:]:
            if frames:
                frame = frames.popleft()
                self._taken_bytes += frame.payload.nbytes
                return frame
        return None

    def drop(self, stream: int) -> None:
        """Forget the chunks of that stream; on the data plane's thread, as ``take``."""
        for frames in self._frames[self.URGENT :]:
            for _ in range(len(frames)):
                frame = frames.popleft()
                if frame.stream == stream:
                    self._taken_bytes += frame.payload.nbytes
                else:
                    frames.append(frame)

    def clear(self) -> None:
        while self.take() is not None:
            pass
