"""A pytest plugin: every `LLM` of a suite is held by several ranks.

    QUIRE_TEST_RANKS=2x1 pytest -p tests.dist.on_ranks tests/engine/test_vllm_scripts.py

Two ranks side by side; 1x2 is two stages, 2x2 both, 1x1x2 two ranks with requests of their own.
What ranks refuse is skipped.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from quire.config import EngineArgs, Parallel
from quire.engine import build
from quire.errors import NotSupported
from quire.load.checkpoint import Checkpoint

RANKS = Parallel(*(int(word) for word in os.environ["QUIRE_TEST_RANKS"].split("x")))
_alone = build.build_engine


def build_on_ranks(args: EngineArgs, checkpoint: Checkpoint, *others: Any) -> build.Engine:
    if not checkpoint.files:  # in this process alone
        return _alone(args, checkpoint, *others)
    try:
        return _alone(replace(args, parallel=RANKS), checkpoint, *others)
    except NotSupported as error:
        if "parallel_size" in str(error):
            pytest.skip(str(error))
        raise


build.build_engine = build_on_ranks  # type: ignore[assignment]
