"""Second homes of experts: chosen from visits, and nothing of what is computed changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.dist.cuts import shares
from quire.dist.placement import Placement, imbalance, place_copies
from quire.engine.rank_group import RankGroup
from quire.models.tiny import tiny_model
from quire.nn.moe import SparseMLP
from tests.dist.group import alone, answers, model_on


def test_copies_make_the_busiest_rank_less_busy() -> None:
    """Red when a copy is put where it does no good, twice, or beyond the places there are."""
    gained = 0
    for seed in range(60):
        rng = random.Random(seed)
        num_ranks, num_experts = rng.choice([2, 3, 4]), rng.choice([8, 13, 32])
        num_copies = rng.randint(0, 6)
        homes = shares(num_experts, num_ranks)
        visits = [int(1000 * rng.random() ** 6) for _ in range(num_experts)]
        placed = place_copies(visits, homes, num_copies)
        assert placed == place_copies(visits, homes, num_copies)
        assert sum(map(len, placed.copies.values())) <= num_copies
        for rank in range(num_ranks):
            own = placed.on(rank)
            assert len(own) <= -(-num_copies // num_ranks)
            assert not set(own) & set(range(homes[rank].begin, homes[rank].end))
        before, after = (imbalance(visits, homes, p) for p in (Placement({}), placed))
        assert 1.0 <= after <= before
        gained += after < before - 0.1
    assert gained > 20


def test_nobody_is_copied_where_nobody_came() -> None:
    """Red when ranks fill their places without a reason, or divide by no visits at all."""
    homes = shares(4, 2)
    assert place_copies([0] * 4, homes, 2) == Placement({})
    assert place_copies([5] * 4, homes, 2) == Placement({})
    assert imbalance([0] * 4, homes, Placement({})) == 1.0


@pytest.mark.parametrize(
    ("family", "changes", "args"),
    [
        ("qwen2_moe", {}, {}),
        ("gpt_oss", {}, {}),
        ("qwen3_moe", {"hidden_size": 64}, {"quantization": "int8"}),
    ],
    ids=["floats in one tensor", "biases", "int8"],
)
def test_moving_experts_changes_no_bit(
    family: str, changes: Any, args: Any, group: RankGroup, tmp_path: Path
) -> None:
    """Red when a copy is another expert, a visit is computed twice or by nobody, or ranks disagree
    on who computes it."""
    folder = tiny_model(family, tmp_path, **changes)
    expected = answers(alone(folder, **args))
    moves = {"num_redundant_experts": 2, "eplb_step_interval": 2}
    with model_on(group, folder, **args, **moves) as llm:
        runner, seen = llm._engine.runner, list[int]()
        balancer = runner.balancer
        assert balancer is not None
        rebalance = balancer.rebalance

        def noted() -> None:
            rebalance()
            blocks = [block.mlp for block in runner.model.blocks]
            sparse = [mlp for mlp in blocks if isinstance(mlp, SparseMLP)]
            seen.append(sum(len(mlp.experts.placement.copies) for mlp in sparse))

        balancer.rebalance = noted  # type: ignore[method-assign]
        assert answers(llm) == expected
        assert answers(llm) == expected  # from cached pages
        assert any(seen) and len(set(seen)) > 1
        told = balancer.as_dict()
        assert (told["num_rebalances"], told["num_experts_copied"]) == (len(seen), seen[-1])
        assert told["num_experts_read"] > 0
        assert told["rank_imbalance_before"] >= told["rank_imbalance_after"] >= 1.0
