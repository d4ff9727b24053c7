"""Readings of a run for a scrape: bounded in number, without addresses, and what the status says."""

from __future__ import annotations

from typing import Any

import pytest
from tests.swarm.web.samples import DEVICE, RUN, crowd, full_status, member, status, verdict

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.costs import run_costs
from shoal.swarm.protocol.evaluations import ClaimedLoss, EvaluationStatus, HeldOutFigure
from shoal.swarm.protocol.types import DeviceUse
from shoal.swarm.web.metrics import METRICS, NAMED_MEMBERS, Readings, exposition, label_text
from shoal.swarm.web.run_metrics import CommittedRoundFacts, HostFacts, named_members, run_readings

parser = pytest.importorskip("prometheus_client.parser")

HOSTILE = 'a"} 1\nshoal_loss{run="reef"} 0\\ \u202e10.0.0.1:7707'
NEWEST = CommittedRoundFacts.of(
    VerdictGiven(verdict=verdict(4, 3), elapsed_s=60.0, lost=()),
    VerdictGiven(verdict=verdict(3, 3, committed=False), elapsed_s=45.0, lost=()),
)


def scraped(readings: Any) -> dict[tuple[str, ...], float]:
    """By name and labels in the order of the table, as a reader of the text has them."""
    found: dict[tuple[str, ...], float] = {}
    for family in parser.text_string_to_metric_families(exposition(readings, "")[0].decode()):
        for sample in family.samples:
            labels = (sample.labels[label] for label in METRICS[sample.name].all_labels)
            assert found.setdefault((sample.name, *labels), sample.value) == sample.value
    return found


def test_a_scrape_says_what_the_status_says() -> None:
    told = status(
        [member(1, share=0.75), member(2, share=0.25, alive=False), member(3, synced=False, reachable=False)],
        rounds_undone=2,
        rounds_aborted=1,
        warning="the loss has risen",
    )
    facts = HostFacts(NEWEST, 600, False, 3, {"full": 2}, 10, 0.5, 12.0, {"host": 10**9})
    read = scraped(run_readings(RUN, told, facts))
    assert read["shoal_rounds_total", "reef", "committed"] == 4
    assert read["shoal_rounds_total", "reef", "undone"] == 2
    assert read["shoal_last_commit_timestamp_seconds", "reef"] == 1.7e9 + 40
    assert read["shoal_round_seconds", "reef"] == 15
    assert read["shoal_round_void_parts", "reef"] == 1
    assert read["shoal_trained_tokens_total", "reef"] == 1000
    assert read["shoal_committed_tokens", "reef"] == 400
    assert read["shoal_run_phase", "reef", "training"] == 1
    assert read["shoal_run_phase", "reef", "ended"] == 0
    assert read["shoal_state_agreed", "reef"] == 1
    assert read["shoal_loss_warning", "reef"] == 1
    states = {name: read["shoal_members", "reef", name] for name in ("synced", "catching_up", "gone")}
    assert states == {"synced": 1, "catching_up": 1, "gone": 1}
    assert read["shoal_members_reached", "reef", "not_at_all"] == 1
    assert read["shoal_member_share_ratio", "reef", member(1).peer] == 0.75
    assert read["shoal_member_round_share_ratio", "reef", member(1).peer] == pytest.approx(100 / 201)
    assert read["shoal_member_round_share_ratio", "reef", member(3).peer] == 0
    assert read["shoal_member_up", "reef", member(2).peer] == 0
    assert read["shoal_refused_joins_total", "reef", "full"] == 2
    assert read["shoal_backup_behind_seconds", "reef"] == 12
    assert read["shoal_disk_free_bytes", "reef", "host"] == 10**9
    assert ("shoal_target_tokens", "reef") not in read  # this run ends after rounds


def test_energy_is_each_member_s_word_and_absent_where_nothing_measures_it() -> None:
    use = DeviceUse(cpu=0.5, memory_used_bytes=1, gpu=0.75, power_w=310.5)
    told = status([member(1, use=use, energy_j=5e6), member(2)])
    told = told.model_copy(update={"costs": run_costs(RUN.cost, told.members, 400)})
    read = scraped(run_readings(RUN, told, HostFacts()))
    assert read["shoal_member_power_watts", "reef", member(1).peer] == 310.5
    assert read["shoal_member_energy_joules_total", "reef", member(1).peer] == 5e6
    assert read["shoal_member_gpu_busy_ratio", "reef", member(1).peer] == 0.75
    assert read["shoal_energy_joules", "reef"] == 5e6
    assert read["shoal_token_energy_joules", "reef"] == 5e6 / 400
    assert not [labels for name, *labels in read if "member_power" in name and member(2).peer in labels]
    nobody = {name for name, *_ in scraped(run_readings(RUN, status([member(2)]), HostFacts()))}
    assert not [name for name in nobody if "joules" in name or "watts" in name]


def test_what_is_not_known_is_absent_and_not_zero() -> None:
    read = scraped(run_readings(RUN, status(loss=None, state_digest=None), HostFacts()))
    names = {name for name, *_ in read}
    assert names.isdisjoint({"shoal_loss", "shoal_round_seconds", "shoal_backup_behind_seconds", "shoal_epoch"})
    assert read["shoal_state_agreed", "reef"] == 0
    assert read["shoal_run_waits", "reef"] == 1  # nobody is here


def test_members_beyond_the_named_ones_are_summed() -> None:
    members = crowd(NAMED_MEMBERS + 10)
    read = scraped(run_readings(RUN, status(members), HostFacts()))
    peers = {labels[1] for name, *labels in read if name == "shoal_member_share_ratio"}
    assert peers == {one.peer for one in members[10:]} | {"other"}  # those with the most tokens
    assert read["shoal_member_up", "reef", "other"] == 10
    assert read["shoal_member_share_ratio", "reef", "other"] == pytest.approx(10 / len(members))
    assert ("shoal_member_sent_bytes_total", "reef", "other") not in read  # a sum over others now and then others


def test_strangers_are_no_series() -> None:
    strangers = [member(number, tokens_committed=0, share=0.0) for number in range(1000)]
    assert named_members([*strangers, member(2000)]) == [member(2000)]
    assert len(run_readings(RUN, status(strangers), HostFacts())) < 60


def test_the_newest_held_out_figure_that_is_not_disputed() -> None:
    claims = tuple(ClaimedLoss(validator=member(one).peer, loss=2.5) for one in (1, 2))
    used = HeldOutFigure(
        version=4, round=3, tokens=9, at_s=1.0, loss=2.5, standing="agreed", counts=True, claims=claims, accuracy=0.4
    )
    later = used.model_copy(update={"version": 5, "loss": None, "standing": "disputed", "accuracy": None})
    told = status([member(1)], evaluation=EvaluationStatus(figures=(used,)))
    read = scraped(run_readings(RUN, told, HostFacts()))
    assert read["shoal_held_out_loss", "reef"] == 2.5
    assert (read["shoal_held_out_version", "reef"], read["shoal_held_out_validators", "reef"]) == (4, 2)
    assert read["shoal_held_out_accuracy_ratio", "reef"] == 0.4
    told = status([member(1)], evaluation=EvaluationStatus(figures=(used, later)))
    read = scraped(run_readings(RUN, told, HostFacts()))
    assert (read["shoal_held_out_version", "reef"], read["shoal_held_out_validators", "reef"]) == (4, 0)


def test_a_large_run_has_a_bounded_number_of_series() -> None:
    few, many = (len(run_readings(RUN, full_status(crowd(number)), HostFacts())) for number in (100, 4000))
    assert few == many


def test_hostile_names_stay_labels() -> None:
    device = DEVICE.model_copy(update={"name": HOSTILE})
    told = full_status([member(1, name=HOSTILE[:64], device=device)])
    text = exposition(run_readings(RUN, told, HostFacts()), "")[0].decode()
    assert "10.0.0." not in text
    assert "\u202e" not in text
    read = scraped(run_readings(RUN, told, HostFacts()))
    assert read["shoal_loss", "reef"] == 2.25
    (found,) = [labels for name, *labels in read if name == "shoal_member_info"]
    assert found[2].startswith('a"} 1·shoal_loss')
    assert all(len(label) <= 64 for label in found)


def test_relays_are_named_by_whose_they_are() -> None:
    read = scraped(run_readings(RUN, full_status([member(1)]), HostFacts()))
    assert read["shoal_relay_carried_bytes_total", "reef", "host"] == 4000
    assert read["shoal_relay_up", "reef", member(1).peer] == 0


def test_long_and_strange_labels_cost_little() -> None:
    assert len(label_text("x" * 10**6)) == 64
    assert label_text("\ud800\x00\n") == "···"


def test_a_value_needs_the_labels_of_its_metric() -> None:
    with pytest.raises(AssertionError):
        Readings("reef").put("shoal_loss", 1.0, "x")
    with pytest.raises(KeyError):
        Readings("reef").put("shoal_lost", 1.0)


@pytest.mark.parametrize("name", METRICS)
def test_names_follow_the_conventions(name: str) -> None:
    metric = METRICS[name]
    assert name.startswith("process_" if metric.of_process and not name.startswith("shoal_") else "shoal_")
    assert (metric.kind == "counter") == name.endswith("_total")
    assert metric.meaning
    assert metric.meaning[-1] != "."


def test_other_formats_are_spoken_where_they_are_asked_for() -> None:
    readings = run_readings(RUN, status(), HostFacts())
    data, kind = exposition(readings, "application/openmetrics-text; version=1.0.0")
    assert data.endswith(b"# EOF\n")
    assert kind.startswith("application/openmetrics-text")
    assert exposition(readings, "*/*")[1].startswith("text/plain")
