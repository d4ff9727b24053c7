"""Make the pages of docs/ that are generated: run-file.md of the run file's models, events.md of the events' schema,
metrics.md of the table of metrics.

python docs/make_pages.py        (`make docs`)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.peer.event_schema import FIELDS_OF_ALL, HOST_EVENTS, PEER_EVENTS, EventKind
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.web.metrics import HOST_METRICS, NAMED_MEMBERS, PEER_METRICS, PROCESS_METRICS, RUN_METRICS, Metric

DOCS = Path(__file__).resolve().parent
_MADE = "<!-- Made by `make docs`; do not edit. -->"
_WRITTEN = ("start", "pins")
"""Sections that `shoal host` writes; people do not."""

_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "table"}
_UNITS = (("_s", "seconds"), ("tokens", "tokens"), ("samples", "samples"), ("micro_batch", "samples"))


def run_file_page() -> str:
    """docs/run-file.md."""
    schema = RunFile.model_json_schema()
    lines = [
        "# The run file",
        "",
        _MADE,
        "",
        "A run file is TOML. All that a run does is in it, and all peers check its hash. Only `run.name`,",
        "`recipe.name` and `round.tokens` are required always; `pipeline.micro_batch` belongs to `[pipeline]`, and",
        "`collective.values` to `[collective]`.",
        "",
        "| field | type | default | unit | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, field in schema["properties"].items():
        section = _section(schema, field)
        if section is None or name in _WRITTEN:
            kind = "table" if name in _WRITTEN else _type(field)
            lines.append(_row(name, kind, _default(field), "", field["description"]))
            continue
        required = section.get("required", ())
        for inner, about in section["properties"].items():
            deeper = _section(schema, about)
            for deep, what in deeper["properties"].items() if deeper is not None else ():
                lines.append(_row(f"{name}.{inner}.{deep}", _type(what), _default(what), "", what["description"]))
            if deeper is not None:
                continue
            default = "required" if inner in required else _default(about)
            lines.append(_row(f"{name}.{inner}", _type(about), default, _unit(inner), about["description"]))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| `" + cells[0] + "` | " + " | ".join(cell.replace("|", "\\|") for cell in cells[1:]) + " |"


def _section(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any] | None:
    for one in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        if "$ref" in one:
            found: dict[str, Any] = schema["$defs"][one["$ref"].rpartition("/")[2]]
            return found
    return None


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field or "const" in field:
        return ", ".join(f"`{json.dumps(one)}`" for one in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        pair = field.get("prefixItems")
        return f"array of {len(pair)} numbers" if pair else "array of texts"
    return _TYPES[field["type"]] + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    words = [
        f"{word} {int(field[key]) if field[key] == int(field[key]) else field[key]:,}"
        for key, word in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if key in field and abs(field[key]) < 2**60
    ]
    return f", {', '.join(words)}" if words else ""


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return "none" if default is None else f"`{json.dumps(default)}`"


def _unit(name: str) -> str:
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), "")


def events_page() -> str:
    """docs/events.md."""
    lines = [
        "# Events",
        "",
        _MADE,
        "",
        "`shoal join --log-json FILE` and `shoal host --log-json FILE` write one JSON object a line. Every event has:",
        "",
        *_fields(FIELDS_OF_ALL),
        "",
        "Other fields by event; one may be absent or null where it does not apply.",
        "",
        "Where the time of a round went is no event. `shoal status --json` has `timing` of the last one (seconds of",
        "its parts, the members' mean by phase, for whom they waited) and each member's `times`; [metrics](metrics.md)",
        "have both; `shoal trace` writes the spans themselves",
        "([what the phases are](user-guide.md#look-at-a-run-and-take-its-model)).",
        "",
        "## Of a peer",
        *_events(PEER_EVENTS),
        "",
        "## Of a host",
        *_events(HOST_EVENTS),
    ]
    return "\n".join(lines) + "\n"


def _events(kinds: Mapping[str, EventKind]) -> Iterator[str]:
    for name, kind in kinds.items():
        yield from ("", f"### `{name}`", "", f"{kind.meaning[0].upper()}{kind.meaning[1:]}.", "", *_fields(kind.fields))


def _fields(fields: Mapping[str, str]) -> list[str]:
    return ["| field | meaning |", "| --- | --- |", *(f"| `{name}` | {words} |" for name, words in fields.items())]


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        _MADE,
        "",
        "`shoal host --metrics` and `shoal join --metrics` serve these to Prometheus (extra `metrics`); so does the",
        "page (`--web`), at `/metrics`. How to get to a dashboard: [operations.md](operations.md#metrics-and-alerts).",
        "",
        "- Units are in the names; `_total` only grows while the process runs, and all else are gauges. What is not",
        "  known is absent. What members say of themselves (speed, bytes, name, device) is their own word.",
        "- All but those of the process have the label `run`, as a host may have several.",
        f"- At most {NAMED_MEMBERS} members have labels of their own: those here with the most committed tokens. The",
        '  gauges of all others are summed as `peer="other"`. Who has committed nothing is only counted.',
        "- Labels have no address, no invite and no key, at most 64 letters, and none that cannot be printed.",
        "",
        "## Of a run, by its host",
        "",
        *_metrics(RUN_METRICS),
        *_metrics(HOST_METRICS)[2:],
        "",
        "## Of a peer, by itself",
        "",
        *_metrics(PEER_METRICS),
        "",
        '`shoal_up`, `shoal_answer_seconds` and `shoal_disk_free_bytes` (`files="peer"`) are a peer\'s, too.',
        "",
        "## Of the process",
        "",
        *_metrics(PROCESS_METRICS),
    ]
    return "\n".join(lines) + "\n"


def _metrics(table: Iterable[Metric]) -> list[str]:
    rows = [_row(one.name, ", ".join(f"`{label}`" for label in one.labels), one.meaning) for one in table]
    return ["| metric | labels | meaning |", "| --- | --- | --- |", *rows]


PAGES = {"run-file.md": run_file_page, "events.md": events_page, "metrics.md": metrics_page}


if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make(), encoding="utf-8")
