"""Joiners and donors are killed at named steps of a download; the joiner gets the run's state all the same."""

import sys

import pytest
from tests.integration.harness import (
    CALM,
    DOOMED_MEMBER,
    HERE,
    KILLED,
    ROUNDS_S,
    START_S,
    Swarm,
    check_journal,
    check_parity,
    eventually,
    finish,
    run_toml,
)

pytestmark = pytest.mark.integration

STILL = (sys.executable, str(HERE / "slow_member.py"), "3600")
"""``shoal`` that never gets to the end of a step: the round stays as it is, and its state is served."""

TRIES = 4
"""Joiners until one asks the doomed donor for a second chunk; mostly the first does."""

WIDTH = 352
"""The state has seven chunks. It is fetched where two rounds have no fewer bytes, so they go as float32."""


def test_a_killed_joiner_goes_on_where_it_was(swarm: Swarm) -> None:
    # A round closes by tokens, so that none does once its only member stands still.
    host = swarm.host(run_toml(width=WIDTH, codec="float32", tokens=512, max_s=3600))
    donor = swarm.member(host.invite, "donor")
    donor.committed(after=donor.committed(within_s=START_S + ROUNDS_S)["round"])
    donor.leave()
    donor.command = [*STILL, *donor.command[donor.command.index("join") :]]
    donor.start()
    version = donor.event("synced", START_S)["anchor_version"]
    assert version > 0

    armed = swarm.folder / "armed"
    armed.touch()
    joiner = swarm.member(host.invite, "joiner", launcher=(*DOOMED_MEMBER, "fetching", "5", str(armed)))
    assert joiner.exit_code(START_S + ROUNDS_S) == KILLED, joiner.tail()
    (left,) = joiner.folder.glob("state/*/*/incoming/*")
    joiner.command = [*CALM, *joiner.command[joiner.command.index("join") :]]
    joiner.start()
    fetched = joiner.event("state_fetched", START_S + ROUNDS_S)
    assert fetched["anchor_version"] == version
    assert fetched["chunks"] == 7
    assert fetched["resumed"] == 4, "what was written is not asked for again"
    assert sum(fetched["donors"].values()) == 3
    joiner.event("synced", anchor_version=version)
    assert not left.exists(), "it is not needed any more"
    donor.kill()
    joiner.committed()
    joiner.leave()
    host.stop()
    check_parity(host, [donor, joiner])
    check_journal(host)


def test_a_donor_is_killed_in_the_midst_of_a_download(swarm: Swarm) -> None:
    host = swarm.host(run_toml(width=WIDTH, codec="float32"))
    armed = swarm.folder / "armed"
    other = swarm.member(host.invite, "other")
    doomed = swarm.member(host.invite, "doomed", launcher=(*DOOMED_MEMBER, "sharing", "2", str(armed)))
    for member in (other, doomed):
        member.committed(after=member.committed(within_s=START_S + ROUNDS_S)["round"])
    armed.touch()
    joiners = []
    while doomed.running:
        assert len(joiners) < TRIES, "every joiner got all from the other donor"
        joiner = swarm.member(host.invite, f"joiner{len(joiners)}")
        joiners.append(joiner)
        eventually(
            "the donor dies, or the joiner has its state from the other one",
            lambda joiner=joiner: not doomed.running or bool(joiner.events("synced")),  # type: ignore[misc]
            START_S + ROUNDS_S,
            swarm.tails,
        )
    assert doomed.exit_code(START_S) == KILLED, doomed.tail()
    joiner.committed(within_s=START_S + ROUNDS_S)
    fetched = joiner.events("state_fetched")
    assert fetched[0]["donors"].keys() - {doomed.peer}
    assert joiner.events("donor_refused") == [], "to die is no lie"
    finish(host, [other, *joiners])
