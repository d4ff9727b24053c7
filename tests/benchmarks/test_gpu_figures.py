"""Tests of benchmarks/gpu: MFU, ratios, and the stall of a round at a tiny size."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.peer.recipes.gpt import GptRecipe
from shoal.swarm.protocol.run_file import DataSection


def tiny() -> GptRecipe:
    settings = {"layers": 2, "width": 16, "heads": 2, "context": 16, "tie_embedding": False}
    return GptRecipe(settings, DataSection(source="stdlib"))


def test_mfu_counts_parameters_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    recipe = tiny()
    model = recipe.build_model(1)
    parameters = sum(one.numel() for one in model.parameters())
    local: Any = SimpleNamespace(precision="bfloat16", setup=SimpleNamespace(model=model))
    monkeypatch.setattr(gpu, "describe_device", lambda _: SimpleNamespace(name="NVIDIA A100-SXM4-80GB"))
    flops = 6 * parameters + 12 * 2 * 16 * 16
    assert gpu.mfu(recipe, local, torch.device("cpu"), 312e12 / flops / 2) == pytest.approx(0.5)
    local.precision = "float32"
    assert gpu.mfu(recipe, local, torch.device("cpu"), 1.0) is None
    local.precision = "bfloat16"
    monkeypatch.setattr(gpu, "describe_device", lambda _: SimpleNamespace(name="x86_64 CPU, 2 threads"))
    assert gpu.mfu(recipe, local, torch.device("cpu"), 1.0) is None


def test_ratios_are_those_of_their_rows() -> None:
    from gpu import ratios_of

    rows: list[dict[str, Any]] = [
        {"member / bare": 0.98},
        {"overlap": "false", "stall / copy": 1.4},
        {"overlap": "true", "stall / copy": 1.1},
    ]
    assert ratios_of(rows) == {
        "member_vs_bare_tokens_s": 0.98,
        "stall_vs_copy": 1.4,
        "stall_vs_copy_overlap": 1.1,
        "stages_vs_unsplit_tokens_s": None,
    }


def test_a_round_is_timed_with_and_without_overlap() -> None:
    from gpu import stalls

    options = argparse.Namespace(device=torch.device("cpu"), precision="float32", batch=2, stall_micro_batch=2, turns=1)
    plain, overlap = stalls(options, tiny())
    assert (plain["overlap"], overlap["overlap"]) == ("false", "true")
    for row in (plain, overlap):
        assert row["stall / copy"] == pytest.approx(row["stall ms"] / row["copy of the parameters ms"])
    assert plain["step meanwhile / alone"] is None
    assert overlap["step meanwhile / alone"] > 0
