"""Averaging only: arrays in, means out, on real sockets; with members that die."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tests.integration.harness import ROUNDS_S, START_S, Process, Swarm, eventually, run_toml

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


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "least"), [("jax", 70.0), ("keras", 85.0)])
def test_the_examples_of_frameworks_learn_and_a_late_joiner_begins_where_they_are(
    swarm: Swarm, framework: str, least: float
) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"needs the extra {framework}")
    host = swarm.host((EXAMPLES / "values.toml").read_text().replace("rounds = 20", ""))

    def member(name: str) -> Process:
        own = ["--identity", f"{swarm.folder}/{name}.id", "--state", f"{swarm.folder}/{name}", "--seed", name]
        return swarm.command(name, sys.executable, str(EXAMPLES / f"{framework}_average.py"), host.invite, *own)

    members = [member("1"), member("2")]
    for one in members:
        eventually("five rounds", lambda one=one: one.text().count("right") >= 5, START_S + ROUNDS_S, one.tail)  # type: ignore[misc]
    late = member("3")
    eventually("two rounds of the late one", lambda: late.text().count("right") >= 2, START_S + ROUNDS_S, late.tail)
    first, last = (
        [float(line.split()[1]) for line in one.text().splitlines() if line.startswith("right")]
        for one in (members[0], late)
    )
    assert first[4] > first[0]
    assert min(last) >= least, "it begins with what the others have learned, which no first weights can"


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
        with pytest.raises(UserError, match=r"expected b, layer\.w, not b"):
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
