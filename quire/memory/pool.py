"""PagePool: the bytes behind the pages, one tensor for all layers. It owns no bookkeeping.

A page has a place for each layer of a group (`kv/groups.py`), and any group may use any page.
Layers of different groups at the same place share its tensors, but never a page. What a page holds
and how large it is are `kv/spec.py`'s: floats in the shape the backend asks for, or bytes of codes
and scales that the backend lays out itself.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttnSpec, LayerCache
from quire.attn.moves import slot_mover
from quire.kv.forms import CacheForm
from quire.kv.spec import CacheSpec
from quire.kv.tier_index import Buffer

LANES = (torch.int64, torch.int32, torch.int16, torch.uint8)  # bytes are moved as, widest first
Bytes = npt.NDArray[np.uint8]


class Region(NamedTuple):
    """Places of one form, and their bytes in a page that was exported."""

    data: Tensor  # [pages, places, parts, numbers]
    dtype: torch.dtype
    begin: int
    end: int


class PagePool:
    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttnSpec,
        cache: CacheSpec,
        num_pages: int,
        device: torch.device,
        place: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`place`: its bytes are made within, as are those of a drafter's pool beside it."""
        self.place = place
        self.cache, self.groups, self.num_pages = cache, cache.groups, num_pages
        self._backend, self._spec = backend, spec
        places = range(self.groups.num_places)
        # Zeros, not empty: masked keys have weight 0, but 0 times NaN is still NaN.
        if cache.is_uniform:
            shape = (len(places), cache.shape.num_parts, *self._part_shape(cache.form))
            # [places, parts, pages, ...]
            self.data = self._zeros(shape, _dtype(cache.form), device)
            self._regions = [self.data]
            tensors = list(self.data)
        else:
            self.data = self._zeros((num_pages * cache.page_bytes,), torch.uint8, device)
            tensors = self._cut([cache.place_form(place) for place in places])
            self._regions = [tensor[None] for tensor in tensors]
        # The same bytes by page, for whoever moves pages: [places, parts, pages, bytes].
        self._bytes = [region.view(torch.uint8).flatten(3) for region in self._regions]
        self.page_bytes = sum(region[:, :, 0].numel() for region in self._bytes)
        self._moved = list(self._by_page())
        self.widest = next(d for d in LANES if self.page_bytes % d.itemsize == 0)
        layers = self.groups.layers  # all of the model's, or those of a stage
        self._layers = {i: self._view(tensors[self.groups.place_of(i)], i) for i in layers}
        self._group_of = {layer: self.groups.group_of(layer) for layer in layers}

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        with self.place():
            return _zeros(shape, dtype, device)

    def _part_shape(self, form: CacheForm) -> tuple[int, ...]:
        """Of the keys, or the values, of one layer; pages first."""
        if form.is_coded:
            return (self.num_pages, self.cache.part_bytes(form))
        return self._backend.cache_shape(self.num_pages, self._spec)

    def _cut(self, forms: list[CacheForm]) -> list[Tensor]:
        """Each place's share of the bytes, [parts, pages, ...]."""
        parts, begin = self.cache.shape.num_parts, 0
        made: dict[int, Tensor] = {}
        for place in sorted(range(len(forms)), key=lambda i: forms[i].is_coded):  # floats align
            form = forms[place]
            end = begin + parts * self.num_pages * self.cache.part_bytes(form)
            share = self.data[begin:end].view(_dtype(form))
            made[place], begin = share.view(parts, *self._part_shape(form)), end
        return [made[place] for place in range(len(forms))]

    def _view(self, place: Tensor, layer: int) -> LayerCache:
        """A layer's own pages; of a place that is wider than they need to be, the front."""
        form = self.cache.form_of(layer)
        if form.is_coded:
            flat = place.view(torch.uint8).flatten(2)
            place = flat[..., : self.cache.part_bytes(form)]
        values = place[1] if len(place) == 2 else place[0][:0]
        return LayerCache(place[0], values, form, self.cache.scales.get(layer))

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def group_of(self, layer: int) -> int:
        return self._group_of[layer]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages `sources` to pages `targets`, all places (int64, no repeats)."""
        for region in self._regions:
            region[:, :, targets] = region[:, :, sources]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values of single tokens from slot to slot, [groups, tokens] int64, in all
        layers; only with a backend that takes trees (`attn/moves.py`)."""
        mover = slot_mover(self._backend)
        if not self.cache.is_uniform:
            for layer, cache in self._layers.items():
                group = self.group_of(layer)
                mover.move(cache, sources[group], targets[group], self._spec)
            return
        # All places at once: no page is of two groups.
        parts = self.data.unbind(1)
        values = parts[1] if len(parts) == 2 else parts[0][..., :0]
        whole = LayerCache(parts[0], values, self.cache.form)
        for group in range(len(self.groups)):
            mover.move(whole, sources[group], targets[group], self._spec)

    def export(self, pages: Sequence[int], room: Buffer | None = None) -> Buffer:
        """The bytes of these pages, one after the other; in `room` if there is one."""
        made = bytearray(len(pages) * self.page_bytes) if room is None else room
        for (page, region), target in zip(
            product(pages, self._bytes), self._cuts(made, len(pages)), strict=True
        ):
            target[...] = region[:, :, page].cpu().numpy()
        return made

    def adopt(self, page: int, data: Buffer) -> None:
        """Fill a page of a pool on the host with the bytes that one like it was exported to."""
        for region, source in zip(self._bytes, self._cuts(data, 1), strict=True):
            region[:, :, page].numpy()[...] = source

    def gather(self, pages: Tensor, out: Tensor) -> None:
        """The same as `export` on the pool's device: bytes of `pages`, int64, into the rows of
        `out`, [pages, page_bytes] uint8. Nothing is allocated and nobody waits."""
        for region, dtype, begin, end in self._moved:
            target = out[:, begin:end].view(dtype)
            if region.is_cuda:
                _copy_page_rows(region, pages, target, to_rows=True)
            else:
                pieces = target.view(len(out), *region.shape[1:])
                torch.index_select(region, 0, pages, out=pieces)

    def scatter(self, pages: Tensor, source: Tensor) -> None:
        """The same as `adopt`, from rows that `gather` filled."""
        for region, dtype, begin, end in self._moved:
            rows = source[:, begin:end].view(dtype)
            if region.is_cuda:
                _copy_page_rows(region, pages, rows, to_rows=False)
            else:
                region.index_copy_(0, pages, rows.view(len(source), *region.shape[1:]))

    def _by_page(self) -> Iterator[Region]:
        """Each region with its pages first, [pages, places, parts, numbers], and where its bytes
        lie in those of a page."""
        begin = 0
        for region in self._bytes:
            places, parts, _, width = region.shape
            end = begin + places * parts * width
            sizes = (width, begin, self.page_bytes, region.storage_offset(), *region.stride()[:3])
            dtype = next(d for d in LANES if not any(size % d.itemsize for size in sizes))
            yield Region(region.view(dtype).permute(2, 0, 1, 3), dtype, begin, end)
            begin = end

    def _cuts(self, data: Buffer, num_pages: int) -> Iterator[Bytes]:
        """A view [places, parts, bytes] for each region of each page. As numpy's: torch would copy
        with all its threads, and those spin for a while and slow the step that comes next."""
        flat, at = np.frombuffer(data, dtype=np.uint8), 0
        for region in self._bytes * num_pages:
            places, parts, _, width = region.shape
            end = at + places * parts * width
            yield flat[at:end].reshape(places, parts, width)
            at = end


def _copy_page_rows(region: Tensor, pages: Tensor, rows: Tensor, to_rows: bool) -> None:
    # Here and not above: CPU installs need no triton.
    from quire.kernels.page_rows import copy_page_rows

    copy_page_rows(region, pages, rows, to_rows)


def _dtype(form: CacheForm) -> torch.dtype:
    dtype = torch.uint8 if form.is_coded else getattr(torch, form.name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system hands out zero pages when they are first touched, where torch.zeros writes every
    # byte now. Small pages: numpy asks for huge ones, and the first token touches two a layer.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    flat = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), private)
    return torch.frombuffer(flat, dtype=dtype, count=math.prod(shape)).view(shape)
