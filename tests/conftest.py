"""Settings of every test process: one thread, and property tests that no slow machine can fail.

Tests are divided here, too. Of those that start real processes ``make test`` runs one case of each capability and of
each kind of attack, and ``make test-all`` each other attack and fault; of the fault matrices in memory ``make test``
runs a part of each. ``make chaos`` runs all others: further cases, what shows again what others show, and the longest.
"""

import os
from collections import Counter
from pathlib import Path

import pytest
import tests.quick_disk  # noqa: F401 - before anything of shoal
import torch
from hypothesis import settings

# Tests run side by side, and many start peers of their own: threads would only stand in each other's way.
torch.set_num_threads(1)

settings.register_profile("local", deadline=None, max_examples=50)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, max_examples=25)
settings.load_profile("ci" if os.environ.get("CI") else "local")

TIMEOUT_S = 900
"""For a test with real processes, whose waits have deadlines of their own."""

CHAOS = "chaos"
"""The folder of fault matrices: in memory, and a part of them with real processes, which are all slow."""

MATRICES = {
    "test_one_fault": 23,
    "test_more_faults": 23,
    "test_overlap": 23,
    "test_whole_loss": 5,
    "test_pipeline": 5,
    "test_real_faults": 2,
}
"""Modules there, and of how many cases of each of their tests ``make test`` or ``make test-all`` runs one. In memory,
these numbers have no divisor in common with those of moments, faults or states, so that each case has another one of
each than the case before it; of those with real processes, every second one has each fault and each role."""

SMOKE_ATTACKS = {
    "test_accusations": "test_newcomers_cannot_accuse_the_owners_away",
    "test_divergence": "test_a_machine_that_is_at_fault_leaves_and_nobody_goes_back",
    "test_files": "test_another_run_than_the_invites",
    "test_floods": "test_messages_for_the_host",
    "test_influence": "test_contributions_above_their_claim_change_nothing",
    "test_joins": "test_nobody_connects_to_an_address_that_is_not_the_joiners",
    "test_leases": "test_who_does_no_work_gets_a_newcomers_share",
    "test_manifests": "test_a_manifest_that_claims_8_8_tb",
    "test_memory": "test_a_model_that_fits_nowhere_is_refused_before_it_is_built",
    "test_never_delivering": "test_nobody_waits_for_it_for_ever",
    "test_pins": "test_the_first_member_cannot_define_the_run",
    "test_receive_queue": "test_who_fills_a_queue_and_resets_ends_nobody",
}
"""By module the attack that ``make test`` runs."""

REPEATED = {
    # The last stage of a pipeline's life and its loss; test_pipeline has the rest.
    "test_mixed_pipeline": {"test_a_peer_with_the_whole_model_and_three_with_a_stage_each"},
    "test_pipeline": {"test_a_replica_of_the_middle_stage_is_stopped_and_continued"},
    "test_pipeline_loss": {"test_lost_everywhere_and_restored_from_copies_of_the_stages"},
    "test_start": {"test_what_a_run_starts_from_can_be_exported_before_its_first_round_has_ended"},
    # Kills that test_churn's first case, test_overlap's and test_whole_loss have as well.
    "test_churn": {
        "test_members_are_killed_at_random_moments",
        "test_the_coordinator_is_killed_with_a_member",
        "test_everybody_is_killed_and_comes_back",
        "test_everybody_leaves_and_comes_back",
        "test_a_member_is_killed",
        "test_ctrl_c_on_the_host_and_the_same_command_again",
    },
    "test_overlap": {"test_the_coordinator_is_killed_when_members_work_ahead_and_one_of_them_with_it"},
    "test_host_disk": {"test_the_hosts_machine_is_lost_and_another_goes_on_from_the_backup"},
    "test_supervisor": {"test_who_ends_it_ends_both", "test_a_host_that_dies_again_and_again_is_given_up"},
    "test_copies": {"test_somebody_else_cannot_restore_it"},
    "test_training": {"test_an_export_in_bfloat16_is_the_rounded_anchor", "test_an_own_training_loop"},
    "test_joining": {"test_a_killed_joiner_goes_on_where_it_was"},
    "test_records": {"test_a_member_is_killed_as_it_keeps_a_round"},
    "test_own_loops": {"test_workers_that_load_ahead_do_not_keep_a_virtual_batch_waiting"},
    "test_hf": {"test_an_island_trains_a_llama_with_a_single_member"},
    # Attacks whose defence the first test of their module meets as well.
    "test_files": {"test_at_a_terminal"},
    "test_floods": {"test_connections_to_a_volunteer"},
    "test_invites": {"test_invites_from_the_environment_and_from_files", "test_nobody_but_the_host_makes_invites"},
}
"""By module the tests with real processes that show again what others show."""


LONGEST = {
    "test_amendments",
    "test_behind_nat",
    "test_identities",
    "test_partition",
    "test_relay_behind_nats",
    "test_several_runs",
}
"""Modules of tests with real processes that take minutes each."""


def is_slow(item: pytest.Item) -> bool:
    """Whether that test, with real processes, is for ``make test-all``."""
    module, name = item.path.stem, getattr(item, "originalname", item.name)
    if CHAOS in item.path.parts:
        return True
    if "attacks" in item.path.parts:
        return SMOKE_ATTACKS.get(module) != name
    return name in REPEATED.get(module, ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow ones, besides of a test with real processes and parameters all cases but the first, and further
    cases of fault matrices."""
    cases = Counter[tuple[Path, str]]()
    for item in items:
        case = item.path, getattr(item, "originalname", item.name)
        number = cases[case]
        cases[case] += 1
        if item.get_closest_marker("integration") is not None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if is_slow(item):
                item.add_marker("slow")
            if number or case[1] in REPEATED.get(item.path.stem, ()) or item.path.stem in LONGEST:
                item.add_marker("slow")
                item.add_marker("matrix")
        if CHAOS in item.path.parts and number % MATRICES.get(item.path.stem, 1):
            item.add_marker("matrix")
