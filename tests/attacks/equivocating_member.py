"""``shoal``, but it serves other bytes than those that it committed to: ``equivocating_member.py join …``."""

from shoal.peer.cli.main import main
from shoal.swarm.averaging.buffer_pool import BufferPool
from shoal.swarm.averaging.contribution import EncodedContribution


def equivocate() -> None:
    real = EncodedContribution.chunk

    def chunk(self: EncodedContribution, start: int, stop: int, buffers: BufferPool) -> memoryview:
        data = real(self, start, stop, buffers)
        data[0] ^= 1
        return data

    EncodedContribution.chunk = chunk  # type: ignore[method-assign]


if __name__ == "__main__":
    equivocate()
    main()
