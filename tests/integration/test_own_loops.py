"""Own training loops as people write them, in real runs: every sample is trained once, and all agree on the anchor."""

import signal
from functools import partial

import pytest
from tests.integration.harness import ROUNDS_S, START_S, Swarm, eventually, finish
from tests.integration.own_loop_runs import host, loop, train, virtual_batch_host

from shoal.swarm.errors import ModelMismatch

pytestmark = pytest.mark.integration


def test_loss_scaling_and_accumulation_in_one_run(swarm: Swarm) -> None:
    hosting = host(swarm)
    loops = [loop(swarm, hosting.invite, kind) for kind in ("scaled", "accumulated")]
    train(hosting, loops)
    assert loops[0].events("scaled")[0]["skipped"] > 0


def test_a_scheduler_and_a_loop_that_fetches_ahead(swarm: Swarm) -> None:
    hosting = host(swarm, inner="lr = 0.5\nclip_norm = 1e-6")
    loops = [loop(swarm, hosting.invite, kind) for kind in ("scheduled", "ahead")]
    train(hosting, loops)
    rates = [one["rate"] for one in loops[0].events("rate")]
    assert len(rates) > 20, "each step was as long as its rate says, or the loop had failed"
    assert rates[0] > 0 == rates[-1]
    for one in loops:
        assert "inner.lr, inner.clip_norm of the run file has no effect in a training loop of your own" in one.text()


def test_a_data_loader_with_workers_beside_a_simple_loop(swarm: Swarm) -> None:
    hosting = host(swarm)
    loops = [loop(swarm, hosting.invite, kind) for kind in ("loaded", "simple")]
    train(hosting, loops)


@pytest.mark.parametrize("kind", ["ahead", "loaded"])
def test_samples_in_hand_are_dropped_and_counted_right_when_their_lease_is_lost(swarm: Swarm, kind: str) -> None:
    """The coordinator removes a loop that stands still, and gives its samples to others."""
    hosting = host(swarm)
    other, stopped = (loop(swarm, hosting.invite, one) for one in ("simple", kind))
    before = stopped.committed(within_s=START_S + ROUNDS_S)["round"]
    resyncs, removals = len(stopped.events("resync")), len(hosting.events("member_lost", peer=stopped.peer))
    stopped.send(signal.SIGSTOP)
    removed = partial(hosting.events, "member_lost", peer=stopped.peer)
    eventually("the host removes it", lambda: len(removed()) > removals, START_S, hosting.tail)
    stopped.send(signal.SIGCONT)
    eventually("it resyncs", lambda: len(stopped.events("resync")) > resyncs, START_S, stopped.tail)
    after = max(before, other.last_round())
    newest = max(one.committed(after=after)["round"] for one in (other, stopped))
    for one in (other, stopped):
        one.committed(after=newest)
    finish(hosting, [other, stopped])


def test_compiled_and_wrapped_modules_train_with_plain_ones(swarm: Swarm) -> None:
    hosting = host(swarm)
    loops = [loop(swarm, hosting.invite, kind) for kind in ("simple", "compiled", "distributed")]
    train(hosting, loops)


def test_workers_that_load_ahead_do_not_keep_a_virtual_batch_waiting(swarm: Swarm) -> None:
    hosting = virtual_batch_host(swarm)
    loops = [loop(swarm, hosting.invite, kind) for kind in ("virtual-loaded", "virtual")]
    verdicts = train(hosting, loops, rounds=20)
    assert all(one.verdict.tokens == 256 for one in verdicts if one.verdict.committed)


def test_an_adapter_is_trained_on_one_base_only(swarm: Swarm) -> None:
    hosting = host(swarm)
    loops = [loop(swarm, hosting.invite, kind) for kind in ("adapted", "adapted-bfloat16")]
    for one in loops:
        one.event("synced", START_S)
    other = loop(swarm, hosting.invite, "adapted-elsewhere")
    assert other.exit_code(START_S) == ModelMismatch.exit_code, other.tail()
    assert "this model is not the run's: its frozen parameters differ: 144 (" in other.text()
    assert "load the same base model" in other.text()
    train(hosting, loops)
