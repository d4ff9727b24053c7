"""The run files of ``shoal demo``: small models on the standard library, whole ones by a preset or one in stages."""

from __future__ import annotations

from shoal.swarm.errors import UserError

CONTEXT = 128
BATCH = 8
_STEPS_A_ROUND = 15

_RUN_TOML = """\
# Written by `shoal demo`: {peers} peers train a small model on the standard library of this Python.
algorithm = "{preset}"

[run]
name = "demo"
seed = 0
max_s = {max_s:.1f}

[recipe]
name = "gpt"
settings = {{ layers = 2, width = 192, heads = 4, context = {context} }}

[data]
source = "stdlib"

[inner]
optimizer = "adamw"
lr = 2e-3
betas = [0.9, 0.95]
weight_decay = 0.1
clip_norm = 1.0
batch_samples = {batch}

[schedule]
kind = "constant"
warmup_tokens = 81920

{preset_settings}

[round]
tokens = {round_tokens}  # {steps} steps of every peer
max_s = 20.0
patience_s = 6.0
"""

_PRESETS = {
    "diloco": """\
[averaging]
codec = "int8"

[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.9""",
    "sparseloco": """\
[averaging]
codec = { name = "topk", k = 64, values = "2bit", chunk = 4096 }
residual_decay = 0.95

[outer]
optimizer = "sgd"
lr = 1.0""",
}

STAGE_MEMORY = "94M"
"""Memory that each peer of a pipeline may use: enough for two blocks of the model and not for three."""

_BLOCKS_A_STAGE = 2
_ROUND_SAMPLES = 32
_MICRO_BATCH = 4

_ROUNDS_A_MINUTE = 25
_MOST_S_A_ROUND = 12.0
"""On a machine that others use, too, they take longer; then the run ends when all of them could have taken so long."""

_PIPELINE_TOML = """\
# Written by `shoal demo --pipeline`: a model that none of its peers can hold, on the standard library of this Python.
algorithm = "virtual_batch"

[run]
name = "demo"
seed = 0
rounds = {rounds}
max_s = {max_s:.1f}

[recipe]
name = "gpt"
settings = {{ layers = {layers}, width = 160, heads = 4, context = {context}, tie_embedding = false }}

[data]
source = "stdlib"

[pipeline]
stages = {stages}
micro_batch = {micro_batch}
activations = "int8"

[inner]
precision = "float32"

[averaging]
codec = "int8"

[outer]
optimizer = "adamw"
lr = 3e-3
betas = [0.9, 0.95]
weight_decay = 0.1

[schedule]
kind = "constant"
warmup_tokens = {warmup_tokens}  # {warmup_rounds} rounds

[round]
tokens = {round_tokens}  # {round_samples} samples
max_s = 60.0
patience_s = 5.0
"""
_WARMUP_ROUNDS = 10


def demo_run_toml(preset: str, peers: int, minutes: float) -> str:
    """The run file of a demo without stages. Raises ``UserError`` for an unknown preset."""
    if preset not in _PRESETS:
        raise UserError(f"--preset: expected one of {', '.join(_PRESETS)}, not {preset!r}")
    return _RUN_TOML.format(
        peers=peers,
        preset=preset,
        preset_settings=_PRESETS[preset],
        max_s=60.0 * minutes,
        context=CONTEXT,
        batch=BATCH,
        steps=_STEPS_A_ROUND,
        round_tokens=_STEPS_A_ROUND * BATCH * CONTEXT * peers,
    )


def pipeline_rounds(minutes: float) -> int:
    """As many rounds as so many minutes have on two cores that do nothing else."""
    return round(_ROUNDS_A_MINUTE * minutes)


def pipeline_run_toml(stages: int, rounds: int) -> str:
    """The run file of a demo in so many stages."""
    return _PIPELINE_TOML.format(
        rounds=rounds,
        max_s=_MOST_S_A_ROUND * rounds,
        layers=_BLOCKS_A_STAGE * stages,
        stages=stages,
        context=CONTEXT,
        micro_batch=_MICRO_BATCH,
        round_samples=_ROUND_SAMPLES,
        round_tokens=_ROUND_SAMPLES * CONTEXT,
        warmup_rounds=_WARMUP_ROUNDS,
        warmup_tokens=_WARMUP_ROUNDS * _ROUND_SAMPLES * CONTEXT,
    )
