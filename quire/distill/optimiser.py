"""AdamW with a cosine schedule, and its moments as plain tensors that a checkpoint can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.distill.recipe import Schedule

BETAS, EPS = (0.9, 0.95), 1e-8
FLOOR = 0.05  # of the learning rate, at the end


class Optimiser:
    def __init__(self, leaves: Mapping[str, Tensor], schedule: Schedule) -> None:
        self.leaves, self.schedule = leaves, schedule
        decayed = [leaf for leaf in leaves.values() if leaf.ndim > 1]
        plain = [leaf for leaf in leaves.values() if leaf.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": schedule.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS)

    def rate(self, step: int) -> float:
        """Up over the warm-up, then down along a cosine."""
        top, warmup, steps = (
            self.schedule.learning_rate,
            self.schedule.warmup,
            self.schedule.steps,
        )
        if step < warmup:
            return top * (step + 1) / warmup
        along = (step - warmup) / max(1, steps - warmup)
        return top * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, along))))

    def clip(self) -> Tensor:
        """The gradients are clipped; returns their norm before, still on the device."""
        return torch.nn.utils.clip_grad_norm_(list(self.leaves.values()), self.schedule.clip)

    def step(self, number: int) -> None:
        """One step down the gradients, which are cleared."""
        for group in self._adam.param_groups:
            group["lr"] = self.rate(number)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments; `restore` takes them back."""
        made = {f"weight/{name}": leaf.detach() for name, leaf in self.leaves.items()}
        for name, leaf in self.leaves.items():
            for moment, value in self._adam.state.get(leaf, {}).items():
                made[f"{moment}/{name}"] = value
        return made

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(tensors[f"weight/{name}"])
                self._adam.state[leaf] = {
                    moment: tensors[f"{moment}/{name}"].clone().to(place)
                    for moment, place in (
                        ("step", "cpu"),
                        ("exp_avg", leaf.device),
                        ("exp_avg_sq", leaf.device),
                    )
                }
