"""Text of a run file as TOML: its limits and its syntax, checked before anything large is loaded or built."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from shoal.swarm.errors import RunFileError

MAX_RUN_FILE_BYTES = 200_000

_MAX_DOTS = 64
_PIECES = re.compile(r"[=\[\]{},]")


def read_run_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Read a run file; returns its text and its values, which are not validated. Raises ``RunFileError``."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RUN_FILE_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunFileError(f"{path}: cannot be read: {error}") from error
    return text, parse_run_toml(text, str(path))


def parse_run_toml(text: str, where: str) -> dict[str, Any]:
    """Parse the text of a run file. Raises ``RunFileError``, which names the file as ``where``."""
    if len(text.encode()) > MAX_RUN_FILE_BYTES:
        raise RunFileError(f"{where}: larger than {MAX_RUN_FILE_BYTES} bytes, the most that a run file may have")
    for line in text.splitlines():
        # The parser needs memory quadratic in the dots of one key, and run files come from other machines, too.
        if not line.lstrip().startswith("#") and any(piece.count(".") > _MAX_DOTS for piece in _PIECES.split(line)):
            raise RunFileError(f"{where}: a key with more than {_MAX_DOTS} dots: {line[:40]!r}…")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, arrays with thousands of levels
        raise RunFileError(f"{where}: not valid TOML: {error}") from error
