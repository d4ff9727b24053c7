"""The same swarms of real processes as the integration tests have."""

from tests.integration.conftest import pytest_runtest_makereport, swarm

__all__ = ["pytest_runtest_makereport", "swarm"]
