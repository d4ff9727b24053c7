"""Network namespaces on this machine with links of a given rate and delay between them (``wan/wanshape.c``)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).parent / "wan" / "wanshape.c"
_NAMESPACES = Path("/run/netns")
_PREFIX = "shoal-wan"
_CLONE_NEWNET = 0x40000000
_GSO_FROM_MBIT = 300.0
"""From here on single packets take more CPU than two cores have."""

_TICK_US = 500
_END_S = 5.0


class NoShapedLinks(Exception):
    """This machine cannot make them; the message says what is missing."""


@dataclass(frozen=True)
class Site:
    """One namespace, and the address that it has on its link."""

    namespace: str
    address: str


def check_machine() -> None:
    """Raises ``NoShapedLinks``."""
    missing = [
        what
        for what, is_here in (
            ("Linux network namespaces", hasattr(os, "uname") and os.uname().sysname == "Linux"),
            ("root (try sudo)", hasattr(os, "geteuid") and os.geteuid() == 0),
            ("/dev/net/tun", Path("/dev/net/tun").exists()),
            ("the command ip (iproute2)", shutil.which("ip") is not None),
            ("gcc", shutil.which("gcc") is not None),
        )
        if not is_here
    ]
    if missing:
        raise NoShapedLinks(f"shaped links need {', '.join(missing)}")


def build() -> Path:
    """Compile on first use, and when the source is newer. Raises ``NoShapedLinks``."""
    program = _SOURCE.parent / "build" / "wanshape"
    if not program.exists() or program.stat().st_mtime < _SOURCE.stat().st_mtime:
        program.parent.mkdir(exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")
        done = subprocess.run(["gcc", "-O2", "-o", str(fresh), str(_SOURCE)], capture_output=True, text=True)
        if done.returncode:
            raise NoShapedLinks(f"gcc cannot build {_SOURCE}:\n{done.stderr[-2000:]}")
        fresh.replace(program)
    return program


@contextmanager
def shaped_links(rates_mbit: Sequence[float], one_way_ms: float, queue_ms: float = 100.0) -> Iterator[list[Site]]:
    """A namespace for each rate, up and down alike, ``one_way_ms`` from every other; removed at the end.

    Raises ``NoShapedLinks``. What a killed process of ours has left behind goes first."""
    check_machine()
    program = build()
    _remove_leftovers()
    sites = [Site(f"{_PREFIX}-{os.getpid()}-{number}", f"10.77.0.{number + 1}") for number in range(len(rates_mbit))]
    try:
        for site in sites:
            _ip("netns", "add", site.namespace)
        lines = [f"gso {int(max(rates_mbit) >= _GSO_FROM_MBIT)}", f"tick_us {_TICK_US}"]
        for number, (site, rate) in enumerate(zip(sites, rates_mbit, strict=True)):
            lines.append(f"node n{number} {site.address} {site.namespace} {rate} {rate} {queue_ms}")
        lines.append(f"default {one_way_ms}")
        with _shaping(program, "\n".join(lines) + "\n"):
            yield sites
    finally:
        for site in sites:
            with suppress(NoShapedLinks):
                _ip("netns", "del", site.namespace)


@contextmanager
def _shaping(program: Path, config: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.conf"
        path.write_text(config)
        process = subprocess.Popen(
            [str(program), str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first.startswith("ready"):
                raise NoShapedLinks(f"wanshape did not start: {first.strip() or 'it said nothing'}")
            yield
        finally:
            process.terminate()
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def enter(namespace: str) -> None:
    """This thread, and all that it starts, is in that namespace from now on: before any socket or thread is made."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise NoShapedLinks(f"cannot enter {namespace}: {os.strerror(number)}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoShapedLinks(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _remove_leftovers() -> None:
    for path in _NAMESPACES.glob(f"{_PREFIX}-*-*"):
        owner = path.name.removeprefix(f"{_PREFIX}-").split("-")[0]
        if not Path(f"/proc/{owner}").exists():
            with suppress(NoShapedLinks):
                _ip("netns", "del", path.name)
