"""Span: how long the device was at a step, by its own clock.

The host looks at a result after it has launched the next step. Where that launch takes longer than
the step before it, the host sees that one's end late, and the next step seems shorter by as much.
"""

from __future__ import annotations

import torch


class Span:
    def __init__(self) -> None:
        """Begins when the device has done all it was given so far."""
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def close(self) -> None:
        """Ends with what the device was given last."""
        self._end.record()

    def seconds(self) -> float:
        """Waits for the end."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3
