"""Rotary tables: inverse frequencies of every variant, then cos and sin for all positions.

The formulas are those of Hugging Face's rope utilities, which the model tests hold us to.
`dynamic` and `longrope` depend on the longest sequence there; here they are fixed by the engine's
context limit, so that keys cached at one length stay right at another.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.models.spec import RopeSpec


def rope_tables(spec: RopeSpec, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions, dim / 2] f32."""
    inv_freq, scale = inverse_frequencies(spec, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def inverse_frequencies(spec: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    """[dim / 2] frequencies and the factor that scales cos and sin."""
    plain = _plain(spec.theta, spec.dim)
    if spec.kind == "linear":
        return plain / spec.factor, 1.0
    if spec.kind == "freq_factors":
        return plain / torch.tensor(spec.factors, dtype=torch.float32), 1.0
    if spec.kind == "dynamic":
        longest = max(num_positions, spec.original_max)
        grown = spec.factor * longest / spec.original_max - (spec.factor - 1)
        return _plain(spec.theta * grown ** (spec.dim / (spec.dim - 2)), spec.dim), 1.0
    if spec.kind == "longrope":
        factors = spec.long_factors if num_positions > spec.original_max else spec.factors
        return plain / torch.tensor(factors, dtype=torch.float32), _longrope_scale(spec)
    if spec.kind == "llama3":
        return _llama3(spec, plain), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, plain), _yarn_scale(spec)
    return plain, 1.0


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    longest = spec.original_max / spec.low_freq_factor
    shortest = spec.original_max / spec.high_freq_factor
    blend = (spec.original_max / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    between = (1 - blend) * plain / spec.factor + blend * plain
    stretched = torch.where(wavelength > longest, plain / spec.factor, plain)
    is_between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(is_between, between, stretched)


def _yarn(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Interpolate slow dims, keep fast dims, ramp between the two rotation counts."""

    def dim_of(rotations: float) -> float:
        turns = spec.original_max / (rotations * 2 * math.pi)
        return spec.dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dim_of(spec.beta_fast), dim_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return plain / spec.factor * (1 - keep) + plain * keep


def _longrope_scale(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max))


def _yarn_scale(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0

    if spec.mscale and spec.mscale_all_dim:
        return magnitude(spec.mscale) / magnitude(spec.mscale_all_dim)
    return magnitude(1.0)
