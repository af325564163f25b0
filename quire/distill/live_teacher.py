"""LiveTeacher: the target reads every batch when it is needed, on the device that trains.

A GPU reads a batch in less time than its hidden states would take to and from a disk, so nothing is
kept. Which answers share a batch follows from the step, so a run that goes on reads them so too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quire.distill.decoder import streams
from quire.distill.teacher import ROWS_AT_ONCE, States, Target, padded


class LiveTeacher:
    def __init__(self, target: Target, taps: Sequence[int], wants_best: bool) -> None:
        """The likeliest tokens cost a product with the head: heads read them, models do not."""
        self.target, self.taps, self.wants_best = target, tuple(taps), wants_best

    def read(self, named: Mapping[str, Sequence[int]]) -> States:
        ids = padded([torch.tensor(ids) for ids in named.values()], torch.int64)
        with torch.no_grad():
            read = streams(self.target.model, ids.to(self.target.device), self.taps)
            final, taps = read.final.float(), read.taps.float()
            best = ids.new_empty(0)
            if self.wants_best:
                rows = final.flatten(0, 1).split(ROWS_AT_ONCE)
                best = torch.cat([self.target.logits(some).argmax(-1) for some in rows])
                best = best.unflatten(0, tuple(ids.shape))
        return States(final, taps, best)
