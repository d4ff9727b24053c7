"""A run that claims a model of any size costs a volunteer no memory: it is refused before it is built."""

import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.integration.harness import FRESH, START_S, Process, Swarm, eventually, run_toml

from shoal.swarm.errors import DeviceError, ShoalError

pytestmark = [pytest.mark.integration, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

LEAST_BYTES = 2**30
"""The model would take hundreds of times as much; a process that has imported torch has half of it."""

HUGE = run_toml().replace("layers = 1\nheads = 2\nwidth = 32", "layers = 128\nheads = 64\nwidth = 8192")
"""10^11 parameters."""


def most_bytes(process: Process, error: type[ShoalError]) -> int:
    """Wait for the process to end with that error; return the most memory that it or a child of it had at any time."""
    most = 0

    def has_ended() -> bool:
        nonlocal most
        with suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in (process.pid, *children):
                found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                most = max(most, int(found[1]) * 1024 if found else 0)
        return not process.running

    eventually(f"{process.label} ends", has_ended, 2 * START_S, process.tail)
    assert process.exit_code(1.0) == error.exit_code, process.tail()
    assert "Traceback" not in process.text()
    assert most > 0
    return most


def refused(process: Process) -> None:
    assert most_bytes(process, DeviceError) < LEAST_BYTES
    assert "DeviceError: the run's model has 103,116,972,032 parameters and takes" in process.text(), process.tail()
    assert "[pipeline]" in process.text()


@pytest.mark.parametrize("options", [(), ("--max-memory", "4G")])
def test_a_model_that_fits_nowhere_is_refused_before_it_is_built(swarm: Swarm, options: tuple[str, ...]) -> None:
    host = swarm.host(HUGE)
    member = swarm.member(host.invite, "member", FRESH, extra=options)
    refused(member)
    assert ("--max-memory allows 4.0 GiB" in member.text()) == bool(options)
    host.stop()


def test_a_host_does_not_build_it_either(swarm: Swarm) -> None:
    path = swarm.run_file(HUGE)
    host = swarm.command("host", *FRESH, "host", str(path), "--bind", "127.0.0.1:0", "--state", str(swarm.folder / "s"))
    refused(host)
    assert "--no-pins" in host.text()


def test_a_layer_that_fits_nowhere_is_refused_before_it_is_measured(swarm: Swarm) -> None:
    layers = HUGE.replace("layers = 128", "layers = 2\ntie_embedding = false\nhidden = 1048576")
    host = swarm.host(layers.replace('"diloco"', '"virtual_batch"') + "[pipeline]\nmicro_batch = 5\n")
    member = swarm.member(host.invite, "member", FRESH, extra=("--max-memory", "4G"))
    assert most_bytes(member, DeviceError) < LEAST_BYTES
    assert "DeviceError: the largest layer of the run's model has" in member.text(), member.tail()
    host.stop()
