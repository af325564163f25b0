"""The sampler as its callers see it: rows are independent, odd logits are survived."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.sample.inputs import Penalties
from quire.sample.sampler import Sampler
from tests.sample.cases import Row, make_history, make_inputs

INF, NAN = float("inf"), float("nan")
ROWS = [
    Row(0.0),
    Row(1.0, seed=1, position=5),
    Row(0.7, seed=2, position=5),
    Row(0.7, seed=2, position=6),
    Row(1.0, top_k=20, seed=3),
    Row(1.0, top_p=0.9, seed=4),
    Row(1.0, min_p=0.05, seed=5),
    Row(1.3, top_k=30, top_p=0.8, min_p=0.01, seed=6),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [3, 257, 1031])
def test_rows_do_not_see_each_other(dtype: torch.dtype, vocab_size: int) -> None:
    rows = ROWS * 5
    logits = (torch.randn(len(rows), vocab_size) * 3).to(dtype)
    whole = Sampler()(logits.clone(), make_inputs(rows)).tokens
    order = torch.randperm(len(rows))
    mixed = Sampler()(logits[order], make_inputs([rows[i] for i in order.tolist()])).tokens
    assert torch.equal(mixed, whole[order])
    for i, row in enumerate(rows):
        alone = Sampler()(logits[i : i + 1].clone(), make_inputs([row])).tokens
        assert int(alone) == int(whole[i]), row


def test_a_neighbour_with_penalties_changes_nothing() -> None:
    """Edits turn the batch into f32; the other rows must still draw the same."""
    logits = (torch.randn(2, 500) * 3).bfloat16()
    inputs = make_inputs([Row(seed=3), Row(seed=4)])
    plain = Sampler()(logits.clone(), inputs).tokens
    penalties = Penalties(torch.tensor([1.0, 5.0]), torch.zeros(2), torch.tensor([0.0, 2.0]))
    history = make_history([([1], [2]), ([3], [4, 4])], width=4, junk=0)
    edited = Sampler()(logits.clone(), replace(inputs, history=history, penalties=penalties)).tokens
    assert int(plain[0]) == int(edited[0])


def test_seeds_reproduce_and_differ() -> None:
    logits = torch.randn(1, 2000).expand(64, -1)
    rows = [Row(seed=i // 8, position=i % 8) for i in range(64)]
    first = Sampler()(logits, make_inputs(rows)).tokens
    assert torch.equal(first, Sampler()(logits, make_inputs(rows)).tokens)
    assert len(set(first.tolist())) > 50


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_odd_logits(row: Row) -> None:
    logits = torch.randn(8, 100)
    logits[0] = -INF
    logits[0, 42] = -5.0  # all but one banned
    logits[1] = NAN
    logits[2] = NAN
    logits[2, 9] = 1.0  # the finite token wins over NaN
    logits[3] = -INF
    logits[4] = -1e30
    logits[4, 17] = 3e38
    logits[5, 23] = INF
    logits[6] = torch.finfo(torch.float32).min
    logits[6, 71] = -1e38
    want = Sampler()(logits[7:].clone(), make_inputs([row])).tokens
    tokens = Sampler()(logits, make_inputs([row] * 8)).tokens.tolist()
    assert tokens == [42, 0, 9, 0, 17, 23, 71, int(want)]


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 300)
    logits[:, [55, 200]] = 7.0
    rows = [Row(0.0), Row(top_k=1), Row(top_p=1e-9)]
    assert Sampler()(logits, make_inputs(rows)).tokens.tolist() == [55, 55, 55]


def test_huge_logits_still_draw_evenly() -> None:
    """Noise is added to distances from the best, so magnitude cannot drown it."""
    logits = torch.full((400, 2), 1e30)
    draws = Sampler()(logits, make_inputs([Row(position=i) for i in range(400)])).tokens
    assert 140 < int(draws.sum()) < 260


def test_no_rows() -> None:
    out = Sampler()(torch.zeros(0, 10), make_inputs([], num_logprobs=3))
    assert out.tokens.shape == (0,)
    assert out.logprobs is not None
    assert out.logprobs.top_tokens.shape == (0, 3)
