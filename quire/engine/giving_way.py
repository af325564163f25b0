"""Where steps of the background can be given up: on tapes, in one process, one step at a time.

Elsewhere they are kept short (`sched/leftover.py`). Drafts of a model's own layers remember what
steps they saw, so they are not disturbed either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.native.urge import Urge
from quire.runner.runner import ModelRunner

if TYPE_CHECKING:
    from quire.engine.build import Engine


def open_urge(engine: Engine) -> Urge:
    """To be set when somebody comes, and cleared before it is looked who came."""
    urge, core = Urge(), engine.core
    runner = core.runner
    if not isinstance(runner, ModelRunner) or engine.group is not None or core.lag > 0:
        return urge
    if runner.tapes is not None and runner.drafter is None:
        runner.urge = urge
        core.scheduler.leftover.can_stop = True
    return urge
