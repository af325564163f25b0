"""Codebooks: values lie where weights that matter are, and damaged files are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.compress.passes.codebook import cluster, nearest
from quire.errors import CheckpointError, NotSupported
from quire.native.panels import can_be_panels
from quire.quant.coded import Coded
from tests.compress.models import run, small
from tests.load.held import plain

SAID = {"quant_method": "codebook", "bits": 4}


def test_values_follow_the_weights_that_matter() -> None:
    """Red when inputs that matter count no more than others, or k-means stops to improve."""
    torch.manual_seed(0)
    points, energy = torch.randn(4, 512), torch.ones(512)
    energy[::8] = 100.0

    def cost(values: torch.Tensor) -> float:
        near = values.gather(1, nearest(points, values).long())
        return (energy * (near - points).square()).sum().item()

    even = torch.linspace(points.min(), points.max(), 16).expand(4, -1).contiguous()
    assert cost(cluster(points, energy)) < 0.98 * cost(cluster(points, torch.ones(512)))
    assert cost(cluster(points, energy)) < 0.7 * cost(even)


def test_the_form() -> None:
    """Red when rows or inputs are picked without their values."""
    tables = torch.randint(-127, 128, (2, 16), dtype=torch.int8).repeat_interleave(4, 0)
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    weight = Coded(codes, 4, 32, torch.rand(8, 2), tables=tables)
    want = weight.dequantize()
    assert want[5, 40] == weight.scales[5, 1] * tables[5, codes[5, 40].long()]
    rows = torch.tensor([4, 0, 2])
    assert torch.equal(weight.pick(rows).dequantize(), want[rows])
    assert torch.equal(weight.columns(32, 64).dequantize(), want[:, 32:64])
    both = weight.pick(slice(0, 2)).join(weight.pick(slice(2, 8)))
    assert both.is_like(weight) and torch.equal(both.dequantize(), want)
    assert can_be_panels(weight) and not can_be_panels(weight.pick(rows))  # no four share values


def test_damage_is_named() -> None:
    """Red when a file whose values or scales do not fit its codes is read."""
    codes, scales = torch.zeros(6, 4, dtype=torch.uint8), torch.ones(6, 1)
    values = torch.zeros(2, 16, dtype=torch.int8)
    whole = {"w.weight_codes": codes, "w.weight_values": values, "w.weight_scale": scales}
    assert torch.equal(plain(SAID, whole).read("w.weight"), torch.zeros(6, 8))
    wrong = {
        "weight_values": (values[:1], values[:, :15], values.float()),
        "weight_scale": (scales[:5], torch.ones(6, 3), torch.full((6, 1), torch.nan)),
    }
    for last, cases in wrong.items():
        for case in cases:
            with pytest.raises(CheckpointError, match=rf"w\.{last}"):
                plain(SAID, {**whole, f"w.{last}": case}).read("w.weight")


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_width_is_read_back(bits: int, tmp_path: Path) -> None:
    """Red when codes of a width lie elsewhere than their reader looks, or fewer bits lose no more
    than they must."""
    model = small(tmp_path)
    report: Any = run(model, tmp_path / "out", "codebook", bits=bits)
    limit = {2: 0.2, 3: 0.06, 4: 0.02}[bits]
    assert limit / 20 < report["mean_error"] < limit
    rounded: Any = run(model, tmp_path / "rtn", "rtn", bits=bits, group=0)
    assert report["mean_error"] < 0.85 * rounded["mean_error"]


def test_widths_that_do_not_fit(tmp_path: Path) -> None:
    """Red when a row whose codes fill no bytes is cut off, or an unknown width is guessed."""
    model = small(tmp_path, intermediate_size=100)
    with pytest.raises(NotSupported, match="want multiples of 8"):
        run(model, tmp_path / "out", "codebook", bits=3, group=0)
    with pytest.raises(NotSupported, match="got bits=5 of codebooks"):
        plain({**SAID, "bits": 5}, {})
