"""Where steps of the background can be given up: on tapes, in one process, one step at a time.

Elsewhere they are kept short (`sched/leftover.py`). Drafts of a model's own layers remember what
steps they saw, so they are not disturbed either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.native.urge import Urge

if TYPE_CHECKING:
    from quire.engine.build import Engine


def open_urge(engine: Engine) -> Urge:
    """To be set when somebody comes, and cleared before it is looked who came."""
    urge, runner, core = Urge(), engine.runner, engine.core
    has_tapes = runner.tapes is not None and runner.drafter is None
    if has_tapes and engine.group is None and core.lag == 0:
        runner.urge = urge
        core.scheduler.leftover.can_stop = True
    return urge
