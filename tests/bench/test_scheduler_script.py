"""The scheduler benchmark runs, and what it measures has not become slow by an order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_prints_one_json_line():
    done = subprocess.run(
        [sys.executable, "benchmarks/scheduler.py", "--steps", "40"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    record = json.loads(done.stdout)
    assert record["what"] == "scheduler" and record["running"] == 256
    # The target is 1,000 us on a quiet machine; this only catches something quadratic.
    assert record["total_us"] < 10_000
