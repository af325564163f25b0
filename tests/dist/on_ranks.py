"""A pytest plugin: every `LLM` of a suite is held by several ranks.

    QUIRE_TEST_RANKS=2x1 pytest -p tests.dist.on_ranks tests/engine/test_vllm_scripts.py

Two ranks side by side; 1x2 is two stages, 2x2 both, 1x1x2 two ranks with requests of their own.
What ranks refuse is skipped, and so is what they cannot have; nothing runs on one rank in silence.
"""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from typing import Any

import pytest

from quire.config import EngineArgs, Parallel
from quire.engine import build
from quire.engine.rank_group import RankGroup
from quire.engine.seat import Seat, seat_of
from quire.errors import NotSupported
from quire.load.checkpoint import Checkpoint
from quire.runner.runner import ModelRunner

RANKS = Parallel(*(int(word) for word in os.environ["QUIRE_TEST_RANKS"].split("x")))
# A step that fails on one rank leaves the others in the middle of it: tests/dist/test_lost.py.
ENDS_THE_GROUP = (
    "test_a_step_that_fails_costs_nobody_a_token",
    "test_a_lost_device_leaves_no_request_behind",
    "test_a_lost_step_costs_no_stream_a_token",
    "test_a_lost_device_ends_every_stream",
)
# Requests that come one after the other have steps of their own, as many as there are stages.
WITHOUT_STAGES = (
    "test_threads_share_batches[float32-overlap]",
    "test_threads_share_batches[rtn-int4-g32-overlap]",
    "test_a_stream_closed_in_the_middle_of_a_step[float32-overlap]",
    "test_a_stream_closed_in_the_middle_of_a_step[rtn-int4-g32-overlap]",
)
_alone = build.build_engine


class Groups:
    """Processes whose model is gone serve the next one: starting them takes seconds."""

    def __init__(self) -> None:
        self._used: list[tuple[RankGroup, weakref.ref[ModelRunner]]] = []
        self._taken: RankGroup | None = None

    def seat_of(self, args: EngineArgs) -> Seat:
        self._taken = self._idle() or RankGroup(RANKS.num_ranks)
        return seat_of(args, self._taken)

    def built(self, runner: ModelRunner) -> None:
        assert self._taken is not None, "a model was built on one rank"
        self._used.append((self._taken, weakref.ref(runner)))
        self._taken = None

    def failed(self) -> None:
        """What others have of the model that was to be is not known."""
        if self._taken is not None:
            self._taken.close()
        self._taken = None

    def _idle(self) -> RankGroup | None:
        gc.collect()
        self._used = [pair for pair in self._used if pair[0].trouble() is None]
        for pair in self._used:
            group, runner = pair
            if runner() is None:
                self._used.remove(pair)
                group.forget()
                return group
        return None


GROUPS = Groups()


def build_on_ranks(args: EngineArgs, checkpoint: Checkpoint, *others: Any) -> build.Engine:
    if not checkpoint.files:
        pytest.skip("other ranks cannot read a model that is in the memory of this process alone")
    try:
        engine = _alone(replace(args, parallel=RANKS), checkpoint, *others)
    except BaseException as error:
        GROUPS.failed()
        if isinstance(error, NotSupported) and "parallel_size" in str(error):
            pytest.skip(str(error))
        raise
    GROUPS.built(engine.runner)
    return engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ends = pytest.mark.skip(reason="a step that fails ends the group (tests/dist/test_lost.py)")
    apart = pytest.mark.skip(reason="stages compute steps of different requests at once")
    for item in items:
        if item.name.split("[")[0] in ENDS_THE_GROUP:
            item.add_marker(ends)
        if item.name in WITHOUT_STAGES and RANKS.pipeline_parallel_size > 1:
            item.add_marker(apart)


build.build_engine = build_on_ranks  # type: ignore[assignment]
build.seat_of = GROUPS.seat_of  # type: ignore[assignment]
