"""Norms of a narrower stream: their weights make up for the mean square that changed.

An RMS norm divides by the root of the mean square over all channels. The mean over those that stay
is another, by a factor that calibration tells; what reads the norm's output should not notice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quire.compress.block import BlockTensors
from quire.compress.seen import Seen
from quire.models.spec import ModelSpec

READ = {"attn_norm": "qkv", "mlp_norm": "up"}  # norms, and the site that reads each
ADDED = {"attn_out_norm": "out", "mlp_out_norm": "down"}  # and those of a site's outputs


def fit_norms(block: BlockTensors, seen: dict[str, Seen], kept: Tensor, spec: ModelSpec) -> None:
    """Changes the weights of a block's norms, before they are cut to the `kept` channels."""
    for norm, site in READ.items():
        weight = block.named(f"{norm}.weight")
        if weight is not None and site in seen:
            _scale(weight, _read_factor(weight, seen[site], kept, spec), spec)
    for norm, site in ADDED.items():
        weight = block.named(f"{norm}.weight")
        if weight is not None and site in seen:
            (matrix,) = block.at(site)
            outputs = seen[site].rows @ block.tensors[matrix.name].t()
            squares = outputs.square()
            ratio = squares[:, kept].mean(1) / squares.mean(1).clamp(min=1e-30)
            _scale(weight, ratio.mean().sqrt().item(), spec)


def fit_outer(tensors: Mapping[str, Tensor], head: Seen, kept: Tensor, spec: ModelSpec) -> None:
    """The same of the last norm, by our names."""
    weight = tensors["norm.weight"]
    _scale(weight, _read_factor(weight, head, kept, spec), spec)


def _read_factor(weight: Tensor, seen: Seen, kept: Tensor, spec: ModelSpec) -> float:
    """The root mean square of kept channels in units of that of all, from a norm's outputs."""
    gain = (weight + spec.norm_offset).square().clamp(min=1e-12)
    normed = seen.energy.to(gain.device) / gain  # [hidden], about 1 in the mean
    ratio = normed[kept].mean() / normed.mean().clamp(min=1e-30)
    return float(ratio.sqrt().item())


def _scale(weight: Tensor, factor: float, spec: ModelSpec) -> None:
    weight.copy_((weight + spec.norm_offset) * factor - spec.norm_offset)
