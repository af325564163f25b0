"""In which form an engine's cache keeps its numbers, and why: what was asked for, and where scales
come from. `kv/spec.py` counts the bytes of what is decided here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from quire.attn.backend import AttentionBackend, HeadTransform, LayerCache
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
    for attention, probe in _probed(model, cache):
        attention.transform = _balanced(attention, probe, cache)


def splits_queries(model: Decoder, cache: CacheSpec) -> bool:
    """Whether ranks have the same key head, each with some of the queries that even it out."""
    if not cache.form.rotates:
        return False
    return any(
        isinstance(block.attn, Attention) and block.attn.own.kv.total < model.ranks.size
        for block in model.blocks
    )


@torch.inference_mode()
def share_queries(model: Decoder, cache: CacheSpec) -> None:
    """Ranks that have the same key head even it out by the queries of all, as one rank does. Each
    is asked for its own, so everybody must have loaded the model. In place: what was recorded of
    the factors so far holds."""
    for attention, probe in _probed(model, cache):
        own, dim = attention.own, attention.heads.head_dim
        every = attention.passage.inputs.gather(probe.queries.flatten(1)).unflatten(1, (-1, dim))
        each = own.q.total // own.kv.total
        probe.queries = every[:, own.kv.begin * each : own.kv.end * each]
        known, found = attention.transform, _balanced(attention, probe, cache)
        assert known is not None and known.balance is not None and found.balance is not None
        known.balance.factors.copy_(found.balance.factors)


def _probed(model: Decoder, cache: CacheSpec) -> Iterator[tuple[Attention, KeyProbe]]:
    """Layers to be evened out, with what random inputs become there."""
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
        yield attention, probe


def _balanced(attention: Attention, probe: KeyProbe, cache: CacheSpec) -> HeadTransform:
    assert attention.transform is not None
    may_shift = attention.heads.softcap is None and attention.sinks is None
    return balanced(attention.transform, probe, may_shift, cache.form.rotates)


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
