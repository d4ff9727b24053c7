"""Peers train together on real sockets: parity, export, a late joiner, an own loop."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.harness import (
    FRESH,
    LEAVE_S,
    ROUNDS_S,
    SHOAL,
    START_S,
    Swarm,
    check_journal,
    check_parity,
    eventually,
    finish,
    held,
    run_toml,
)

from shoal.peer.checkpoints.store import CHECKPOINTS, folder_name
from shoal.peer.exports.model_file import read_model
from shoal.swarm.errors import Diverged, UserError

pytestmark = pytest.mark.integration

OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_three_peers_agree_bit_for_bit(swarm: Swarm) -> None:
    rounds = 8
    host = swarm.host(run_toml(rounds=rounds, tokens=12_000, max_s=60))
    gate = swarm.folder / "gate"
    gate.touch()
    members = swarm.members(host.invite, "a", "b", "c", launcher=("env", *held(gate)))
    for member in members:
        member.says("waits at the gate", START_S)
    status = swarm.command("status", *FRESH, "status", "--json", host.invite)
    assert status.exit_code(START_S) == 0, status.tail()
    shown = json.loads(status.text())
    assert shown["run"] == "reef"
    assert {one["name"] for one in shown["members"]} == {"a", "b", "c"}
    assert shown["members"][0]["device"]["kind"] == "cpu"
    gate.unlink()
    for member in members:
        assert member.exit_code(ROUNDS_S) == 0, member.tail()
    host.stop()
    digests = check_parity(host, members)
    verdicts = check_journal(host)
    assert sum(one.verdict.committed for one in verdicts) == rounds
    assert {member.events("left")[-1]["digest"] for member in members} == {digests[rounds]}
    together = [one for one in verdicts if one.verdict.plan and len(one.verdict.plan.members) == 3]
    assert together, "all three have averaged together"
    losses = [one.verdict.loss for one in verdicts if one.verdict.loss is not None]
    assert losses[-1] < losses[0] - 0.2


def test_everybody_is_told_that_training_has_diverged(swarm: Swarm) -> None:
    toml = run_toml(tokens=12_000, max_s=10).replace("lr = 2e-3", "lr = 1e6")
    host = swarm.host(toml)
    member = swarm.member(host.invite, "a", SHOAL)
    assert member.exit_code(START_S + ROUNDS_S) == Diverged.exit_code, member.tail()
    lost = host.event("member_lost", START_S, reason="diverged")
    assert "lower learning rate" in lost["trouble"]
    status = swarm.command("status", *FRESH, "status", "--json", host.invite)
    assert status.exit_code(START_S) == 0, status.tail()
    (shown,) = json.loads(status.text())["members"]
    assert (shown["left"], shown["trouble"]) == ("diverged", lost["trouble"])
    log = swarm.command("log", *FRESH, "log", host.invite)
    assert log.exit_code(START_S) == 0, log.tail()
    assert f"left (diverged): {lost['trouble']}" in log.text()
    host.stop()


def test_the_host_has_the_last_model_when_the_members_have_left(swarm: Swarm) -> None:
    host = swarm.host(run_toml(rounds=1, tokens=2_000, max_s=60, patience_s=20), extra=["--keep-model"])
    member = swarm.member(host.invite, "a")
    host.event("run_ended", START_S + ROUNDS_S, rounds=1)
    kept = host.event("model_kept", START_S)
    assert kept["path"] == str(host.state / "model.safetensors"), kept
    left = member.has_left()
    assert "Run finished: reef. The model: shoal export" in member.text()
    about = json.loads(Path(kept["path"]).with_suffix(".json").read_text())
    assert (about["anchor_version"], about["state_digest"]) == ("1", left["digest"])
    host.stop()


@pytest.mark.parametrize(("algorithm", "codec"), [("sparseloco", "topk"), ("diloco", "auto")])
def test_peers_agree_whatever_packs_their_contributions(swarm: Swarm, algorithm: str, codec: str) -> None:
    rounds = 4
    host = swarm.host(run_toml(rounds=rounds, tokens=12_000, max_s=60, algorithm=algorithm, codec=codec))
    gate = swarm.folder / "gate"
    gate.touch()
    members = swarm.members(host.invite, "a", "b", launcher=held(gate, 0.0))
    for member in members:
        member.says("waits at the gate", START_S)
    gate.unlink()
    for member in members:
        assert member.exit_code(ROUNDS_S) == 0, member.tail()
    host.stop()
    digests = check_parity(host, members)
    verdicts = check_journal(host)
    assert sum(one.verdict.committed for one in verdicts) == rounds
    assert {member.events("left")[-1]["digest"] for member in members} == {digests[rounds]}
    assert any(one.verdict.plan and len(one.verdict.plan.members) == 2 for one in verdicts)


def test_exports_of_the_live_run_and_of_a_saved_state_are_the_same(swarm: Swarm) -> None:
    # Held at the gate the member commits no round: the anchor stays the same while it is fetched, and until the end.
    gate = swarm.folder / "gate"
    host = swarm.host(run_toml(tokens=12_000, max_s=3600, patience_s=20))
    member = swarm.member(host.invite, "a", held(gate))
    member.event("committed", START_S + ROUNDS_S)
    gate.touch()
    member.says("waits at the gate")
    newest = f"**/{CHECKPOINTS}/{folder_name(member.last_round())}"
    eventually("the newest state is saved", lambda: [*member.folder.glob(newest)], ROUNDS_S)
    live, saved = swarm.folder / "live.safetensors", swarm.folder / "saved.safetensors"
    export = swarm.command("export", *FRESH, "export", "--run", host.invite, "--out", str(live))
    assert export.exit_code(START_S) == 0, export.tail()
    member.kill()
    export = swarm.command("export-saved", *FRESH, "export", "--run", str(member.folder), "--out", str(saved))
    generate = swarm.command("generate", *FRESH, "generate", str(live), "--prompt", "def ", "--tokens", "20")
    assert export.exit_code(START_S) == 0, export.tail()
    assert generate.exit_code(START_S) == 0, generate.tail()
    assert "def " in generate.text()
    one, other = load_file(live), load_file(saved)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    configs = [json.loads(path.with_suffix(".json").read_text()) for path in (live, saved)]
    assert configs[0] == configs[1]
    assert configs[0]["recipe"]["name"] == "gpt"


def test_an_export_in_bfloat16_is_the_rounded_anchor(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=3600, patience_s=20))
    members = swarm.members(host.invite, "a", "b")
    for member in members:
        member.event("synced", START_S)
    whole, half = swarm.folder / "whole.safetensors", swarm.folder / "half.safetensors"
    wanted = ("export", "--precision", "bfloat16", "--out", str(half), "--run")
    exports = [
        swarm.command("export", *SHOAL, "export", "--out", str(whole), "--run", host.invite),
        swarm.command("export-half", *SHOAL, *wanted, host.invite),
    ]
    for export in exports:
        assert export.exit_code(START_S) == 0, export.tail()
    one, rounded = load_file(whole), load_file(half)
    assert one.keys() == rounded.keys()
    assert all(torch.equal(rounded[name], one[name].bfloat16()) for name in one)
    read_model(half)
    again = swarm.command("export-again", *SHOAL, *wanted, host.invite)
    assert again.exit_code(START_S) == UserError.exit_code
    assert "exists already" in again.text()
    finish(host, members)


def test_a_late_joiner_gets_the_state_and_takes_part_in_the_next_round(swarm: Swarm) -> None:
    host = swarm.host(run_toml(patience_s=6.0))
    first = swarm.members(host.invite, "a", "b")
    version = min(member.committed(after=1)["anchor_version"] for member in first)
    late = swarm.member(host.invite, "late")
    synced = late.event("synced", START_S)
    assert synced["anchor_version"] >= version
    late.says("link carries about")  # it has probed
    taken = late.committed()
    for member in first:
        member.event("committed", round=taken["round"])
    verdicts = finish(host, [late, *first])
    before = [one.verdict for one in verdicts if one.verdict.committed and one.verdict.round < taken["round"]]
    missed = [one for one in before if one.anchor_version > synced["anchor_version"]]
    assert len(missed) <= 1, "the round it came into may close without it, the next one does not"


def test_an_own_training_loop(swarm: Swarm) -> None:
    pytest.importorskip("sklearn", reason="the example classifies scikit-learn's digits")
    toml = OWN_LOOP.with_name("digits.toml").read_text()
    host = swarm.host(toml)
    loops = []
    for label in ("a", "b"):
        where = swarm.folder / label
        options = ("--identity", str(where / "identity"), "--state", str(where / "state"))
        loops.append(swarm.command(label, sys.executable, str(OWN_LOOP), host.invite, *options))
    for loop in loops:
        eventually(f"{loop.label} commits a round", lambda loop=loop: "'committed'" in loop.text(), ROUNDS_S, loop.tail)
    for loop in loops:
        loop.interrupt()
    for loop in loops:
        loop.exit_code(LEAVE_S)
