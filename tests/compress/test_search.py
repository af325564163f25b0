"""The search for scales of folds: what it judges by, and what it tries."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.compress.block import BlockTensors
from quire.compress.folds import Fold
from quire.compress.layouts import awq as layout
from quire.compress.passes.awq import Awq, best_cuts
from quire.compress.passes.recipe import Recipe
from quire.compress.seen import Needs, Seen
from quire.compress.source import Source
from tests.compress.models import CPU, small
from tests.compress.test_gptq import correlated
from tests.load.held import plain

QKV = Fold(("qkv",), norm="attn_norm")


def heard(num_in: int) -> Seen:
    """Inputs that differ in size."""
    generator = torch.Generator().manual_seed(0)
    seen = Seen(num_in, Needs(rows=True), 128, CPU)
    seen.add(torch.randn(128, num_in, generator=generator) * torch.linspace(-3, 3, num_in).exp2())
    return seen


def found(awq: Awq, block: BlockTensors) -> Tensor:
    seen = heard(64)
    scale = awq._best(QKV, awq.tried(QKV, block, seen), block, {"qkv": seen})
    assert scale is not None
    return scale


def test_large_outputs_do_not_decide_alone(tmp_path: Path) -> None:
    """Red when a loss is a sum over matrices again: queries eight times as large then choose the
    scale that all of the norm's readers get."""
    source = Source.open(str(small(tmp_path)))
    awq, chosen = Awq(Recipe("awq", group=32), torch.float32), []
    for factor in (1.0, 8.0):
        block = source.block(0, frozenset(), CPU)
        for matrix in block.at("qkv"):
            if "v" in matrix.parts:  # large weights for the inputs that are small
                block.tensors[matrix.name] *= torch.linspace(3, -3, 64).exp2()
            if "q" in matrix.parts:
                block.tensors[matrix.name] *= factor
        chosen.append(found(awq, block))
    assert torch.equal(*chosen)


def test_the_size_of_weights_counts(tmp_path: Path) -> None:
    """Red when AWQ's scales follow the inputs alone: with inputs of one size an input whose weights
    are small beside their groups' largest must be scaled up, at the cost of the others."""
    block = Source.open(str(small(tmp_path))).block(0, frozenset(), CPU)
    for matrix in block.at("qkv"):
        block.tensors[matrix.name][:, ::2] /= 32
    seen = Seen(64, Needs(rows=True), 128, CPU)
    seen.add(torch.ones(8, 64))
    first = next(iter(Awq(Recipe("awq", group=32), torch.float32).tried(QKV, block, seen)))
    assert first[::2].min() > 8 * first[1::2].max()


def test_codes_of_awq_make_up_for_each_other(tmp_path: Path) -> None:
    """Red when AWQ rounds to nearest again, or spreads errors so freely that it only pays on the
    rows that it was calibrated on."""
    block = Source.open(str(small(tmp_path))).block(0, frozenset(), CPU)
    awq, matrix = Awq(Recipe("awq", group=32), torch.float32), block.at("up")[0]
    weight, rows = block.tensors[matrix.name], correlated(rows=1024)
    seen = Seen(64, Needs(rows=True, gram=True), 512, CPU)
    seen.add(rows[:512])
    stored = {f"w.{last}": t for last, t in awq.pack(matrix, block, seen).items()}
    spread = plain(layout.said(awq.grid, []), stored).read("w.weight")
    nearest = awq.grid.nearest(weight, best_cuts(weight, seen.rows, awq.grid)).values()
    lost = [(rows[512:] @ (near - weight).t()).square().sum() for near in (spread, nearest)]
    assert lost[0] < 0.7 * lost[1]
