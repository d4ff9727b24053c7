"""``python -m shoal.peer`` is ``shoal``."""

from shoal.peer.cli.command import main

main()
