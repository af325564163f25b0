"""The grouped product without a GPU: who multiplies what, and where it goes.

Small integers, where every order of sums is exact: an indexing or masking mistake shows, rounding
does not. Rounding is `tests/gpu/test_gpu_moe.py`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from quire.kernels.grouped_matmul import (
    GroupTile,
    max_tiles,
    multiply_gathered,
    multiply_scattered,
    pick_tile,
)
from quire.kernels.route import sort_pairs
from quire.nn.ops import GateForm, Visits
from quire.ops.cuda_ops import GroupedExperts
from quire.ops.expert_loop import ExpertLoop
from quire.ops.torch_gate import gate
from quire.ops.torch_ops import TorchLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = {
    "swap": GroupTile(16, 64, 128, 2, 4, swap=True),
    "plain": GroupTile(32, 32, 64, 2, 4),
    "groups of two": GroupTile(16, 32, 32, 2, 4, group_m=2),
    "ragged k": GroupTile(16, 64, 256, 2, 4, swap=True),
}
NUM = 6


def _integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, device=DEVICE).half()


def _routing(kind: str, tokens: int) -> Tensor:
    """[tokens, 2] experts, of six."""
    if kind == "one expert":
        chosen = torch.full((tokens, 2), 3)
    elif kind == "the ends":
        chosen = torch.tensor([0, NUM - 1]).repeat(tokens, 1)
    else:
        chosen = torch.stack([torch.randperm(NUM)[:2] for _ in range(tokens)])
    return chosen.int().to(DEVICE)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("kind", ["one expert", "the ends", "spread"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_rows_meet_their_experts(name: str, kind: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    experts = _routing(kind, tokens)
    pairs = sort_pairs(experts, NUM)
    x, up, down = _integers(tokens, 128), _integers(NUM, 80, 128), _integers(NUM, 48, 80)
    flat = experts.view(-1).long()

    got = multiply_gathered(x, up, pairs, TILES[name])
    by_pair = torch.einsum("pk,pnk->pn", x.repeat_interleave(2, 0).double(), up.double()[flat])
    assert torch.equal(got.double(), by_pair[pairs.pairs.long()])

    rows = _integers(2 * tokens, 80)
    want = torch.empty(2 * tokens, 48, dtype=torch.double, device=DEVICE)
    order = pairs.pairs.long()
    want[order] = torch.einsum("pk,pnk->pn", rows.double(), down.double()[flat[order]])
    assert torch.equal(multiply_scattered(rows, down, pairs, TILES[name]).double(), want)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("kind", ["one expert", "the ends", "spread"])
def test_rows_get_their_experts_bias(name: str, kind: str) -> None:
    """Red when a bias is another expert's, or another output's: 72 outputs fill no tile."""
    torch.manual_seed(0)
    experts = _routing(kind, 11)
    pairs = sort_pairs(experts, NUM)
    x, w, bias = _integers(11, 64), _integers(NUM, 72, 64), 100 * _integers(NUM, 72)
    added = bias[experts.view(-1).long()]  # pair by pair

    plain, got = (multiply_gathered(x, w, pairs, TILES[name], b) for b in (None, bias))
    assert torch.equal(got - plain, added[pairs.pairs.long()])
    rows = _integers(22, 64)
    plain, got = (multiply_scattered(rows, w, pairs, TILES[name], b) for b in (None, bias))
    assert torch.equal(got - plain, added)


@pytest.mark.parametrize("num_pairs", [1, 5, 16, 100, 1000])
@pytest.mark.parametrize("block_m", [16, 64])
def test_the_grid_covers_any_routing(num_pairs: int, block_m: int) -> None:
    """Red when a routing needs more tiles than the grid has: rows would be left out silently."""
    torch.manual_seed(num_pairs)
    most = max_tiles(num_pairs, 8, block_m)
    for trial in range(200):
        skew = torch.rand(8) ** (trial % 12) + 1e-3
        counts = torch.multinomial(skew, num_pairs, replacement=True).bincount(minlength=8)
        assert int(((counts + block_m - 1) // block_m).sum()) <= most
    worst = torch.ones(min(num_pairs, 8), dtype=torch.int64)  # one row each, the rest to the first
    worst[0] += num_pairs - len(worst)
    assert int(((worst + block_m - 1) // block_m).sum()) == most


def test_strange_sizes_and_no_rows() -> None:
    x, w = _integers(0, 32), _integers(NUM, 40, 32)
    pairs = sort_pairs(torch.empty(0, 2, dtype=torch.int32, device=DEVICE), NUM)
    assert multiply_gathered(x, w, pairs).shape == (0, 40)
    assert not pairs.counts.any()


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_default_tiles_match_double_precision(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    experts = _routing("spread", 9)
    pairs = sort_pairs(experts, NUM)
    x, w = torch.randn(9, 96, device=DEVICE), torch.randn(NUM, 72, 96, device=DEVICE)
    x, w = x.to(dtype), w.to(dtype)
    want = torch.einsum("tk,tpnk->tpn", x.double(), w.double()[experts.long()]).view(18, 72)
    got = multiply_gathered(x, w, pairs).double()
    want = want[pairs.pairs.long()]
    assert (got - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_both_ways_to_multiply_agree(tokens: int) -> None:
    """The loop over experts and the grouped products, from tokens to tokens."""
    torch.manual_seed(tokens)
    up, down = torch.randn(NUM, 96, 64, device=DEVICE), torch.randn(NUM, 64, 48, device=DEVICE)
    kernels = [[TorchLinear(w, None) for w in weights] for weights in (up, down)]
    loop = ExpertLoop(*kernels, partial(gate, form=GateForm()))
    x, experts = torch.randn(tokens, 64, device=DEVICE), _routing("spread", tokens)
    visits = Visits(experts, torch.rand(tokens, 2, device=DEVICE))
    loads = [torch.zeros(NUM, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    want = loop(x, visits, loads[0])
    got = GroupedExperts((up, None), (down, None))(x, visits, loads[1])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert torch.equal(loads[0], loads[1]) and int(loads[0].sum()) == 2 * tokens


@pytest.mark.parametrize("kind", ["one expert", "the ends", "spread"])
def test_both_ways_agree_with_biases_and_another_gate(kind: str) -> None:
    torch.manual_seed(0)
    up, down = torch.randn(NUM, 96, 64, device=DEVICE), torch.randn(NUM, 64, 48, device=DEVICE)
    biases = torch.randn(NUM, 96, device=DEVICE), torch.randn(NUM, 64, device=DEVICE)
    form = GateForm(alpha=1.702, limit=7.0)
    loop = ExpertLoop(
        [TorchLinear(w, b) for w, b in zip(up, biases[0], strict=True)],
        [TorchLinear(w, b) for w, b in zip(down, biases[1], strict=True)],
        partial(gate, form=form),
    )
    x, experts = torch.randn(9, 64, device=DEVICE), _routing(kind, 9)
    visits = Visits(experts, torch.rand(9, 2, device=DEVICE))
    got = GroupedExperts((up, biases[0]), (down, biases[1]), form)(x, visits, None)
    torch.testing.assert_close(got, loop(x, visits, None), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_pairs", [2, 64, 500, 4096, 65536])
@pytest.mark.parametrize("num_experts", [8, 128])
def test_tiles_use_the_wide_matrix_unit_and_fit(num_pairs: int, num_experts: int) -> None:
    tile = pick_tile(num_pairs, num_experts)
    # Mixing matrix-unit generations is how bits would come to depend on the batch.
    assert (tile.block_n if tile.swap else tile.block_m) % 64 == 0
    assert tile.num_warps % 4 == 0
    stage = (tile.block_m + tile.block_n) * tile.block_k * 2
    assert stage * tile.num_stages <= 227 * 1024
