import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

FAR_S = 60.0


@pytest.fixture
def helpers() -> Iterator[Any]:
    from pacing import Helper

    made: list[Helper] = []

    def make(deadline_s: float) -> Helper:
        made.append(Helper("a peer", Connection.recv, (), deadline_s))  # lives until it is told anything
        return made[-1]

    yield make
    for one in made:
        if one.process.is_alive():
            one.end()


def test_one_that_dies_is_named(helpers: Any) -> None:
    from pacing import RoundFailed

    helper = helpers(time.monotonic() + FAR_S)
    helper.tell("go on")
    with pytest.raises(RoundFailed, match="a peer died"):
        helper.hear()


def test_one_that_is_silent_is_named_and_killed(helpers: Any) -> None:
    from pacing import RoundFailed

    helper = helpers(time.monotonic())
    with pytest.raises(RoundFailed, match="a peer did not answer in time"):
        helper.hear()
    helper.end()
    assert not helper.process.is_alive()


def test_memory_of_a_process_is_read() -> None:
    from usage import PeakMemory, status_bytes

    assert status_bytes("Name:\tx\nVmHWM:\t  12 kB\nVmRSS:\t 8 kB\n", "VmRSS") == 8192
    with pytest.raises(ValueError, match="VmHWM"):
        status_bytes("Name:\tx\n", "VmHWM")
    memory = PeakMemory()
    memory.begin()
    size = 2**26
    assert len(bytes(bytearray(size))) == size
    risen = memory.risen_bytes()
    if Path("/proc/self/clear_refs").exists() and risen is not None:
        assert size <= risen < 8 * size
        kept = bytes(bytearray(size))
        memory.begin()
        in_all, risen = memory.risen_in_all_bytes(), memory.risen_bytes()
        assert in_all is not None
        assert risen is not None
        assert in_all - risen >= len(kept) / 2


def test_descendants_are_found_and_killed(helpers: Any) -> None:
    import os

    from usage import descendants, kill_tree

    helper = helpers(time.monotonic() + FAR_S)
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        pytest.skip("this kernel does not list children")
    assert helper.process.pid in list(descendants(os.getpid()))
    kill_tree(helper.process.pid)
    helper.process.join()
    assert helper.process.pid not in list(descendants(os.getpid()))
