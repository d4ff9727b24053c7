"""The fixture of the tests that hold for every codec."""

from collections.abc import Iterator

import pytest
from tests.compression.codec_cases import PATHS, use

from shoal.compression.codec import Codec


@pytest.fixture(scope="module", params=PATHS)
def codec(request: pytest.FixtureRequest) -> Iterator[Codec]:
    """Every codec on every path that it has, which stays chosen as long as this codec is tested."""
    chosen, path = request.param
    with use(path):
        yield chosen
