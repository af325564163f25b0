"""Uploader: all of a step's small integers to the device in one copy, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

IntArray = np.ndarray[Any, np.dtype[np.int32]]


class Uploader:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, arrays: dict[str, IntArray]) -> dict[str, Tensor]:
        """int32 arrays by name -> int32 device tensors by name, views of one transfer."""
        flat = np.concatenate([a.reshape(-1) for a in arrays.values()], dtype=np.int32)
        on_device = self.send_one(torch.from_numpy(flat))
        sizes = [a.size for a in arrays.values()]
        return dict(zip(arrays, on_device.split(sizes), strict=True))

    def send_one(self, host: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return host
        # The pinned block is kept by torch's host allocator until the copy has run.
        return host.pin_memory().to(self.device, non_blocking=True)
