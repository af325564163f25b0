"""Medusa heads: several small blocks on the last state, each for a token further ahead.

What learns is the engine's own module (`models/heads/medusa.py`). Heads begin as the target's own
output: their blocks add nothing. One product over the commonest tokens serves all heads, which is
what vLLM's layout calls `original_lm_head` with a `token_map`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.source import HEAD
from quire.distill.answers import Answer
from quire.distill.leaves import LeafOps, Leaves
from quire.distill.lessons import Lesson
from quire.distill.losses import Judged, bent, divergence
from quire.distill.pupil import Written
from quire.distill.pupils.eagle3 import FADE, STORED, VOCAB, ahead, commonest
from quire.distill.recipe import Schedule, Shape
from quire.distill.teacher import Target
from quire.errors import BadRequest
from quire.models.heads.medusa import TOKEN_MAP, MedusaHeads, MedusaSpec, medusa_names
from quire.models.spec import ModelSpec

HEADS = 4


@dataclass(frozen=True, slots=True)
class Medusa:
    heads: MedusaHeads
    own: Leaves
    config: Mapping[str, Any]
    vocabulary: Tensor  # [outputs] the target's ids, ascending
    rows: Tensor  # [outputs, hidden] of the target's head
    spec: ModelSpec  # the target's
    taps: tuple[int, ...] = ()

    def leaves(self) -> Mapping[str, Tensor]:
        return self.own.tensors

    def judge(self, lesson: Lesson) -> Judged:
        states = lesson.states
        known = torch.isin(states.best, self.vocabulary)
        alive, survived, losses = lesson.counts.new_ones(lesson.ids.shape), [], []
        for head in range(self.heads.num_heads):
            counts = ahead(lesson.counts, head + 1)
            learns = counts & ahead(known, head + 1)
            wanted = bent(F.linear(ahead(states.final, head + 1)[learns], self.rows), self.spec)
            logits = self.heads.logits(states.final.flatten(0, 1), head)
            logits = logits.unflatten(0, tuple(lesson.ids.shape))
            losses.append(FADE**head * divergence(logits[learns], wanted))
            right = self.vocabulary[logits.argmax(-1)] == ahead(states.best, head + 1)
            alive = alive & counts & right
            survived.append(alive.sum())
        num_rows = int(ahead(lesson.counts, 1).sum())
        return Judged(torch.stack(losses).sum(), torch.stack(survived), num_rows)

    def written(self) -> Written:
        tensors = self.own.stored(STORED)
        tensors[TOKEN_MAP] = self.vocabulary.cpu()
        return Written(self.config, tensors)


def make(target: Target, shape: Shape, schedule: Schedule, answers: Sequence[Answer]) -> Medusa:
    """Raises BadRequest for heads that the target cannot have."""
    spec = target.source.spec
    size, count = shape.vocab or min(VOCAB, spec.vocab_size), shape.depth or HEADS
    if size > spec.vocab_size:
        raise BadRequest(f"got --vocab {size} of the target's {spec.vocab_size} tokens")
    vocabulary = commonest(answers, size, spec.vocab_size).to(target.device)
    rows = target.tensor(HEAD)[vocabulary]
    hidden = spec.hidden_size
    tensors = {"lm_heads.0.weight": rows.cpu() * spec.logit_scale}
    for head in range(count):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(hidden, hidden)
        tensors[f"blocks.{head}.layers.0.bias"] = torch.zeros(hidden)
    heads = MedusaHeads(MedusaSpec.of(tensors, hidden, size), torch.float32, target.device)
    leaves = Leaves.fill(heads.parameters(), medusa_names(tensors), tensors)
    heads.finish(LeafOps(), target.model)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": spec.vocab_size,
        "truncated_vocab_size": size,
        "num_heads": count,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": str(STORED).removeprefix("torch."),
    }
    return Medusa(heads, leaves, config, vocabulary, rows, spec)
