"""``shoal host`` whose supervisor restarts it MOST times: ``impatient_host.py MOST PAUSE_S host RUN.toml …``.

The first pause before a restart is PAUSE_S.
"""

import sys

from shoal.peer.cli.supervisor import Restarts, supervise

if __name__ == "__main__":
    _, most, pause_s, *arguments = sys.argv
    sys.exit(supervise(arguments, Restarts(int(most), first_pause_s=float(pause_s))))
