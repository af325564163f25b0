"""In which form an engine's cache keeps its numbers, and why: what was asked for, and where scales
come from. `kv/spec.py` counts the bytes of what is decided here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from quire.attn.backend import AttentionBackend, LayerCache
from quire.attn.balance import NUM_PROBES, KeyProbe, balanced
from quire.config import CacheConfig, Decision, EngineArgs
from quire.forward import LayerContext
from quire.kv.forms import CODED, FLOATS, OWN_SCALES, CacheForm
from quire.kv.spec import CacheSpec
from quire.load.checkpoint import Checkpoint
from quire.load.kv_scales import kv_scales
from quire.models.decoder import Decoder
from quire.models.kv_cache import CacheWish
from quire.models.spec import ModelSpec
from quire.nn.at_home import AtHome
from quire.nn.attention import Attention


def plain_form(dtype: torch.dtype) -> CacheForm:
    return FLOATS[str(dtype).removeprefix("torch.")]


def cache_wish(
    args: EngineArgs, config: CacheConfig, checkpoint: Checkpoint, spec: ModelSpec
) -> CacheWish:
    """A checkpoint's scales are for fp8: they say which number becomes its largest."""
    if config.dtype == "auto":
        return CacheWish()
    is_calibrated = config.dtype == "fp8" and not args.kv_cache_dtype.endswith(OWN_SCALES)
    is_dummy = args.load_format == "dummy"
    has_scales = is_calibrated and spec.mla is None and not is_dummy
    scales = kv_scales(checkpoint, spec.num_layers) if has_scales else {}
    return CacheWish(CODED[config.dtype], config.skipped, scales)


@torch.inference_mode()
def balance_keys(model: Decoder, cache: CacheSpec) -> None:
    """Layers whose keys become codes by scales of their own learn what to even out first."""
    for attention, probe, rotates in _probed(model, cache):
        assert attention.transform is not None
        may_shift = _may_shift(attention)
        attention.transform = balanced(attention.transform, probe, may_shift, rotates)


def splits_key_heads(model: Decoder) -> bool:
    """Whether some ranks have the same key head, each with a part of its queries."""
    return any(
        isinstance(block.attn, Attention) and block.attn.own.kv.total < model.ranks.size
        for block in model.blocks
    )


@torch.inference_mode()
def share_queries(model: Decoder, cache: CacheSpec) -> None:
    """Where a key head is several ranks', they even it out by the queries of all, as one rank
    does. Each of them is asked, so everybody must have loaded the model. In place: what has been
    recorded stays as it is."""
    for attention, probe, rotates in _probed(model, cache):
        if rotates:
            assert attention.transform is not None
            known, own = attention.transform.balance, attention.own
            assert known is not None, "shared before keys were balanced"
            every = attention.passage.inputs.gather(probe.queries.flatten(1))
            each, dim = own.q.total // own.kv.total, attention.heads.head_dim
            heads = every.view(len(every), own.q.total, dim)
            probe.queries = heads[:, own.kv.begin * each : own.kv.end * each]
            may_shift = _may_shift(attention)
            made = balanced(attention.transform, probe, may_shift, rotates).balance
            assert made is not None
            known.factors.copy_(made.factors)


def _probed(model: Decoder, cache: CacheSpec) -> Iterator[tuple[Attention, KeyProbe, bool]]:
    """Layers to be evened out, with what random inputs become there, and whether rows of codes are
    rotated."""
    if cache.coded is None or model.spec.mla is not None:
        return
    numbers = torch.Generator(device="cpu").manual_seed(0)
    size = (NUM_PROBES, model.spec.hidden_size)
    x = torch.randn(size, generator=numbers, device="cpu").to(model.device, model.dtype)
    for layer, block in zip(model.layers, model.blocks, strict=True):
        if not cache.form_of(layer).is_coded or layer in cache.scales:
            continue
        probe, empty = KeyProbe(), LayerCache(x[:0], x[:0])
        attention = block.attn.inner if isinstance(block.attn, AtHome) else block.attn
        assert isinstance(attention, Attention)
        block.store(x, None, LayerContext(cast("AttentionBackend", probe), empty, None))
        yield attention, probe, cache.form_of(layer).rotates


def _may_shift(attention: Attention) -> bool:
    """Whether the softmax sees nothing but the keys' logits."""
    return attention.heads.softcap is None and attention.sinks is None


def cache_decisions(cache: CacheSpec) -> list[Decision]:
    """Where scales come from; nothing to say of floats."""
    if cache.coded is None:
        return []
    own = "of each token and head, a bf16 beside its codes"
    if cache.coded.rotates:
        own += "; keys and values are rotated first"
    if not cache.scales:
        return [Decision("kv cache scales", "own", own)]
    said = f"the checkpoint brings them for {len(cache.scales)} of {cache.groups.num_layers} layers"
    return [Decision("kv cache scales", "calibrated", said)]
