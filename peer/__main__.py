"""``python -m shoal.peer`` is ``shoal``."""

from shoal.peer.cli import main

main()
