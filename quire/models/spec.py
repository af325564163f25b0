"""ModelSpec: a config.json normalised once. The only place that reads a checkpoint's loose keys.

Family files turn a `Config` into a ModelSpec; everything after this reads typed fields. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding; names of kinds and fields as in Hugging Face configs."""

    kind: str  # default | linear | dynamic | llama3 | yarn | freq_factors
    theta: float
    dim: int  # rotated dims of each head
    original_max: int  # positions the model was first trained for
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the decoder's wiring depends on."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm: str = "rms"  # or "layer"
    norm_eps: float = 1e-6
    mlp: str = "gated"  # or "plain"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeSpec | None = None  # None: learned positions
    tied: bool = False
    dtype: str = "float32"  # as stored
    sliding_window: int | None = None  # not yet executed: bounds the context instead
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = field(default=())

    @property
    def num_params(self) -> int:
        """Weights, norms and biases left out."""
        attn = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = self.hidden_size * self.ffn_size * (3 if self.mlp == "gated" else 2)
        embed = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * (attn + mlp) + embed


class Config:
    """A config.json whose missing and mistyped values become clear errors."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number >= 1."""
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise CheckpointError(f"config.json: got {key}={value!r}, want a whole number >= 1")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise CheckpointError(f"config.json: got {key}={value!r}, want a number > 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    def expect(self, key: str, known: tuple[str, ...], default: str) -> str:
        value = self.values.get(key) or default
        if value not in known:
            raise CheckpointError(f"config.json: got {key}={value!r}, this family knows {known}")
        return str(value)

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)

    @property
    def dtype(self) -> str:
        return str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32")


def rope_spec(config: Config, head_dim: int, max_positions: int) -> RopeSpec:
    """Both spellings: `rope_parameters` (new) and `rope_theta` + `rope_scaling` (old)."""
    nested = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: got rope_parameters={nested!r}, want an object")
    rope = Config(nested)
    kind = str(nested.get("rope_type") or nested.get("type") or "default")
    known = ("default", "linear", "dynamic", "llama3", "yarn", "freq_factors")
    if kind not in known:
        raise CheckpointError(f"config.json: got rope_type={kind!r}, known: {', '.join(known)}")
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    attention_factor = nested.get("attention_factor")
    return RopeSpec(
        kind=kind,
        theta=rope.number("rope_theta", config.number("rope_theta", 10000.0)),
        dim=int(head_dim * partial),
        original_max=rope.count("original_max_position_embeddings", max_positions),
        factor=rope.number("factor", 1.0),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(nested.get("mscale") or 0.0),
        mscale_all_dim=float(nested.get("mscale_all_dim") or 0.0),
        truncate=rope.flag("truncate", True),
        factors=tuple(float(f) for f in nested.get("factors", ())),
    )


def head_counts(config: Config) -> tuple[int, int, int]:
    """(heads, kv heads, head dim), checked against each other."""
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    hidden = config.count("hidden_size")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={heads} is not a multiple of"
            f" num_key_value_heads={kv_heads}"
        )
    return heads, kv_heads, config.count("head_dim", max(1, hidden // heads))
