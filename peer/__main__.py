"""``python -m shoal.peer`` is ``shoal``."""

from shoal.peer.command import main

main()
