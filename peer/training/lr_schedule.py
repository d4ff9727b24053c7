"""Learning-rate schedule as a function of the run's global tokens, so that peers of every speed agree on it.

It does not depend on local steps, whose number differs among the peers of a round."""

from __future__ import annotations

import math

from shoal.swarm.protocol.run_file import RunFile, ScheduleSection

WARMUP_START = 0.01
"""Factor at zero tokens: small, but not zero, since the first round would contribute nothing."""


def run_lr_factor(run: RunFile, tokens: int) -> float:
    """Return the factor after so many tokens of the run.

    In a run that starts from a checkpoint the schedule continues at the checkpoint's tokens and ends with the run.
    """
    before, total = run.start.tokens if run.start else 0, run.run.tokens
    return lr_factor(run.schedule, None if total is None else before + total, before + tokens)


def lr_factor(schedule: ScheduleSection, total_tokens: int | None, tokens: int) -> float:
    """Return the factor on the learning rate after ``tokens`` global tokens.

    It rises linearly from ``WARMUP_START`` to 1 at ``warmup_tokens``; then it stays (``constant``), or falls along half
    a cosine (Loshchilov & Hutter 2017, SGDR, without restarts) or a line to ``final_factor`` at ``total_tokens``, and
    stays there. ``total_tokens``: may be None for ``constant`` only, which the run file's validation ensures.
    """
    if tokens < schedule.warmup_tokens:
        return WARMUP_START + (1.0 - WARMUP_START) * tokens / schedule.warmup_tokens
    if schedule.kind == "constant":
        return 1.0
    assert total_tokens is not None, "a decaying schedule without run.tokens passed the run file's check"
    decay_tokens = total_tokens - schedule.warmup_tokens
    # A run that is no longer than its warm-up has no decay: the factor falls to its end at once.
    progress = min(1.0, (tokens - schedule.warmup_tokens) / decay_tokens) if decay_tokens > 0 else 1.0
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1.0 - progress
    return schedule.final_factor + (1.0 - schedule.final_factor) * remaining


def round_lr_factor(run: RunFile, tokens_before: int, round_tokens: int) -> float:
    """Return the factor on the outer learning rate of a ``virtual_batch`` round, the same on every machine.

    ``tokens_before``: of the run when the round began; ``round_tokens``: that it has committed."""
    # Rounded coarsely, so that no two mathematical libraries disagree.
    factor = round(run_lr_factor(run, tokens_before) * 2**16) / 2**16
    return factor * _batch_factor(run.schedule, round_tokens)


def _batch_factor(schedule: ScheduleSection, round_tokens: int) -> float:
    """Return the factor for the size of a round's batch: linear (Goyal et al. 2017, arXiv:1706.02677) or by its square
    root (Krizhevsky 2014, arXiv:1404.5997; You et al. 2020, arXiv:1904.00962). Division and root are exactly
    rounded."""
    if schedule.reference_tokens is None:
        return 1.0
    ratio = round_tokens / schedule.reference_tokens
    return math.sqrt(ratio) if schedule.scaling == "sqrt" else ratio
