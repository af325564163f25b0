"""The library, once on each instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.native.library import Library, find_library

FOUND = find_library()
ISAS = FOUND.library.isas if FOUND.library else ()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which sets these tests had: a green run says nothing about one that this CPU lacks."""
    terminalreporter.write_line(f"native instruction sets: {', '.join(ISAS) or FOUND.reason}")


@pytest.fixture(scope="session")
def library() -> Library:
    if FOUND.library is None:
        pytest.skip(FOUND.reason)
    return FOUND.library


@pytest.fixture(autouse=True)
def as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests change the instruction set and the threads of the one library of the process."""
    yield
    if FOUND.library is not None:
        FOUND.library.use_isa(FOUND.library.isas[0])
        FOUND.library.set_threads(1)
