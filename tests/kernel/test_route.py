"""Routing kernels against torch's rule, and sorting against torch's stable sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.route import combine, route, sort_pairs
from quire.models.spec import RouterSpec
from quire.ops.expert_loop import add_ranks
from quire.ops.route import choose_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = {
    "mixtral": RouterSpec(8, 2),
    "qwen3": RouterSpec(128, 8, rounds=True),
    "unnormalised": RouterSpec(60, 4, normalize=False, rounds=True),
    "one": RouterSpec(5, 1),
    "all": RouterSpec(4, 4),
    "sigmoid": RouterSpec(12, 3, score="sigmoid", scale=2.5),
    "deepseek": RouterSpec(
        32, 6, score="sigmoid", num_groups=8, top_groups=3, scale=2.5, normalize=True
    ),
    "deepseek v2": RouterSpec(
        24, 4, num_groups=6, top_groups=2, group_best=1, scale=16.0, normalize=False
    ),
    "three of a group": RouterSpec(12, 3, num_groups=3, top_groups=2, group_best=3),
    "lone groups": RouterSpec(6, 2, num_groups=6, top_groups=3),
}


def _bias(rule: RouterSpec) -> Tensor | None:
    return torch.randn(rule.num_experts, device=DEVICE) if rule.score == "sigmoid" else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_picks_what_torch_picks(name: str, dtype: torch.dtype) -> None:
    rule = RULES[name]
    torch.manual_seed(0)
    # Distinct values: between equals the library's choice is nobody's promise.
    rows = [torch.randperm(rule.num_experts) for _ in range(9)]
    logits = ((torch.stack(rows) - rule.num_experts / 2) / 8).to(dtype)
    bias = _bias(rule)
    want = choose_experts(logits.cpu(), rule, None if bias is None else bias.cpu())
    experts, weights = route(logits.to(DEVICE), rule, bias)
    assert torch.equal(experts.cpu().long(), want.experts)
    torch.testing.assert_close(weights.cpu(), want.weights, rtol=2e-3, atol=1e-6)


def test_equal_scores_go_to_the_lower_number_and_strides_are_read() -> None:
    logits = torch.zeros(3, 9, device=DEVICE)
    logits[:, 8] = 50.0  # the column of a shared expert's gate, not an expert's
    logits[1, 5] = 1.0
    experts, weights = route(logits[:, :8], RouterSpec(8, 3))
    assert experts.tolist() == [[0, 1, 2], [5, 0, 1], [0, 1, 2]]
    torch.testing.assert_close(weights[0], torch.full_like(weights[0], 1 / 3))


def test_nan_stays_in_its_row() -> None:
    """Red when a NaN sends a pair to an expert that is not there."""
    logits = torch.randn(3, 6, device=DEVICE)
    clean = route(logits, RouterSpec(6, 2))
    logits[1] = float("nan")
    experts, weights = route(logits, RouterSpec(6, 2))
    assert int(experts.min()) >= 0 and int(experts.max()) < 6
    assert weights[1].isnan().all()
    for got, want in zip((experts, weights), clean, strict=True):
        assert torch.equal(got[[0, 2]], want[[0, 2]])


def _experts(kind: str, tokens: int, top_k: int, num: int) -> Tensor:
    if kind == "one":
        chosen = torch.full((tokens, top_k), num - 2)
    elif kind == "few":
        chosen = torch.randint(0, 2, (tokens, top_k)) * 3
    else:
        chosen = torch.stack([torch.randperm(num)[:top_k] for _ in range(tokens)])
    return chosen.int().to(DEVICE)


@pytest.mark.parametrize("kind", ["one", "few", "spread"])
@pytest.mark.parametrize("tokens", [1, 7, 700])
def test_sort_is_torchs_stable_sort(kind: str, tokens: int) -> None:
    experts = _experts(kind, tokens, 2, 5)
    flat = experts.view(-1).long()
    loads = torch.full((5,), 10, dtype=torch.int64, device=DEVICE)
    for again in (1, 2):
        got = sort_pairs(experts, 5, loads)
        assert torch.equal(got.pairs.long(), flat.argsort(stable=True))
        assert torch.equal(got.counts.long(), flat.bincount(minlength=5))
        assert torch.equal(loads - 10, again * got.counts.long())
    assert torch.equal(sort_pairs(experts, 5).pairs, got.pairs)


@pytest.mark.parametrize("width", [16, 1100])
@pytest.mark.parametrize("top_k", [1, 3])
def test_combine_adds_in_rank_order(width: int, top_k: int) -> None:
    torch.manual_seed(0)
    results = torch.randn(4 * top_k, width, device=DEVICE)
    weights = torch.rand(4, top_k, device=DEVICE)
    want = add_ranks(results.view(4, top_k, width), weights)
    torch.testing.assert_close(combine(results, weights), want, rtol=1e-6, atol=1e-6)


def test_no_tokens() -> None:
    experts, weights = route(torch.empty(0, 8, device=DEVICE), RouterSpec(8, 2))
    assert experts.shape == weights.shape == (0, 2)
    assert combine(torch.empty(0, 16, device=DEVICE), weights).shape == (0, 16)
