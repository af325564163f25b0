"""ExpertCopies: every so many steps, second homes for the experts that are visited most.

Ranks that share a layer have seen the same visits and decide alike (`dist/placement.py`). Each
reads the experts it is to copy from the model's files and lets go of those it no longer has. That
happens between two steps: nobody waits for more than the reading, and no bit changes, because an
expert gives a row the same wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quire.config import EngineArgs
from quire.dist.placement import Placement, imbalance, place_copies
from quire.engine.cpu_path import CpuPath
from quire.load.checkpoint import Checkpoint
from quire.load.loader import load_weights
from quire.load.wish import Wish
from quire.models.decoder import Decoder
from quire.models.names import Target
from quire.nn.experts import Experts
from quire.nn.moe import SparseMLP
from quire.nn.ops import Ops
from quire.nn.parameter import Parameter
from quire.obs.log import log_event
from quire.ops.select import ops_of


@dataclass(frozen=True, slots=True)
class Files:
    """Where weights come from, and what becomes of them."""

    checkpoint: Checkpoint
    names: Mapping[str, Target]
    wish: Wish
    ops: Ops


class ExpertCopies:
    def __init__(self, model: Decoder, files: Files, num_copies: int, interval: int) -> None:
        """Every `interval` steps, so many copies in each layer."""
        self._files, self._num_copies, self._interval = files, num_copies, interval
        self._device, self._rank = model.device, model.ranks.rank
        self._layers: dict[int, Experts] = {}
        for layer, block in zip(model.layers, model.blocks, strict=True):
            if isinstance(block.mlp, SparseMLP):
                self._layers[layer] = block.mlp.experts
                block.mlp.experts.count_visits()
        self._num_steps = self._num_rebalances = self._num_read = 0
        self._before = self._after = 1.0  # as below, when it was last looked

    def is_due(self) -> bool:
        """Asked once a step."""
        self._num_steps += 1
        return self._num_steps % self._interval == 0

    @torch.inference_mode()
    def rebalance(self) -> None:
        before, after = [], []
        for layer, experts in self._layers.items():
            visits = experts.take_visits()
            placed = place_copies(visits, experts.cuts, self._num_copies)
            before.append(imbalance(visits, experts.cuts, experts.placement))
            after.append(imbalance(visits, experts.cuts, placed))
            self._move(layer, experts, placed)
        if not before:
            return
        self._num_rebalances += 1
        # What the busiest rank had of the visits since last time, in parts of the mean, and what it
        # would have had.
        self._before = round(sum(before) / len(before), 3)
        self._after = round(sum(after) / len(after), 3)
        if self._rank == 0:
            log_event(
                "experts_rebalanced",
                before=self._before,
                after=self._after,
                copies=self._num_copied,
            )

    @property
    def _num_copied(self) -> int:
        return sum(len(experts.placement.copies) for experts in self._layers.values())

    def as_dict(self) -> dict[str, float]:
        return {
            "num_rebalances": self._num_rebalances,
            "num_experts_read": self._num_read,
            "num_experts_copied": self._num_copied,
            "rank_imbalance_before": self._before,
            "rank_imbalance_after": self._after,
        }

    def _move(self, layer: int, experts: Experts, placed: Placement) -> None:
        wanted = placed.on(self._rank)
        kept = {number: copy for number, copy in experts.copies.items() if number in wanted}
        for number in wanted:
            if number not in kept:
                copy = experts.copy_of(number)
                load_weights(
                    _Alone(layer, copy, self._device),
                    self._files.checkpoint,
                    self._files.names,
                    self._files.wish,
                )
                copy.finish(self._files.ops)
                self._num_read += 1
                kept[number] = copy
        experts.copies, experts.placement = kept, placed


class _Alone:
    """One expert as the loader sees it."""

    def __init__(self, layer: int, copy: Experts, device: torch.device) -> None:
        self.device, self._layer, self._copy = device, layer, copy

    def parameters(self) -> dict[str, Parameter]:
        at = f"layers.{self._layer}.experts."
        return {at + name: own for name, own in self._copy.parameters.items()}


def open_copies(
    args: EngineArgs,
    model: Decoder,
    checkpoint: Checkpoint,
    names: Mapping[str, Target],
    wish: Wish,
    cpu: CpuPath,
) -> ExpertCopies | None:
    """None: there are no experts, or nobody to share them with."""
    asked = args.parallel
    if not asked.num_redundant_experts or model.spec.moe is None or model.ranks.is_alone:
        return None
    library = cpu.library if model.dtype == torch.float32 else None
    files = Files(checkpoint, names, wish, ops_of(model.device, library, None))
    return ExpertCopies(model, files, asked.num_redundant_experts, asked.eplb_step_interval)
