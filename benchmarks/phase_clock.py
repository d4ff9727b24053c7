"""Cost of timing a member's phases, beside a step of a small model: two changes of the phase a step."""

from __future__ import annotations

import time

import torch
from common import parser, publish
from torch import nn

from shoal.swarm.averaging.phase_clock import PhaseClock

_STEPS = 20_000


def clock_s(steps: int) -> float:
    """Return the processor seconds that the clock takes for a step, as a training loop uses it."""
    clock = PhaseClock()
    began_s = time.process_time()
    for _ in range(steps):
        clock.train("data")
        clock.train("compute")
    clock.end_round(0)
    return (time.process_time() - began_s) / steps


def step_s(width: int, batch: int) -> float:
    """Return the processor seconds of a step of a model of two layers on one thread."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(batch, width)
    took_s = []
    for _ in range(20):
        began_s = time.process_time()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        took_s.append(time.process_time() - began_s)
    return sorted(took_s)[len(took_s) // 2]


def main() -> None:
    options = parser(__doc__)
    chosen = options.parse_args()
    cost_s = min(clock_s(_STEPS) for _ in range(3))
    rows = []
    for width, batch in ((64, 16), (256, 64), (1024, 64)):
        of_step_s = step_s(width, batch)
        rows.append(
            {
                "width": width,
                "batch": batch,
                "step ms": 1000 * of_step_s,
                "clock us": 1e6 * cost_s,
                "share": cost_s / of_step_s,
            }
        )
    publish("Timing of phases", rows, {"share_of_smallest_step": rows[0]["share"]}, chosen.json)


if __name__ == "__main__":
    main()
