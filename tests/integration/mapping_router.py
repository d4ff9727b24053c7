"""``miniupnpd`` on a gateway of the NAT lab: the router of a home that maps ports."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.harness import end_with_parent
from tests.integration.nat_lab import NatLab

_TABLES = """
table inet filter {
  chain forward { type filter hook forward priority 10; policy accept; jump miniupnpd; }
  chain miniupnpd { }
  chain prerouting { type nat hook prerouting priority -100; policy accept; jump prerouting_miniupnpd; }
  chain prerouting_miniupnpd { }
  chain postrouting { type nat hook postrouting priority 100; policy accept; jump postrouting_miniupnpd; }
  chain postrouting_miniupnpd { }
}
"""
_SETTINGS = """
ext_ifname=wan
listening_ip=lan
enable_natpmp={pmp}
enable_upnp={upnp}
secure_mode=yes
system_uptime=yes
uuid=00000000-0000-0000-0000-0000000000{number:02x}
allow 1024-65535 0.0.0.0/0 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


def missing() -> str:
    """Return what a test with such a router lacks on this machine; empty if nothing."""
    return "" if shutil.which("miniupnpd") else "a router that maps ports needs the command miniupnpd"


@contextmanager
def mapping_router(lab: NatLab, machine: str, folder: Path, *, pmp: bool = True, upnp: bool = True) -> Iterator[Path]:
    """Run a router at a machine's gateway; yields its log. ``pmp``: it speaks PCP and NAT-PMP."""
    gateway = lab.gateway(machine)
    lab.spaces.feed(gateway, ("nft", "-f", "-"), _TABLES)
    lab.spaces.ip(machine, "route add 239.0.0.0/8 dev eth0")
    settings, log = folder / f"{gateway}.conf", folder / f"{gateway}.log"
    words = {True: "yes", False: "no"}
    settings.write_text(_SETTINGS.format(pmp=words[pmp], upnp=words[upnp], number=len(gateway)))
    command = [*lab.inside(gateway), "miniupnpd", "-d", "-f", str(settings), "-P", str(folder / f"{gateway}.pid")]
    with log.open("wb") as out:
        router = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=end_with_parent)
    try:
        yield log
    finally:
        router.terminate()
        try:
            router.wait(5)
        except subprocess.TimeoutExpired:
            router.kill()
            router.wait()
