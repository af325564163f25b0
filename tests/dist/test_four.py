"""Four ranks give the bits of one: side by side, in stages, in pairs of both, with homes; through
memory and over sockets. Long tests alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.rank_group import RankGroup
from quire.models.tiny import tiny_model
from tests.dist.group import alone, answers, model_on
from tests.dist.test_homes import HOMES
from tests.dist.test_ranks import CASES, GUIDED, Adapted, drafting, guided_params

if not os.environ.get("QUIRE_LONG_TESTS"):
    pytest.skip("set QUIRE_LONG_TESTS=1", allow_module_level=True)

WAYS: dict[str, dict[str, Any]] = {
    "4": {},
    "2x2": {"pipeline_parallel_size": 2},
    "1x1x4": HOMES | {"data_parallel_size": 4},
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module", params=["auto", "gloo"])
def four(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    group = RankGroup(4, comm=request.param)
    yield group
    group.close()


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_give_the_bits_of_one(name: str, four: RankGroup, tmp_path: Path) -> None:
    """Red where ranks outnumber key heads, where stages are shared out, or where a rank of four has
    no request of its own."""
    family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    expected = answers(alone(folder, **args))
    for way, sizes in WAYS.items():
        with model_on(four, folder, **args, **sizes) as llm:
            assert answers(llm) == expected, way
            assert answers(llm) == expected, way  # from cached pages


def test_four_stages(four: RankGroup, tmp_path: Path) -> None:
    """Red when stages in the middle take more, or less, than they are sent."""
    folder = tiny_model("qwen3", tmp_path, num_hidden_layers=7)
    expected = answers(alone(folder))
    with model_on(four, folder, pipeline_parallel_size=4) as llm:
        assert answers(llm) == expected


@EACH_WAY
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_grammars_and_drafts(method: str, way: str, four: RankGroup, tmp_path: Path) -> None:
    """Red when a rank keeps drafts that were refused, or a grammar meets another row."""
    folder = tiny_model("qwen2_moe", tmp_path, num_hidden_layers=2)
    args, params = drafting(method), guided_params()
    expected = answers(alone(folder, **args), GUIDED, params)
    with model_on(four, folder, **args, **WAYS[way]) as llm:
        assert answers(llm, GUIDED, params) == expected
        assert llm.stats().num_drafted_tokens > 0


@EACH_WAY
def test_adapters(way: str, four: RankGroup, tmp_path: Path) -> None:
    """Red when one of four adds what another's outputs get, or misses that an adapter came."""
    case = Adapted(tmp_path)
    expected = case.answers(alone(case.folder, **case.args))
    with model_on(four, case.folder, **case.args, **WAYS[way]) as llm:
        assert case.answers(llm) == expected
