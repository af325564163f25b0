"""LoadReader: the counters of a mixture of experts, brought to the host without a wait.

Steps add to the counters on the device. Every few seconds, between two steps, a copy to pinned
memory is put behind the work already launched; a later look finds it done. All of that happens on
the thread that steps, since a CUDA call from another one may break the capture of a graph; only
`take` may be called from elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.models.decoder import Decoder

READ_EVERY_S = 5.0


class LoadReader:
    """
    >>> loads = torch.zeros(2, 4, dtype=torch.int64)
    >>> reader = LoadReader(loads, layers=[1, 3])
    >>> loads[0, 2] += 7
    >>> reader.poll(); reader.poll(); reader.take()
    {1: [0, 0, 7, 0], 3: [0, 0, 0, 0]}
    >>> reader.take()
    {}
    """

    def __init__(
        self, loads: Tensor, layers: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`loads` [sparse layers, experts] are the counters, `layers` those layers' numbers."""
        assert len(loads) == len(layers), f"{loads.shape=} {layers=}"
        self._loads, self._layers, self._clock = loads, list(layers), clock
        is_cuda = loads.device.type == "cuda"
        self._host = torch.empty(loads.shape, dtype=loads.dtype, pin_memory=is_cuda)
        self._done = torch.cuda.Event() if is_cuda else None
        self._is_copying = False
        self._next = 0.0
        self._sent: list[list[int]] | None = None
        self._fresh: dict[int, list[int]] = {}

    @staticmethod
    def of(model: Decoder) -> LoadReader | None:
        """Begin to count, before the model's first step; None for a model without experts."""
        spec = model.spec
        layers = [layer for layer in model.layers if spec.is_sparse(layer)]
        return LoadReader(model.count_expert_loads(), layers) if layers else None

    def poll(self) -> None:
        """Begin or end a reading if one is due. Between steps, on the thread that steps."""
        if self._is_copying:
            if self._done is None or self._done.query():
                self._finish()
        elif (now := self._clock()) >= self._next:
            self._next = now + READ_EVERY_S
            self._host.copy_(self._loads, non_blocking=True)
            if self._done is not None:
                self._done.record()
            self._is_copying = True

    def _finish(self) -> None:
        self._is_copying = False
        counts: list[list[int]] = self._host.tolist()
        if counts != self._sent:
            self._sent = counts
            self._fresh = dict(zip(self._layers, counts, strict=True))

    def take(self) -> dict[int, list[int]]:
        """Counts by layer if they have changed since the last `take`, else an empty dict."""
        fresh, self._fresh = self._fresh, {}
        return fresh
