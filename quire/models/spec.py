"""ModelSpec: a config.json normalised once. The only place that reads a checkpoint's loose keys.

Family files turn a `Config` into a ModelSpec; everything after this reads typed fields. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from quire.errors import CheckpointError, shown


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding; names of kinds and fields as in Hugging Face configs."""

    kind: str  # default | linear | dynamic | llama3 | yarn | longrope | freq_factors
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
    factors: tuple[float, ...] = ()  # divisors of the frequencies; longrope: up to original_max
    long_factors: tuple[float, ...] = ()  # longrope: beyond it


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Which experts a token goes to, and with what weights."""

    num_experts: int
    top_k: int
    score: str = "softmax"  # or "sigmoid"
    normalize: bool = True  # the chosen weights are divided by their sum
    rounds: bool = False  # weights are rounded to the model's dtype
    # Experts stand in equal groups, and only those of the best `top_groups` may be chosen.
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2  # a group is worth the sum of so many of its best scores
    scale: float = 1.0
    bias: bool = False  # of the product that gives the scores
    correction: bool = False  # a learned number for each expert decides who is chosen, no more

    def __post_init__(self) -> None:
        if not self.top_k <= self.num_experts:
            raise CheckpointError(
                f"config.json: got num_experts_per_tok={self.top_k}, want at most the"
                f" {self.num_experts} experts"
            )
        is_even = self.num_experts % self.num_groups == 0
        allowed = self.num_experts // self.num_groups * self.top_groups
        if not (is_even and self.top_k <= allowed <= self.num_experts):
            raise CheckpointError(
                f"config.json: got topk_group={self.top_groups} of n_group={self.num_groups}, want"
                f" groups that divide {self.num_experts} experts evenly and leave {self.top_k}"
            )


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Feed-forward blocks made of many experts, of which each token visits a few."""

    router: RouterSpec
    ffn_size: int  # of one expert
    shared_ffn_size: int = 0  # of the expert all tokens visit; 0: none
    shared_gate: bool = True  # it stands behind a sigmoid gate
    dense_layers: frozenset[int] = frozenset()  # these keep a plain feed-forward block
    expert_bias: bool = False
    # Not None: (up + 1) * gate * sigmoid(alpha * gate), both clamped, instead of silu(gate) * up.
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    @property
    def has_shared_gate(self) -> bool:
        return self.shared_ffn_size > 0 and self.shared_gate

    def num_params(self, hidden_size: int, num_experts: int) -> int:
        """Weights of one layer, counting so many of its experts."""
        ffn = num_experts * self.ffn_size + self.shared_ffn_size
        num_scores = self.router.num_experts + self.has_shared_gate
        return hidden_size * (3 * ffn + num_scores)


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Latent attention: keys and values of all heads are one vector per token until used."""

    q_rank: int | None  # width queries are squeezed to first; None: they are not
    kv_rank: int  # width of the latent that is cached ...
    rope_dim: int  # ... beside one rotated key for all heads
    nope_dim: int  # dims of each head's query and key that are not rotated
    v_dim: int
    interleaved: bool = True  # rotated dims are stored as pairs side by side, not as halves


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
    qk_norm: str = "none"  # or "head": of each head of q and k, or "width": of all their heads
    norm_after: bool = False  # blocks norm what they add instead of what they read
    rope: RopeSpec | None = None  # None: learned positions
    tied: bool = False
    dtype: str = "float32"  # as stored
    # By layer: how many last positions it sees, itself included; None or no entry: all of them.
    windows: tuple[int | None, ...] = ()
    local_rope: RopeSpec | None = None  # of the windowed layers, where it differs
    sinks: bool = False  # each head has a learned logit that takes part in its softmax
    attn_softcap: float | None = None  # logits are bent to stay below it
    logit_softcap: float | None = None
    mla: MlaSpec | None = None
    activation: str = "silu"  # or "gelu" (its tanh form), or "relu2"
    norm_offset: float = 0.0  # added to the weights of norms
    norm_both: bool = False  # blocks norm what they read and what they add
    sub_norms: bool = False  # norms before the out and down projections
    num_labels: int = 0  # of a classification head, which stands beside the vocabulary's
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = field(default=())
    moe: MoeSpec | None = None  # None: every layer has one feed-forward block
    attn_scale: float | None = None  # of the logits of attention; None: 1 / sqrt(head_dim)
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what blocks add
    logit_scale: float = 1.0

    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def num_params(self) -> int:
        """Weights, norms and biases left out."""
        return self._count(self.moe.router.num_experts if self.moe else 0)

    @property
    def num_active_params(self) -> int:
        """Weights that one token meets: of a sparse model's experts the chosen ones alone."""
        return self._count(self.moe.router.top_k if self.moe else 0)

    def _attention_params(self) -> int:
        """Weights of one layer's attention."""
        if self.mla is None:
            return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mla, heads = self.mla, self.num_heads
        q = heads * (mla.nope_dim + mla.rope_dim)
        q = self.hidden_size * q if mla.q_rank is None else mla.q_rank * (self.hidden_size + q)
        kv = self.hidden_size * (mla.kv_rank + mla.rope_dim)
        kv += mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
        return q + kv + heads * mla.v_dim * self.hidden_size

    def _count(self, num_experts: int) -> int:
        attn = self._attention_params()
        mlp = self.hidden_size * self.ffn_size * (3 if self.mlp == "gated" else 2)
        embed = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        total = self.num_layers * attn + embed
        sparse = sum(self.is_sparse(layer) for layer in range(self.num_layers))
        if self.moe is not None:
            total += sparse * self.moe.num_params(self.hidden_size, num_experts)
        return total + (self.num_layers - sparse) * mlp


# No checkpoint comes near these. They keep a made-up count from filling memory before the tensors
# are there to contradict it (`load/fit.py`), and sizes of tensors inside 64 bits.
MAX_COUNT, MAX_LAYERS, MAX_EXPERTS, MAX_LABELS = 2**24, 4096, 4096, 2**16
MAX_WEIGHTS = 10**15
MIN_NUMBER, MAX_NUMBER = 1e-20, 1e12  # their squares are inside float32
_SPAN = f"from {MIN_NUMBER:g} to {MAX_NUMBER:g}"
_MOST = {
    "num_hidden_layers": MAX_LAYERS,
    "n_layer": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
    "n_shared_experts": MAX_EXPERTS,
    "num_labels": MAX_LABELS,
}


class Config:
    """A config.json whose missing, mistyped and impossible values become clear errors."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def error(self, key: str, want: str) -> CheckpointError:
        value = self.values.get(key)
        got = f"no {key}" if value is None else f"{key}={shown(value)}"
        return CheckpointError(f"config.json: got {got}, want {want}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number that something in the model is counted by."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        most = _MOST.get(key, MAX_COUNT)
        if not _is_whole(value) or not least <= value <= most:
            raise self.error(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number that arithmetic in float32 survives."""
        value = self.values.get(key)
        if value is None:
            return default
        if not _is_sane(value):
            raise self.error(key, f"a number {_SPAN}")
        return float(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        values = self.values.get(key)
        if not isinstance(values, list) or len(values) != length or not all(map(_is_sane, values)):
            raise self.error(key, f"a list of {length} numbers {_SPAN}")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def expect(self, key: str, known: tuple[str, ...], default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self.error(key, f"one of {', '.join(known)}")
        return value

    def nested(self, key: str) -> Config:
        """The object under a key; an empty one where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Config(value or {})

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids, or layers: one whole number or a list of them."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(_is_whole(id) and 0 <= id < MAX_COUNT for id in ids):
            raise self.error(key, f"a whole number from 0 to {MAX_COUNT - 1}, or a list of them")
        return tuple(ids)

    @property
    def dtype(self) -> str:
        key = "dtype" if self.has("dtype") else "torch_dtype"
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "the name of a dtype such as 'bfloat16'")
        return value or "float32"


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_sane(value: object) -> TypeGuard[float]:
    return (_is_whole(value) or isinstance(value, float)) and MIN_NUMBER <= value <= MAX_NUMBER


def check_sizes(spec: ModelSpec) -> ModelSpec:
    """The spec, if its counts make sense together; whether they fit the tensors is `load/fit.py`'s
    to say."""
    if (total := spec.num_params) > MAX_WEIGHTS:
        raise CheckpointError(
            f"config.json describes a model of {total:.3g} weights, want at most {MAX_WEIGHTS:.0e};"
            " one of its sizes must be wrong"
        )
    return spec


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "freq_factors")


def rope_spec(config: Config, head_dim: int, max_positions: int) -> RopeSpec:
    """Both spellings: `rope_parameters` (new) and `rope_theta` + `rope_scaling` (old)."""
    rope = config.nested("rope_parameters")
    rope = rope if rope.values else config.nested("rope_scaling")
    if rope.has("short_factor"):
        kind = "longrope"  # early Phi-3 configs call it su or yarn
    else:
        kind = rope.expect("rope_type" if rope.has("rope_type") else "type", ROPE_KINDS, "default")
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    if dim > head_dim or dim < 2 or dim % 2:
        raise CheckpointError(
            f"config.json: got partial_rotary_factor={partial:g} of heads of {head_dim}, want an"
            f" even number of rotated dims from 2 to {head_dim}"
        )
    original = config.count("original_max_position_embeddings", max_positions)
    spec = RopeSpec(
        kind=kind,
        theta=rope.number("rope_theta", config.number("rope_theta", 10000.0)),
        dim=dim,
        original_max=rope.count("original_max_position_embeddings", original),
        factor=rope.number("factor", 1.0),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_if_any(rope, "attention_factor"),
        mscale=_if_any(rope, "mscale") or 0.0,
        mscale_all_dim=_if_any(rope, "mscale_all_dim") or 0.0,
        truncate=rope.flag("truncate", True),
        factors=rope.numbers("factors", dim // 2) if kind == "freq_factors" else (),
    )
    return _longrope(spec, rope, max_positions) if kind == "longrope" else spec


def _if_any(config: Config, key: str) -> float | None:
    """A number, or None where it is missing or 0, which some configs write for "none"."""
    value = config.values.get(key)
    is_zero = not isinstance(value, bool) and value == 0
    return None if value is None or is_zero else config.number(key, 0.0)


def _longrope(spec: RopeSpec, rope: Config, max_positions: int) -> RopeSpec:
    """With its two lists of factors; the stretch defaults to what the positions grew by."""
    half = spec.dim // 2
    short, long = rope.numbers("short_factor", half), rope.numbers("long_factor", half)
    factor = rope.number("factor", max_positions / spec.original_max)
    return replace(spec, factor=factor, factors=short, long_factors=long)


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
