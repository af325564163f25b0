"""DraftModel: a model that drafts for another one, whole on its rank, with pages of its own.

It may be any smaller model, of another vocabulary too, or the first layers of the target itself
where ranks have only parts of those (`draft_exit.py` is for a rank that has them whole).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from quire.attn.backend import AttentionBackend, AttnSpec
from quire.attn.select import select_backend
from quire.config import EngineArgs, EngineConfig
from quire.engine.cache_form import plain_form
from quire.engine.cpu_path import CpuPath
from quire.engine.draft_exit import ExitPart
from quire.engine.draft_heads import check_is_model
from quire.engine.gpu_weights import keeps_packed_on
from quire.engine.load_model import load_model
from quire.engine.whole_ends import TargetModel, fill, ops_for
from quire.errors import NotSupported
from quire.kv.spec import CacheSpec
from quire.load.open import has_tokenizer, open_model
from quire.load.wish import Wish
from quire.memory.pool import PagePool
from quire.models.decoder import Decoder, heads_of
from quire.models.kv_cache import cache_of
from quire.models.registry import spec_of
from quire.models.spec import ModelSpec
from quire.models.translate import translate
from quire.nn.norm import RMSNorm
from quire.quant.load_forms import load_form
from quire.speculative import SpecConfig
from quire.text.shared_tokens import SharedTokens, are_alike
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded model that drafts, and what each page must hold of it."""

    model: Decoder
    heads: AttnSpec
    backend: AttentionBackend
    cache: CacheSpec
    taps: tuple[int, ...] = ()
    most: int | None = None

    @property
    def page_bytes(self) -> int:
        return self.cache.page_bytes

    def pool(self, beside: PagePool) -> PagePool:
        device = self.model.device
        args = self.backend, self.heads, self.cache, beside.num_pages, device, beside.place
        return PagePool(*args)


def open_draft_model(
    config: SpecConfig, args: EngineArgs, target: TargetModel, engine: EngineConfig, cpu: CpuPath
) -> DraftModel:
    assert config.model is not None
    own = replace(args, model=config.model, tokenizer=None)
    own = replace(own, skip_tokenizer_init=args.skip_tokenizer_init or not has_tokenizer(own))
    opened = open_model(own)
    checkpoint = opened.checkpoint
    check_is_model(config.model, checkpoint.config)
    spec = spec_of(checkpoint.config)
    _check_fits(f"speculative_config.model={config.model!r}", spec)
    change = _translation(config.model, spec, opened.tokenizer, target)
    heads, device = heads_of(spec, args.page_size), target.model.device
    dtype: torch.dtype = getattr(torch, engine.dtype)
    _, backend = select_backend(None, device, dtype, heads)
    form = load_form(config.quantization) if config.quantization else None
    wish = Wish(cpu.keeps_packed or keeps_packed_on(device, own, checkpoint), form)
    model, ops = load_model(
        checkpoint, spec, heads, engine, cpu, wish, dtype, device, change=change
    )
    backend = cpu.attention(backend, ops)
    cache = cache_of(spec, plain_form(backend.cache_dtype), page_size=args.page_size)
    return DraftModel(model, heads, backend, cache)


def open_whole_exit(
    part: ExitPart, args: EngineArgs, target: TargetModel, engine: EngineConfig, cpu: CpuPath
) -> DraftModel:
    """The target's first layers once more, all of each, with pages of their own."""
    checkpoint, device = target.checkpoint, target.model.device
    spec = spec_of(checkpoint.config)
    spec = replace(spec, num_layers=part.depth, windows=spec.windows[: part.depth])
    _check_fits("speculative_config.method='early_exit' on several ranks", spec)
    heads = heads_of(spec, args.page_size)
    _, backend = select_backend(None, device, target.model.dtype, heads)
    with torch.inference_mode():
        size = engine.sched.max_model_len
        model = Decoder(spec, heads, size, target.model.dtype, device)
        fill(model, args, target)
        ops = ops_for(model, cpu)
        model.finish(ops)
    if part.adapter is not None:
        model.norm = cast("RMSNorm", part.adapter)  # called as one
    backend = cpu.attention(backend, ops)
    cache = cache_of(spec, plain_form(backend.cache_dtype), page_size=args.page_size)
    return DraftModel(model, heads, backend, cache)


def _translation(
    name: str, spec: ModelSpec, own: Tokenizer | None, target: TargetModel
) -> Callable[[Decoder], None] | None:
    """What makes a drafter of another vocabulary speak the target's; None: it does already."""
    theirs, num_tokens = target.tokenizer, target.model.spec.vocab_size
    if own is None or theirs is None:
        if spec.vocab_size == num_tokens:
            return None
        raise NotSupported(
            f"got speculative_config.model={name!r} with {spec.vocab_size} tokens for a model with"
            f" {num_tokens}, and no tokenizer to compare them by: use a model of the same family,"
            " leave skip_tokenizer_init out, or use method 'suffix'"
        )
    if spec.vocab_size == num_tokens and are_alike(own, theirs):
        return None
    shared = SharedTokens.of(own, (spec.vocab_size, num_tokens), theirs)
    if not shared.pairs:
        raise NotSupported(
            f"got speculative_config.model={name!r}, which has no token in common with the model it"
            " is to draft for; use another, or method 'suffix'"
        )
    return lambda model: translate(model, shared)


def _check_fits(asked: str, spec: ModelSpec) -> None:
    if any(window is not None for window in spec.windows):
        raise NotSupported(
            f"got {asked}, whose layers see only a window: its pages lie"
            " under the numbers of the target's, which keeps no windows for it; use a model"
            " without windows"
        )
    if spec.rope is None:
        raise NotSupported(
            f"got {asked}, whose positions end at"
            f" {spec.max_positions}: use a model with rotary positions"
        )
