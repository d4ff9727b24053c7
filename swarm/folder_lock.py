"""One coordinator a folder: a lock that the system lets go of when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from shoal.swarm.errors import StorageError


class FolderLock:
    """This process alone writes to a folder's journal; the system lets go of the lock when the process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises ``StorageError`` when another process has it, and ``OSError``."""
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise StorageError(f"{folder}: another coordinator writes to this journal: end one of the two") from None
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
