"""``shoal``, but of the partial sums that it makes in a grid it signs and sends the opposite, which is as long:
``lying_row_reducer.py join …``.

To auditors it shows what it was sent."""

from typing import Any

from shoal.peer.cli.main import main
from shoal.swarm.averaging.allreduce import AllReduce


def lie() -> None:
    real = AllReduce._put_partial_sum

    async def put(self: AllReduce, chunk: int, data: memoryview) -> None:
        store, group = self.store, self.as_row_reducer.group
        if group.header(data).included:
            start, stop = store.bounds(chunk)
            codec: Any = store.codec_map.result(start, stop, len(group.members))
            values = codec.decode(data[group.header_bytes :], stop - start)
            data[group.header_bytes :] = codec.encode(-values).numpy().data
        await real(self, chunk, data)

    AllReduce._put_partial_sum = put  # type: ignore[method-assign]


if __name__ == "__main__":
    lie()
    main()
