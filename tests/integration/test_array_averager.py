"""Averaging only: arrays in, means out, on real sockets; with members that die."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tests.integration.harness import ROUNDS_S, START_S, Swarm, run_toml

from shoal.peer.array_averager import ArrayAverager
from shoal.peer.options import SessionOptions
from shoal.swarm.errors import ModelMismatch, UserError

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_learns(swarm: Swarm) -> None:
    host = swarm.host((EXAMPLES / "average.toml").read_text())
    script = [sys.executable, str(EXAMPLES / "numpy_average.py"), host.invite]
    members = []
    for name in ("1", "2"):
        own = ["--identity", f"{swarm.folder}/{name}.id", "--state", f"{swarm.folder}/{name}", "--seed", name]
        members.append(swarm.command(name, *script, *own))
    for member in members:
        assert member.exit_code(START_S + ROUNDS_S) == 0, member.tail()
    lines = [[line for line in member.text().splitlines() if line.startswith("error")] for member in members]
    # Both apply the very same means.
    assert lines[0][-1] == lines[1][-1]
    assert float(lines[0][-1].split()[1]) < 0.2


def test_alone_it_gives_back_what_it_got(swarm: Swarm) -> None:
    toml = run_toml(codec="float32", tokens=10, max_s=3).replace('name = "gpt"', 'name = "own"')
    head, _, rest = toml.partition("[recipe.settings]")
    host = swarm.host(head + rest[rest.index("[data]") :].replace('"stdlib"', '"own"'))
    options = SessionOptions(identity=swarm.folder / "id", state=swarm.folder / "state", bind=("127.0.0.1", 0))
    arrays = {"layer.w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float64(0.5)}
    with ArrayAverager.join(host.invite, arrays, options) as averager:
        for factor in (1.0, -2.0):
            given = {name: array * factor for name, array in arrays.items()}
            means = averager.average(given, weight=7)
            assert means is not None
            for name, array in given.items():
                assert np.array_equal(means[name], np.asarray(array, np.float32)), name
        with pytest.raises(UserError, match=r"expected layer\.w, b"):
            averager.average({"b": arrays["b"]})
        with pytest.raises(UserError, match=r"b: expected the shape \(\), not \(2,\)"):
            averager.average({"layer.w": arrays["layer.w"], "b": np.zeros(2)})
        with pytest.raises(UserError, match=r"layer\.w: holds NaN"):
            averager.average({"layer.w": arrays["layer.w"] * np.nan, "b": arrays["b"]})
        with pytest.raises(UserError, match="weight"):
            averager.average(arrays, weight=0)
    other = SessionOptions(identity=swarm.folder / "other", state=swarm.folder / "state", bind=("127.0.0.1", 0))
    with pytest.raises(ModelMismatch):
        ArrayAverager.join(host.invite, {"w": np.zeros(3)}, other)
