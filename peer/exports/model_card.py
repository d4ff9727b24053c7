"""The model card of an export: which run and state it is of, how it was trained, how to load it."""

from __future__ import annotations

import re

from shoal.peer.exports.about import ModelAbout, ModelOrigin
from shoal.swarm.protocol.run_file import RunFile

_MOST_CONTRIBUTORS = 1000


def model_card(about: ModelAbout, has_tokenizer: bool, architecture: str, precision: str) -> str:
    """Write the card, in Markdown. Nothing that people wrote into the run file is taken for markup."""
    origin, run = about.origin, about.origin.run
    lines = [
        *("---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- shoal", "---", ""),
        f"# {_plain(run.card.title or run.run.name)}",
        "",
        *([_plain(run.card.purpose), ""] if run.card.purpose else []),
        "Trained by volunteers on machines that nobody owns together, with Shoal.",
        "",
        *_table({**_origin_rows(origin), **_card_rows(run)}),
        "",
        "## How it was trained",
        "",
        *_table(_training_rows(run)),
        "",
        "## Load it",
        "",
        *_loading(has_tokenizer),
        "",
        f"Architecture {architecture}, numbers in {precision}. {_tokenizer_words(has_tokenizer)}",
    ]
    if about.buffers:
        lines += [
            "",
            f"Rounds average parameters. The model's buffers ({len(about.buffers)} of them, such as running "
            f"statistics) are of {about.buffers_of} and not averaged.",
        ]
    if origin.contributors is not None:
        lines += ["", "## Contributors", "", *_contributor_lines(origin)]
    return "\n".join(lines) + "\n"


def _origin_rows(origin: ModelOrigin) -> dict[str, str]:
    held_out = {}
    if origin.held_out is not None:
        figure = origin.held_out
        who = "agreed on by validators" if figure.standing == "agreed" else "measured by one validator"
        held_out["held-out loss"] = f"{figure.loss:.4f} nats a token, of version {figure.version:,}, {who}"
    return {
        "run": _plain(origin.run.run.name),
        "run hash": f"`{origin.run.hash.hex()}`",
        "rounds": f"{origin.rounds:,}",
        "tokens": f"{origin.tokens:,}",
        "anchor version": f"{origin.version:,}",
        **held_out,
        "head of the verdict chain": f"`{origin.chain.hex()}`" if origin.chain is not None else "none yet",
    }


def _card_rows(run: RunFile) -> dict[str, str]:
    rows = {"licence": run.card.licence, "homepage": run.card.homepage}
    return {name: _plain(text) for name, text in rows.items() if text}


def _training_rows(run: RunFile) -> dict[str, str]:
    codec = run.averaging.codec
    rows = {
        "recipe": run.recipe.name,
        "data": run.data.source,
        "algorithm": run.algorithm,
        "tokens of a round": f"{run.round.tokens:,}",
        "outer optimizer": f"{run.outer.optimizer}, learning rate {run.outer.lr:g}",
        "codec": codec if isinstance(codec, str) else str(codec.get("name")),
        "schedule": run.schedule.kind,
        "stages": "one" if run.pipeline is None else str(run.pipeline.stages),
    }
    if run.algorithm != "virtual_batch":
        rows["inner optimizer"] = f"{run.inner.optimizer}, learning rate {run.inner.lr:g}"
    return {name: _plain(text) for name, text in rows.items()}


def _loading(has_tokenizer: bool) -> list[str]:
    model = 'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    if not has_tokenizer:
        return ["```python", "from transformers import AutoModelForCausalLM", "", model, "```"]
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        model,
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        'inputs = tokenizer("def ", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))",
        "```",
    ]


def _tokenizer_words(has_tokenizer: bool) -> str:
    return "" if has_tokenizer else "The tokenizer is the one that made the run's corpus; it is not in this folder."


def _contributor_lines(origin: ModelOrigin) -> list[str]:
    found = origin.contributors
    assert found is not None
    ordered = sorted(found.rounds.items(), key=lambda one: (-one[1], one[0]))
    head = f"Peers whose work is in the committed rounds {found.first:,} to {max(0, origin.rounds - 1):,}:"
    lines = [head, "", "| peer | rounds |", "| --- | --- |"]
    lines += [f"| `{peer}` | {count:,} |" for peer, count in ordered[:_MOST_CONTRIBUTORS]]
    more = len(ordered) - _MOST_CONTRIBUTORS
    return [*lines, "", f"And {more:,} more."] if more > 0 else lines


def _table(rows: dict[str, str]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())]


def _plain(text: str) -> str:
    """The text on one line, with everything escaped that Markdown or HTML would take for markup."""
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>#|~!&$])", r"\\\1", one_line)
