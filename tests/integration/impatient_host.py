"""``shoal host``, but its supervisor gives up soon: ``impatient_host.py MOST host RUN.toml …`` restarts it so often."""

import sys

from shoal.peer.cli.supervisor import Restarts, supervise

if __name__ == "__main__":
    _, most, *arguments = sys.argv
    sys.exit(supervise(arguments, Restarts(int(most), first_pause_s=0.05)))
