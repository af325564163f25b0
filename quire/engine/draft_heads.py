"""Heads that draft, for the composition root: loaded before pages are counted, attached after.

`models/heads/` has the heads, `load/heads.py` reads them, and `runner/` has who drafts with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.attn.backend import AttentionBackend, AttnSpec
from quire.attn.select import select_backend
from quire.config import EngineArgs
from quire.engine.cache_form import plain_form
from quire.engine.cpu_path import CpuPath
from quire.engine.gpu_weights import keeps_packed_on
from quire.engine.whole_ends import TargetModel, ops_for, whole_ends
from quire.errors import NotSupported
from quire.forward import StateReads
from quire.kv.spec import CacheSpec
from quire.load.heads import load_eagle3, load_medusa, load_mtp
from quire.load.open import open_model
from quire.load.shipped import shipped_head
from quire.load.wish import Wish
from quire.memory.pool import PagePool
from quire.models.decoder import Decoder, heads_of
from quire.models.heads.eagle3 import Eagle3Spec
from quire.models.heads.feature_head import FeatureHead
from quire.models.heads.medusa import MedusaHeads
from quire.models.heads.mtp import mtp_spec
from quire.models.kv_cache import cache_of
from quire.models.spec import ModelSpec
from quire.quant.load_forms import load_form
from quire.runner.feature_drafter import FeatureDrafter, HeadLayer
from quire.runner.medusa_drafter import MedusaDrafter
from quire.runner.runner import ModelRunner
from quire.speculative import SpecConfig

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class MedusaPart:
    heads: MedusaHeads
    page_bytes: int = 0
    taps: tuple[int, ...] = ()

    @property
    def reads(self) -> StateReads:
        return self.heads.reads

    @property
    def most(self) -> int:
        return self.heads.num_heads

    def attach(self, target: ModelRunner, max_tokens: int) -> MedusaDrafter:
        return MedusaDrafter(target, self.heads)


@dataclass(frozen=True, slots=True)
class FeaturePart:
    head: FeatureHead
    spec: AttnSpec
    backend: AttentionBackend
    cache: CacheSpec
    most: int | None = None  # it goes on as long as asked

    @property
    def page_bytes(self) -> int:
        return self.cache.page_bytes

    @property
    def reads(self) -> StateReads:
        return self.head.reads

    @property
    def taps(self) -> tuple[int, ...]:
        return self.reads.layers

    def attach(self, target: ModelRunner, max_tokens: int) -> FeatureDrafter:
        num_pages, device, place = target.pool.num_pages, target.model.device, target.pool.place
        pool = PagePool(self.backend, self.spec, self.cache, num_pages, device, place)
        layer = HeadLayer(self.head, self.spec, self.backend, pool)
        return FeatureDrafter(target, layer, max_tokens)


HeadPart = MedusaPart | FeaturePart


def open_head(config: SpecConfig, args: EngineArgs, target: TargetModel, cpu: CpuPath) -> HeadPart:
    """The head that the method names, with its weights."""
    with torch.inference_mode():
        lender = whole_ends(args, target, cpu)
        if config.model_part == "mtp":
            return _mtp(args, target, lender, cpu)
        model = config.model or shipped_head(str(config.model_part), args.model)
        own = replace(args, model=model, skip_tokenizer_init=True, load_format="auto")
        checkpoint = open_model(own).checkpoint
        form = load_form(config.quantization) if config.quantization else None
        packs = cpu.keeps_packed or keeps_packed_on(lender.device, own, checkpoint)
        wish, ops = Wish(packs, form), ops_for(lender, cpu)
        if config.model_part == "medusa":
            return MedusaPart(load_medusa(checkpoint, lender, wish, ops))
        spec = Eagle3Spec.of(checkpoint.config, checkpoint.names(), lender.spec)
        heads, backend, cache = _pages(spec.layer, args.page_size, lender)
        return FeaturePart(
            load_eagle3(checkpoint, spec, heads, lender, wish, ops), heads, backend, cache
        )


def check_is_model(name: str, config: Mapping[str, object]) -> None:
    """Raises NotSupported for a folder of heads that is given as a model."""
    kinds = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    is_medusa = config.get("model_type") == "medusa" or "medusa_num_heads" in config
    method = "medusa" if is_medusa else "eagle3" if "eagle3" in kinds else None
    if method is not None:
        raise NotSupported(
            f"got speculative_config.model={name!r} for method 'draft_model', but it holds heads;"
            f" say method {method!r}"
        )


def _mtp(args: EngineArgs, target: TargetModel, lender: Decoder, cpu: CpuPath) -> FeaturePart:
    stored = target.checkpoint
    layer = mtp_spec(set(stored.names()), lender.spec)
    heads, backend, cache = _pages(layer, args.page_size, lender)
    head = load_mtp(stored, layer, heads, lender, target.wish, ops_for(lender, cpu))
    return FeaturePart(head, heads, backend, cache)


class _Pages(NamedTuple):
    heads: AttnSpec
    backend: AttentionBackend
    cache: CacheSpec


def _pages(layer: ModelSpec, page_size: int, target: Decoder) -> _Pages:
    """How a head's keys and values are kept: as floats."""
    if layer.rope is None:
        raise NotSupported(
            "got a head without rotary positions, which end somewhere; use one that has them"
        )
    heads = heads_of(layer, page_size)
    _, backend = select_backend(None, target.device, target.dtype, heads)
    return _Pages(
        heads, backend, cache_of(layer, plain_form(backend.cache_dtype), page_size=page_size)
    )
