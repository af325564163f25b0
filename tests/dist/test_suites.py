"""Suites that were written for one rank, on two: side by side, in stages, with requests of their
own. What they skip there is printed (`pytest -rP`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SUITES = ["vllm_scripts", "llm", "streams", "threads", "errors", "crowded"]
COUNTS = re.compile(r"(\d+) (passed|skipped)")


@pytest.mark.skipif(not os.environ.get("QUIRE_LONG_TESTS"), reason="set QUIRE_LONG_TESTS=1")
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("ranks", ["2x1", "1x2", "1x1x2"])
def test_a_suite_does_not_notice(ranks: str, suite: str) -> None:
    """Red when something that users do with an engine does not go along with ranks, or most of a
    suite is left out there."""
    plugin, path = ("-p", "tests.dist.on_ranks"), f"tests/engine/test_{suite}.py"
    # The suites' own long cases are for one rank.
    environment = {k: v for k, v in os.environ.items() if k != "QUIRE_LONG_TESTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *plugin, path],
        env={**environment, "QUIRE_TEST_RANKS": ranks},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-4000:]
    num = {what: int(count) for count, what in COUNTS.findall(done.stdout.splitlines()[-1])}
    assert num["passed"] > 2 * num.get("skipped", 0)
