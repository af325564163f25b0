"""Roofline: what a step must move and compute, and the least time a device needs for that.

A step counts each weight once, the keys and values of each request once, and the operations of
products and attention. Norms, activations and sampling could stay on the chip, so their floor is 0.
The last layer counts for every token, as in the model's definition, although a prompt's step leaves
most of it out (`runner/tail.py`): some 3 % of an 8B model. Arithmetic on a `ModelSpec` alone, no
torch; `suite_limits.py` applies it to workloads, `profile.py` to kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.kv.forms import CacheForm
from quire.kv.spec import CacheSpec
from quire.models.kv_cache import cache_of
from quire.models.spec import ModelSpec

PRODUCTS = ("qkv", "out", "up", "down", "head")  # of a dense model, in the order they run


class Ceilings(NamedTuple):
    """What a device can do at most, and who says so."""

    bandwidth: float  # bytes a second
    flops: float  # operations a second
    source: str


@dataclass(frozen=True, slots=True)
class Load:
    """
    >>> weights = Load(num_bytes=2e9, num_flops=1e9)
    >>> (weights + weights).seconds(Ceilings(1e12, 1e14, "made up"))
    0.004
    """

    num_bytes: float = 0.0
    num_flops: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def seconds(self, ceilings: Ceilings) -> float:
        """The longer of moving and computing: at best the two overlap."""
        return max(self.num_bytes / ceilings.bandwidth, self.num_flops / ceilings.flops)


class Feed(NamedTuple):
    """One request's share of a step: tokens after those already in the cache."""

    start: int
    num_tokens: int


def total(loads: Iterable[Load]) -> Load:
    return sum(loads, Load())


def step_loads(
    spec: ModelSpec, feeds: Sequence[Feed], itemsize: int, cache: CacheSpec | None = None
) -> Mapping[str, Load]:
    """Loads by kind of work, all layers together; every request draws one token.

    `itemsize` is the size of a weight in bytes, and of a number in the cache where nothing else is
    said of it.
    """
    cache = cache or floats_of(spec, itemsize)
    tokens = sum(feed.num_tokens for feed in feeds)
    hidden, layers, heads = spec.hidden_size, spec.num_layers, _heads(spec)
    dense = sum(not spec.is_sparse(layer) for layer in range(layers))
    ups = 2 if spec.mlp == "gated" else 1

    def product(num_weights: int, rows: int = tokens) -> Load:
        return Load(num_weights * itemsize, 2 * num_weights * rows)

    loads = {
        "qkv": product(layers * heads.qkv),
        "out": product(layers * heads.out),
        "up": product(dense * ups * spec.ffn_size * hidden),
        "down": product(dense * spec.ffn_size * hidden),
        "head": product(spec.vocab_size * hidden, len(feeds)),
        "attention": attention_load(spec, feeds, cache),
        "cache write": Load(tokens * cache.token_bytes),
    }
    if spec.moe is not None:
        loads["experts"] = _experts(spec, tokens, layers - dense, itemsize)
    return loads


class _Heads(NamedTuple):
    """What attention costs in one layer."""

    qkv: int  # weights
    out: int
    pair: int  # operations for a query and a key


def _heads(spec: ModelSpec) -> _Heads:
    hidden, num, dim = spec.hidden_size, spec.num_heads, spec.head_dim
    if (mla := spec.mla) is None:
        kv = spec.num_kv_heads * dim
        return _Heads(hidden * (num * dim + 2 * kv), hidden * num * dim, 4 * num * dim)
    query, entry = num * (mla.nope_dim + mla.rope_dim), mla.kv_rank + mla.rope_dim
    q = hidden * query if mla.q_rank is None else mla.q_rank * (hidden + query)
    kv = hidden * entry + mla.kv_rank * num * (mla.nope_dim + mla.v_dim)
    return _Heads(q + kv, hidden * num * mla.v_dim, 2 * (query + num * mla.v_dim))


def floats_of(spec: ModelSpec, itemsize: int) -> CacheSpec:
    """A cache of floats of that size."""
    return cache_of(spec, CacheForm(f"float{8 * itemsize}", 8 * itemsize))


def attention_load(spec: ModelSpec, feeds: Sequence[Feed], cache: CacheSpec) -> Load:
    """Each request's cache is read once; a token meets its window, itself included."""
    num_bytes = num_pairs = 0
    layers = Counter(
        (spec.window_of(layer), cache.layer_bytes(layer)) for layer in range(spec.num_layers)
    )
    for (window, token_bytes), count in layers.items():
        for start, num in feeds:
            width = start + num if window is None else window
            growing = max(0, min(num, width - start))  # tokens whose window is not yet full
            pairs = growing * start + growing * (growing + 1) // 2 + (num - growing) * width
            num_pairs += count * pairs
            num_bytes += count * min(start + num, width + num - 1) * token_bytes
    return Load(num_bytes, num_pairs * _heads(spec).pair)


def _experts(spec: ModelSpec, tokens: int, num_layers: int, itemsize: int) -> Load:
    """Reads the experts that some token visits, if tokens choose evenly."""
    moe = spec.moe
    assert moe is not None
    num, top = moe.router.num_experts, moe.router.top_k
    visited = num * (1 - (1 - top / num) ** tokens)
    always = moe.num_params(spec.hidden_size, 0)
    one = moe.num_params(spec.hidden_size, 1) - always
    return Load(
        num_layers * (always + visited * one) * itemsize,
        2 * num_layers * tokens * (always + top * one),
    )
