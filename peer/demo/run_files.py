"""Run files of ``shoal demo``: a small language model on the standard library, whole or in stages."""

from __future__ import annotations

from shoal.swarm.errors import UserError

_TOML = """\
# Written by `shoal demo`: a small model trained on the standard library of this Python.
algorithm = "{algorithm}"

[run]
name = "demo"
seed = 0
{ends}

[recipe]
name = "gpt"
settings = {{ {model}, heads = 4, context = 128 }}

[data]
source = "stdlib"

{sections}

[schedule]
kind = "constant"
warmup_tokens = {warmup_tokens}

[round]
tokens = {round_tokens}
{limits}
"""

_INNER = """\
[inner]
optimizer = "adamw"
lr = 2e-3
betas = [0.9, 0.95]
weight_decay = 0.1
clip_norm = 1.0
batch_samples = 8
"""
_PRESETS = {
    "diloco": """
[averaging]
codec = "int8"

[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.9""",
    "sparseloco": """
[averaging]
codec = { name = "topk", k = 64, values = "2bit", chunk = 4096 }
residual_decay = 0.95

[outer]
optimizer = "sgd"
lr = 1.0""",
}
_PEER_TOKENS = 15 * 8 * 128
"""Tokens of a round for each peer: 15 steps of 8 samples."""

STAGE_MEMORY = "46M"
"""Memory that each peer of a pipeline may use: enough for two blocks of the model and not for three."""

_STAGES = """\
[pipeline]
stages = {stages}
micro_batch = 4
activations = "int8"

[inner]
precision = "float32"

[averaging]
codec = "int8"

[outer]
optimizer = "adamw"
lr = 3e-3
betas = [0.9, 0.95]
weight_decay = 0.1"""
_STAGES_ROUND_TOKENS = 32 * 128

ROUNDS_PER_MINUTE = 25
"""Of a pipeline, on two cores that do nothing else."""
_MAX_S_PER_ROUND = 12.0
"""Rounds take longer where others use the cores too: the run ends when all of them could have taken so long."""


def averaging_toml(preset: str, peers: int, minutes: float) -> str:
    """The run file of a demo with whole models. Raises ``UserError`` for an unknown preset."""
    if preset not in _PRESETS:
        raise UserError(f"--preset: expected one of {', '.join(_PRESETS)}, not {preset!r}")
    return _TOML.format(
        algorithm=preset,
        ends=f"max_s = {60.0 * minutes:.1f}",
        model="layers = 2, width = 192",
        sections=_INNER + _PRESETS[preset],
        warmup_tokens=81_920,
        round_tokens=_PEER_TOKENS * peers,
        limits="max_s = 20.0\npatience_s = 6.0",
    )


def pipeline_toml(stages: int, rounds: int) -> str:
    """The run file of a demo with a model in stages, two blocks in each."""
    return _TOML.format(
        algorithm="virtual_batch",
        ends=f"rounds = {rounds}\nmax_s = {_MAX_S_PER_ROUND * rounds:.1f}",
        model=f"layers = {2 * stages}, width = 160, tie_embedding = false",
        sections=_STAGES.format(stages=stages),
        warmup_tokens=10 * _STAGES_ROUND_TOKENS,
        round_tokens=_STAGES_ROUND_TOKENS,
        limits="max_s = 60.0\npatience_s = 5.0",
    )
