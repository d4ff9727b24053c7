"""Memory that the allocator keeps goes back to the system."""

import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import os, torch
from shoal.peer.machine_memory import return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
blocks = [torch.ones(25_000) for _ in range(1000)]
kept = blocks[::2]
del blocks
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to")
def test_blocks_between_others_are_returned() -> None:
    shown = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert int(shown.stdout) > 500 * 100_000 / 2
