"""Moving single tokens in a cache: the bytes of some slots to other slots, in every layout.

Only steps with trees of drafts need it (`runner/trees.py`): a draft that was right may lie in
another slot than its position's. Tensors may have more dimensions in front of the pages, so that
layers kept in one tensor move at once. Sources are read before targets are written.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from quire.attn.backend import AttentionBackend, AttnSpec, LayerCache
from quire.kv.forms import SCALE_BYTES, CacheForm


class SlotMover(Protocol):
    """A backend that can move tokens; `AttnCaps.trees` says so."""

    def move(self, cache: LayerCache, sources: Tensor, targets: Tensor, spec: AttnSpec) -> None:
        """Keys and values at slots `sources` [tokens] int64 go to slots `targets`."""
        ...


def slot_mover(backend: AttentionBackend) -> SlotMover:
    assert backend.caps.trees, f"{type(backend).__name__} moves no tokens"
    return cast("SlotMover", backend)


def move_rows(pages: Tensor, sources: Tensor, targets: Tensor, heads: tuple[int, int]) -> None:
    """Pages of bytes [..., pages, page size * heads * row]; `heads` is (page size, heads)."""
    rows, size = pages.unflatten(-1, (*heads, -1)), heads[0]
    rows[..., targets // size, targets % size, :, :] = rows[
        ..., sources // size, sources % size, :, :
    ]


def move_tokens(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Pages [..., pages, page size, heads, dim]."""
    size = pages.shape[-3]
    pages[..., targets // size, targets % size, :, :] = pages[
        ..., sources // size, sources % size, :, :
    ]


def move_by_head(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Pages [..., pages, heads, page size, dim]."""
    move_tokens(pages.transpose(-3, -2), sources, targets)


RUN = 16  # of `native/src/quire_native.h`, whose layout this is


def move_in_runs(
    pages: Tensor,
    sources: Tensor,
    targets: Tensor,
    spec: AttnSpec,
    *,
    is_keys: bool,
    form: CacheForm,
) -> None:
    """Pages of the native library: each head of a page is cut into runs of tokens."""
    run = min(spec.page_size, RUN)
    if not form.is_coded:
        move_lanes(pages.unflatten(-1, (-1, spec.head_dim * run)), sources, targets, spec, is_keys)
        return
    heads = pages.unflatten(-1, (spec.num_kv_heads, spec.page_size // run, -1))
    scales = heads.shape[-1] - SCALE_BYTES * run
    move_lanes(heads[..., :scales], sources, targets, spec, is_keys)
    move_lanes(heads[..., scales:], sources, targets, spec, False)


def move_lanes(
    runs: Tensor, sources: Tensor, targets: Tensor, spec: AttnSpec, is_keys: bool
) -> None:
    """[..., pages, heads, runs, numbers of a run]: a token's are side by side, but for keys."""
    run, size = min(spec.page_size, RUN), spec.page_size
    by_token = runs.unflatten(-1, (-1, run) if is_keys else (run, -1))
    if is_keys:
        by_token = by_token.transpose(-1, -2)  # [..., pages, heads, runs, run, numbers]
    by_token = by_token.transpose(-4, -3)  # [..., pages, runs, heads, run, numbers]
    to, at = (
        (slots // size, slots % size // run, slice(None), slots % run)
        for slots in (targets, sources)
    )
    by_token[(..., *to, slice(None))] = by_token[(..., *at, slice(None))]
