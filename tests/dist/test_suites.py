"""Suites that were written for one rank, on two."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SUITES = ["tests/engine/test_vllm_scripts.py"]


@pytest.mark.skipif(not os.environ.get("QUIRE_LONG_TESTS"), reason="set QUIRE_LONG_TESTS=1")
@pytest.mark.parametrize("ranks", ["2x1", "1x2", "1x1x2"])
def test_a_suite_does_not_notice(ranks: str) -> None:
    """Red when something that users do with an engine does not go along with ranks."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.dist.on_ranks", *SUITES]
    environment = {**os.environ, "QUIRE_TEST_RANKS": ranks}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
