"""Memory that all ranks of an island share: the image of the parameters, by which values get to the ranks and back.

Each rank reads and writes its own shards in it, so nothing is gathered on a device, and the machine has one copy,
however many ranks there are."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shoal.peer.island.group import Island
from shoal.swarm.errors import StorageError, UserError


class SharedImage:
    """``values``: (n,) float32 for the parameters; ``scratch``: (k,) float32 for one tensor of an optimizer."""

    def __init__(self, island: Island, elements: int, scratch_elements: int) -> None:
        """``elements``, ``scratch_elements``: the same on all ranks, which make it together.

        Raises ``StorageError``, ``IslandBroken``, and ``UserError`` for ranks on several machines."""
        size = max(1, elements + scratch_elements)
        if island.leads:
            path, token = _create(4 * size)
            island.send_bytes(json.dumps([str(path), token]).encode())
        else:
            text, token = json.loads(island.receive_bytes())
            path = Path(text)
        if token not in _name_of(path):
            raise UserError(
                "the ranks of an island share memory, so all of them have to be on one machine: start an island on "
                "each machine instead, and they train in one run as several members"
            )
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32)
        island.barrier()
        if island.leads:
            _forget_name(path)
        self.values, self.scratch = memory[:elements], memory[elements : elements + scratch_elements]


def _create(size_bytes: int) -> tuple[Path, str]:
    """Make the memory; return a path to it for other processes of this user, and a token that its name has.

    Linux' is anonymous, so it ends with the last process that has it, even a killed one."""
    token = secrets.token_hex(16)
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create(f"shoal-island-{token}", os.MFD_CLOEXEC)
            path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor, name = tempfile.mkstemp(prefix=f"shoal-island-{token}")
            path = Path(name)
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        raise StorageError(f"no memory to share among the ranks of this island: {error}") from error
    return path, token


def _name_of(path: Path) -> str:
    try:
        return os.readlink(path) if path.is_symlink() else str(path) if path.exists() else ""
    except OSError:
        return ""


def _forget_name(path: Path) -> None:
    """Take the path away: all ranks have mapped the memory."""
    if path.is_symlink():
        os.close(int(path.name))
    else:
        with suppress(OSError):
            path.unlink()


def as_image_parts(tensors: Sequence[Tensor], values: Tensor) -> list[Tensor]:
    """Return the parts of an image, (n,), that are these tensors', in their shapes."""
    parts, at = [], 0
    for one in tensors:
        parts.append(values[at : at + one.numel()].view(one.shape))
        at += one.numel()
    return parts
