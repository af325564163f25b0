"""PagePool: the bytes behind the pages, one tensor for all layers. It owns no bookkeeping.

A page has a place for each layer of a group (`kv/groups.py`), and any group may use any page.
Layers of different groups at the same place share its tensors, but never a page.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttnSpec, LayerCache
from quire.kv.groups import LayerGroups


def bytes_per_page(spec: AttnSpec, num_places: int, dtype: torch.dtype) -> int:
    """Bytes of one page: the keys and values of `num_places` layers (a group) for its tokens."""
    width = spec.num_kv_heads * spec.head_dim
    return _num_parts(spec) * num_places * spec.page_size * width * dtype.itemsize


def _num_parts(spec: AttnSpec) -> int:
    """Keys, and values unless they are read out of the keys."""
    return 2 if spec.value_dim is None else 1


class PagePool:
    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttnSpec,
        groups: LayerGroups,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups, self.num_pages = groups, num_pages
        shape = backend.cache_shape(num_pages, spec)
        # Zeros, not empty: masked keys have weight 0, but 0 times NaN is still NaN.
        self.data: Tensor = _zeros(
            (groups.num_places, _num_parts(spec), *shape), dtype, device
        )  # [places, parts, pages, ...]
        places = [
            LayerCache(place[0], place[1] if len(place) == 2 else place[0][:0])
            for place in self.data
        ]
        layers = range(groups.num_layers)
        self._layers = [places[groups.place_of(layer)] for layer in layers]
        self._group_of = [groups.group_of(layer) for layer in layers]

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def group_of(self, layer: int) -> int:
        return self._group_of[layer]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages `sources` to pages `targets`, all places (int64, no repeats)."""
        self.data[:, :, targets] = self.data[:, :, sources]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system hands out zero pages when they are first touched, where torch.zeros writes every
    # byte now. Small pages: numpy asks for huge ones, and the first token touches two a layer.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    flat = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), private)
    return torch.frombuffer(flat, dtype=dtype, count=math.prod(shape)).view(shape)
