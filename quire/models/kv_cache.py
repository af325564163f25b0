"""What a model's layers keep of a token: the CacheSpec of a ModelSpec. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.kv.forms import CacheForm
from quire.kv.groups import layer_groups
from quire.kv.spec import CacheSpec, KvScales, KvShape
from quire.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class CacheWish:
    """What is asked of the cache besides plain floats."""

    coded: CacheForm | None = None
    skipped: frozenset[int] = frozenset()
    scales: dict[int, KvScales] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        return self.coded.name if self.coded else None


def kv_shape(spec: ModelSpec) -> KvShape:
    if spec.mla is not None:  # one latent and one rotated key for all heads
        return KvShape(1, spec.mla.kv_rank + spec.mla.rope_dim, num_parts=1, num_scales=2)
    return KvShape(spec.num_kv_heads, spec.head_dim)


def cache_of(
    spec: ModelSpec,
    plain: CacheForm,
    wish: CacheWish = CacheWish(),  # noqa: B008 (a value, never changed)
    page_size: int = 16,
    is_staged: bool = False,
) -> CacheSpec:
    """`is_staged`: some have these layers, some others those."""
    groups = layer_groups(spec.windows, spec.num_layers, is_staged)
    return CacheSpec(
        kv_shape(spec), groups, page_size, plain, wish.coded, wish.skipped, wish.scales
    )
