"""The first member defines nothing: model, data and first state are pinned before the invite is printed."""

import sys
from operator import itemgetter
from pathlib import Path

import pytest
from tests.integration.harness import (
    LEAVE_S,
    ROUNDS_S,
    SHOAL,
    START_S,
    Event,
    Swarm,
    check_parity,
    eventually,
    run_toml,
)

from shoal.swarm.errors import CorpusError, ModelMismatch, RecipeError
from shoal.swarm.protocol.run_file import load_run_file

pytestmark = pytest.mark.integration

LIAR = (sys.executable, str(Path(__file__).parent / "defining_member.py"))
PREPARING = "Preparing: building the model"


def test_the_first_member_cannot_define_the_run(swarm: Swarm) -> None:
    host = swarm.host(run_toml(), pins=True)
    assert PREPARING in host.text()
    pins = load_run_file(host.state / "run.toml")[1].pins
    assert pins is not None
    assert pins.state is not None

    liars = [swarm.member(host.invite, f"lies-{what}", (*LIAR, what)) for what in ("layout", "corpus", "state")]
    # Which difference is named depends on whether the run's model has been described by somebody else before.
    refusals = (
        (ModelMismatch, "this model is not the run's"),
        (CorpusError, "data differs from the data whose digest the run file pins"),
    )
    for liar, (error, words) in zip(liars, refusals, strict=False):
        assert liar.exit_code(START_S) == error.exit_code, liar.tail()
        assert words in liar.text()
    insisting = liars[-1]
    poisoned = insisting.event("synced", START_S)["digest"]
    assert poisoned != pins.state

    honest = swarm.member(host.invite, "honest")
    assert honest.event("synced", START_S)["digest"] == pins.state
    honest.committed(after=honest.committed(within_s=START_S + ROUNDS_S)["round"])

    def taken() -> Event | None:
        return next((one for one in insisting.events("synced") if one["digest"] != poisoned), None)

    version, digest = itemgetter("anchor_version", "digest")(eventually("it has the run's state", taken, ROUNDS_S))
    theirs = honest.event("committed", anchor_version=version)["digest"] if version else pins.state
    assert digest == theirs, "from the honest one"
    insisting.kill()

    host.kill()
    host.start()
    assert PREPARING not in host.text(), "what is pinned stays what it is"
    honest.committed(after=honest.last_round())
    honest.leave()
    host.stop()
    check_parity(host, [honest])


def test_a_run_that_was_prepared_elsewhere_is_hosted_as_it_is(swarm: Swarm) -> None:
    plain, out = swarm.run_file(run_toml(rounds=1)), swarm.folder / "prepared.toml"
    prepare = swarm.command("prepare", *SHOAL, "prepare", str(plain), "--out", str(out))
    assert prepare.exit_code(START_S) == 0, prepare.tail()
    host = swarm.host(out.read_text(), pins=True)
    assert PREPARING not in host.text()
    member = swarm.member(host.invite, "member")
    assert member.exit_code(START_S + ROUNDS_S) == 0, member.tail()
    assert member.committed()["round"] == 0
    host.stop()


def test_a_host_that_cannot_pin_says_so_and_what_else_can_be_done(swarm: Swarm) -> None:
    unknown = run_toml().replace('name = "gpt"', 'name = "elsewhere"').replace("reef", "unknown")
    path = swarm.run_file(unknown)
    command = (*SHOAL, "host", str(path), "--bind", "127.0.0.1:0", "--state", str(swarm.folder / "state"))
    refused = swarm.command("refused", *command)
    assert refused.exit_code(START_S) == RecipeError.exit_code, refused.tail()
    assert "RecipeError: recipe.name: 'elsewhere' is not installed here" in refused.text()
    assert "--no-pins" in refused.text()
    assert not (swarm.folder / "state").exists(), "nothing has begun"

    hosts = [swarm.host(unknown, "unpinned"), swarm.host(unknown.replace("elsewhere", "own"), "own", pins=True)]
    for host in hosts:
        assert "Pins    none: the first member to join defines" in host.text()
        assert PREPARING not in host.text()
        host.interrupt()
        assert host.exit_code(LEAVE_S) == 0


def test_a_pipelines_layers_and_data_are_pinned(swarm: Swarm) -> None:
    staged = run_toml(rounds=1, algorithm="virtual_batch", tokens=40 * 32, max_s=120).replace(
        "context = 32", "context = 32\ntie_embedding = false"
    )
    host = swarm.host(staged + "[pipeline]\nstages = 2\nmicro_batch = 2\n", pins=True)
    pins = load_run_file(host.state / "run.toml")[1].pins
    assert pins is not None
    assert pins.layers is not None
    for what, error in (("layout", ModelMismatch), ("corpus", CorpusError)):
        liar = swarm.member(host.invite, f"lies-{what}", (*LIAR, what))
        assert liar.exit_code(START_S) == error.exit_code, liar.tail()
    honest = swarm.member(host.invite, "honest")
    assert honest.exit_code(START_S + ROUNDS_S) == 0, honest.tail()
    assert honest.committed()["round"] == 0
    host.stop()
