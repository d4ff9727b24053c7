"""Local journals whose lease has been taken."""

from pathlib import Path

from shoal.swarm.coordinator.local_journal import Backup, LocalJournal


def leased(folder: Path, run_hash: bytes, run_toml: str, backup: Backup | None = None) -> LocalJournal:
    """A journal that can be written. Raises what ``LocalJournal.lease`` raises."""
    journal = LocalJournal(folder, run_hash, run_toml, backup)
    journal.lease()
    return journal
