"""Failures are said when they happen: a run on a lent GPU may be cut off before it sums up."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        last = str(report.longrepr).strip().splitlines()[-1:]
        print(f"\nFAILED {report.nodeid} {' '.join(last)[:200]}", flush=True)
