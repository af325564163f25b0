"""PagePool: the bytes behind the pages, one tensor for all layers. It owns no bookkeeping."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttnSpec, LayerCache


def bytes_per_page(spec: AttnSpec, num_layers: int, dtype: torch.dtype) -> int:
    """Keys and values of all layers for one page of tokens."""
    return 2 * num_layers * spec.page_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class PagePool:
    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttnSpec,
        num_layers: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, *backend.cache_shape(num_pages, spec))
        # Zeros, not empty: masked keys weigh nothing, but nothing times NaN is still NaN.
        self.data: Tensor = _zeros(shape, dtype, device)
        self.num_pages = num_pages
        self._layers = [LayerCache(layer[0], layer[1]) for layer in self.data]

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """All layers' content of pages `sources` goes to `targets` (int64, no repeats)."""
        self.data[:, :, targets] = self.data[:, :, sources]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros come from calloc: the system hands out zero pages when they are first touched,
    # where torch.zeros writes every byte now (half a second a GiB) and holds it all from the start.
    flat = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
