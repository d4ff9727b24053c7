"""Peers on a Ray cluster: one task a GPU, which runs ``shoal join`` and starts it again where that helps.

    SHOAL_INVITE="$(cat reef.invite)" python deploy/ray_peers.py --peers 8

Shoal has to be installed on the nodes. Peers find each other through the run, so Ray places and restarts tasks, and
does nothing else: its own trainers would make a group of a fixed size.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

import ray

DONE = (0, 26)
"""Exit codes at the end of the run."""

FINAL = (2, *range(10, 20), 21, 22, 24, 25, 50, 51, 53, 54, 55, 56, 57, 58, 59, 64, 130)
"""Exit codes after which starting again helps nobody."""

PAUSE_S = 30.0
LEAVING_S = 120.0


def take_part(invite: str, options: list[str]) -> int:
    """Run a peer until the run ends, or until only a person can help; returns its exit code."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as home:  # the same member as long as this task lives
        environment = os.environ | {"SHOAL_INVITE": invite, "SHOAL_HOME": home}
        while True:
            peer = subprocess.Popen([sys.executable, "-m", "shoal.peer", "join", *options], env=environment)
            try:
                code = peer.wait()
            except BaseException:  # the task is cancelled
                peer.terminate()
                peer.wait(LEAVING_S)
                raise
            if code in DONE or code in FINAL:
                return code
            time.sleep(PAUSE_S)


def main() -> int:
    """Start the peers and wait for them."""
    parser = argparse.ArgumentParser(description="Start peers of a Shoal run on a Ray cluster.")
    parser.add_argument("--peers", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=1.0, help="GPUs of each peer; 0 for peers on CPUs")
    parser.add_argument("--cpus", type=float, default=4.0, help="CPUs of each peer")
    arguments, options = parser.parse_known_args()
    invite = os.environ.get("SHOAL_INVITE", "")
    if not invite:
        parser.error("set SHOAL_INVITE to the run's invite: as an option all users of this machine would see it")
    ray.init()
    peer = ray.remote(num_gpus=arguments.gpus, num_cpus=arguments.cpus, max_retries=-1)(take_part)
    codes = ray.get([peer.remote(invite, options) for _ in range(arguments.peers)])
    print("exit codes:", *codes)
    return 0 if all(code in DONE for code in codes) else 1


if __name__ == "__main__":
    sys.exit(main())
