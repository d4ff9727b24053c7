"""All pairs of sites meet, each by the best step that its walls let through."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from tests.integration.mapping_router import missing
from tests.integration.meeting_matrix import (
    DIRECT,
    MAPPED,
    PUNCHED,
    RELAYED,
    REVERSED,
    SITES,
    Meeting,
    all_meetings,
    meeting_matrix,
)
from tests.integration.namespaces import NoNamespaces
from tests.integration.nat_lab import Kind

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.matrix]

FAST, SLOW = 0.6, 20.0
"""Least rate over any path, beside that of two public machines, and the longest time to a first byte, in seconds: what
they are exactly is for ``benchmarks/reachability.py``, on a machine that does nothing else."""


def best_step(site: str, other: str) -> str:
    """Return the step by which ``site`` is to get something from ``other``."""
    pair = {site, other}
    if Kind.ONLY_443 in pair:
        return RELAYED
    if other in (Kind.PUBLIC, MAPPED):
        return MAPPED if other == MAPPED else DIRECT
    if site in (Kind.PUBLIC, MAPPED):
        return REVERSED
    # Behind a symmetric NAT a dial comes from a port that nobody could foresee: only a cone lets it in.
    is_punched = Kind.SYMMETRIC not in pair or bool(pair & {Kind.FULL_CONE, Kind.RESTRICTED})
    return PUNCHED if is_punched else RELAYED


def meetings(folder: Path, sites: Collection[str]) -> list[Meeting]:
    if MAPPED in sites and missing():
        pytest.skip(missing())
    try:
        with meeting_matrix(folder, sites) as matrix:
            return list(all_meetings(matrix, sites))
    except NoNamespaces as error:
        pytest.skip(str(error))


def check(found: list[Meeting]) -> None:
    expected = {(one.site, one.other): best_step(one.site, one.other) for one in found}
    assert {(one.site, one.other): one.step for one in found} == expected
    direct_bps = next(one.rate_bps for one in found if one.site == one.other == Kind.PUBLIC)
    assert all(one.rate_bps > FAST * direct_bps and one.first_byte_s < SLOW for one in found), found


def test_the_sites_with_a_step_of_their_own(tmp_path: Path) -> None:
    check(meetings(tmp_path, (Kind.PUBLIC, Kind.PORT_RESTRICTED, Kind.SYMMETRIC, Kind.ONLY_443)))


def test_all_sites(tmp_path: Path) -> None:
    check(meetings(tmp_path, tuple(SITES)))
