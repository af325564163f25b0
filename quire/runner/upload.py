"""Uploader: all of a step's small integers to the device in one copy, without waiting for it.

Arrays keep their dtype, so nothing is converted on the device: int64 for what torch uses as an
index, int32 for what kernels read. The first ROOM words always land at the same address, so
captured graphs can read them there (`graphs.py`). That is safe on one stream: a step's copy begins
after the previous step has read its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

IntArray = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]  # int32 or int64

WORD = 4  # bytes; transfers are counted in int32s
ALIGNED = 4  # words: arrays begin at multiples of 16 bytes, which kernels are compiled for
ROOM = 1 << 16  # words at the lasting place: a decode step of 512 rows takes a tenth


class Uploader:
    """
    >>> sent = Uploader(torch.device("cpu")).send({"rows": np.int32([3, 1]), "at": np.int64([7])})
    >>> sent["rows"], sent["at"]
    (tensor([3, 1], dtype=torch.int32), tensor([7]))
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._place = torch.empty(ROOM if self._is_cuda else 0, dtype=torch.int32, device=device)

    def send(self, arrays: Mapping[str, IntArray]) -> dict[str, Tensor]:
        """Arrays by name -> device tensors by name, valid until the next `send`.

        The address of a tensor depends only on the sizes of the tensors before it.
        """
        bounds, stop = [], 0  # in words
        for array in arrays.values():
            start = stop + -stop % ALIGNED
            stop = start + array.nbytes // WORD
            bounds.append((start, stop))
        if not self._is_cuda:
            packed = _pack(arrays.values(), bounds, np.empty(stop, np.int32))
            return dict(zip(arrays, map(torch.from_numpy, packed), strict=True))
        # The pinned block is kept by torch's host allocator until the copy has run.
        host = torch.empty(stop, dtype=torch.int32, pin_memory=True)
        _pack(arrays.values(), bounds, host.numpy())
        lasting, whole = self._to_device(host)
        sent = {}
        for (name, array), (start, stop) in zip(arrays.items(), bounds, strict=True):
            part = (lasting if stop <= len(lasting) else whole)[start:stop]
            sent[name] = part if array.dtype == np.int32 else part.view(torch.int64)
        return sent

    def _to_device(self, host: Tensor) -> tuple[Tensor, Tensor]:
        """(the words that fit the lasting place, there; all words)."""
        lasting = self._place[: len(host)]
        lasting.copy_(host[: len(lasting)], non_blocking=True)
        if len(host) == len(lasting):
            return lasting, lasting
        return lasting, host.to(self.device, non_blocking=True)

    def send_one(self, host: Tensor) -> Tensor:
        if not self._is_cuda:
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


def _pack(
    arrays: Iterable[IntArray], bounds: Iterable[tuple[int, int]], words: IntArray
) -> list[IntArray]:
    """Where each array lies among the words."""
    packed = []
    for array, (start, stop) in zip(arrays, bounds, strict=True):
        assert array.dtype in (np.int32, np.int64), f"got {array.dtype}"
        part = words[start:stop].view(array.dtype)
        part[:] = array.reshape(-1)
        packed.append(part)
    return packed
