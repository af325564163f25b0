"""What benchmarks on a CPU need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.native.library import find_library


@pytest.fixture(scope="module")
def without_native_steps() -> Iterator[None]:
    """On a CPU only torch's operators can be watched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CPU_ISA", "torch")
        find_library.cache_clear()
        yield
    find_library.cache_clear()
