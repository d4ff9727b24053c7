"""A process on which Python looks as on Windows, as far as Shoal goes: run by ``test_platforms.py``.

Modules and names of POSIX are taken away, and all modules of Shoal are imported; then a run with two members commits
rounds on loopback. Other packages, which have wheels for Windows, are imported before and keep what they use.
"""

import asyncio
import importlib
import importlib.abc
import os
import pkgutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import cryptography.hazmat.primitives.hpke
import filelock
import msgpack
import psutil
import pydantic
import rich.console
import safetensors.torch
import torch
import torch._dynamo
import torch.optim.adamw
import torch.utils._python_dispatch
import typer
import zmq.asyncio

MODULES = {"resource", "fcntl", "pwd", "grp", "termios", "posix_ipc"}
NAMES: dict[Any, tuple[str, ...]] = {
    os: (
        *("splice", "fork", "forkpty", "fchmod", "geteuid", "getuid", "getegid", "getgid", "pread", "pwrite", "pipe2"),
        *("memfd_create", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_SYNC", "nice"),
        *("fdatasync", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "getloadavg", "killpg", "setsid"),
        *("eventfd", "copy_file_range", "sendfile", "preadv", "pwritev", "uname", "sysconf", "mkfifo"),
    ),
    signal: ("SIGTSTP", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGQUIT", "SIGPIPE"),
    socket: (
        *("SO_REUSEPORT", "TCP_INFO", "TCP_USER_TIMEOUT", "TCP_CONGESTION", "TCP_QUICKACK", "TCP_CORK"),
        *("MSG_NOSIGNAL", "MSG_DONTWAIT", "AF_NETLINK", "SO_BINDTODEVICE"),
    ),
}
RUN = """
[run]
name = "elsewhere"
rounds = 2
[recipe]
name = "own"
[data]
source = "own"
[access]
admission = "open"
[round]
tokens = 8
"""


class Absent(importlib.abc.MetaPathFinder):
    """Finds no module of those."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def refuse(*_: object) -> None:
    raise NotImplementedError


@contextmanager
def no_proc() -> Iterator[None]:
    """Files below /proc and /sys are not there."""
    opened = os.open

    def look(path: Any, *arguments: Any, **more: Any) -> int:
        if str(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(path)
        return opened(path, *arguments, **more)

    os.open = look
    try:
        yield
    finally:
        os.open = opened


class Without:
    """A module without some of its names."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name in NAMES[self._module]:
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")
        return getattr(self._module, name)


@contextmanager
def taken_away() -> Iterator[None]:
    """Take all that away from everybody while modules of Shoal are imported, and then from these."""
    sys.meta_path.insert(0, Absent())
    kept_modules = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    kept = {
        module: {name: vars(module)[name] for name in names if name in vars(module)} for module, names in NAMES.items()
    }
    for module, names in kept.items():
        for name in names:
            delattr(module, name)
    yield
    for module, values in kept.items():
        vars(module).update(values)
    sys.modules.update(kept_modules)
    sys.meta_path.pop(0)
    for name, ours in list(sys.modules.items()):
        if name.startswith("shoal."):
            for held, value in list(vars(ours).items()):
                if isinstance(value, ModuleType) and value in NAMES:
                    setattr(ours, held, Without(value))
    sys.modules["shoal.swarm.transport.tcp.sockets"]._IS_LINUX = False  # type: ignore[attr-defined]
    asyncio.SelectorEventLoop.add_signal_handler = refuse  # type: ignore[method-assign, assignment]


def import_all() -> int:
    import shoal.compression
    import shoal.peer
    import shoal.swarm

    count = 0
    for room in (shoal.compression, shoal.swarm, shoal.peer):
        for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            # Integrations import their frameworks, which may want what was taken away.
            if found.name.rpartition(".")[2] != "__main__" and ".integrations." not in found.name:
                importlib.import_module(found.name)
                count += 1
    return count


async def hosted(folder: Path, ready: "asyncio.Queue[str]") -> None:
    from shoal.peer.cli.host import HostOptions, host

    path = folder / "run.toml"
    path.write_text(RUN)
    options = HostOptions(None, folder / "host", ("127.0.0.1", 0), relay=False)
    await host([path], options, lambda started: ready.put_nowait(str(started.invite)), lambda _: None)


def member(invite: str, folder: Path, value: float) -> list[float]:
    import numpy as np

    from shoal.peer.array_averager import ArrayAverager
    from shoal.peer.options import SessionOptions

    options = SessionOptions(folder / "identity", folder / "runs", bind=("127.0.0.1", 0), checkpoints=None)
    means: list[float] = []
    arrays = {"w": np.full(40_000, value, np.float32)}
    with ArrayAverager.join(invite, arrays, options) as averager:
        while (mean := averager.average(arrays, 4)) is not None:
            means.append(float(mean["w"].mean()))
    return means


async def run(folder: Path) -> None:
    ready: asyncio.Queue[str] = asyncio.Queue()
    hosting = asyncio.create_task(hosted(folder, ready))
    async with asyncio.timeout(100):
        waiting = asyncio.create_task(ready.get())
        await asyncio.wait([waiting, hosting], return_when=asyncio.FIRST_COMPLETED)
        if hosting.done():
            await hosting
        invite = await waiting
        both = [asyncio.to_thread(member, invite, folder / str(value), float(value)) for value in (1, 3)]
        means = await asyncio.gather(*both)
    hosting.cancel()
    print(means)
    assert all(means), "both members have got means"
    for found in means:
        assert all(1.0 <= one <= 3.0 for one in found), means


if __name__ == "__main__":
    needed = (cryptography.hazmat.primitives.hpke, filelock, msgpack, psutil, pydantic, rich.console, typer)
    assert all((*needed, safetensors.torch, torch, zmq.asyncio))
    with taken_away():
        print(f"{import_all()} modules")
    if "--run" in sys.argv:
        from shoal.swarm.system import run_loop

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, no_proc():
            run_loop(run(Path(folder)))
    print("as it should be", flush=True)
    os._exit(0)
