from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.engine.rank_group import RankGroup


@pytest.fixture(scope="session")
def group() -> Iterator[RankGroup]:
    """Two processes for all tests that leave them alive."""
    made = RankGroup(2)
    yield made
    made.close()
