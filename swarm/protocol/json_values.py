"""JSON of messages and records, for programs that read what people see."""

from __future__ import annotations

from typing import Any

from shoal.swarm.protocol.messages import CoordinatorToPeerStatus


def jsonable(value: Any) -> Any:
    """Convert a value to JSON types: bytes to hexadecimal, tuples to lists."""
    match value:
        case bytes():
            return value.hex()
        case dict():
            return {key: jsonable(one) for key, one in value.items()}
        case list() | tuple():
            return [jsonable(one) for one in value]
        case _:
            return value


def status_json(status: CoordinatorToPeerStatus) -> dict[str, Any]:
    """Convert the status to JSON, with digests as hexadecimal."""
    plain: dict[str, Any] = jsonable(status.model_dump())
    return plain
