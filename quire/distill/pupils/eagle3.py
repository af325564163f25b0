"""An EAGLE-3 head: one layer that reads three of the target's streams and its own guesses.

What learns is the engine's own head (`models/heads/eagle3.py`), rolled on from its guesses as it
will be when it drafts (`distill/rolled.py`). Its output knows the commonest tokens of the target's
answers alone and begins with the target's rows for them; the feature begins as the target's last
state. It is written in the public layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.source import HEAD
from quire.distill.answers import Answer
from quire.distill.attention import NO_CACHE
from quire.distill.decoder import PAGE_SIZE
from quire.distill.leaves import LeafOps, Leaves
from quire.distill.lessons import Lesson
from quire.distill.losses import Judged, bent, divergence
from quire.distill.pupil import Written
from quire.distill.recipe import Schedule, Shape
from quire.distill.rolled import RolledAttention, RolledPlan
from quire.distill.teacher import Target
from quire.errors import BadRequest, NotSupported
from quire.forward import LayerContext
from quire.models.decoder import heads_of
from quire.models.heads.eagle3 import Eagle3Head, Eagle3Spec, eagle3_names
from quire.models.spec import ModelSpec

VOCAB, ROLLS = 4096, 3
FADE = 0.8  # a roll counts so much of the one before
STORED = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Eagle3:
    head: Eagle3Head
    own: Leaves
    config: Mapping[str, Any]
    vocabulary: Tensor  # [outputs] the target's ids, ascending
    rows: Tensor  # [outputs, hidden] of the target's head
    spec: ModelSpec  # the target's
    rolls: int

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.spec.reads

    def leaves(self) -> Mapping[str, Tensor]:
        return self.own.tensors

    def judge(self, lesson: Lesson) -> Judged:
        features = self.head.features(lesson.states.taps.flatten(2).flatten(0, 1))
        plan = RolledPlan.of(lesson.ids)
        at = LayerContext(RolledAttention(), NO_CACHE, plan)
        known = torch.isin(lesson.states.best, self.vocabulary)
        alive, survived, losses = lesson.counts.new_ones(lesson.ids.shape), [], []
        for roll in range(self.rolls):
            ids = ahead(lesson.ids, roll + 1).flatten()
            guessed = self.head.attend(self.head.store(ids, features, at), at)
            features, plan.positions = guessed.features, plan.positions + 1
            logits = guessed.logits.unflatten(0, tuple(lesson.ids.shape))
            counts = ahead(lesson.counts, roll + 1)
            learns = counts & ahead(known, roll + 1)
            wanted = ahead(lesson.states.final, roll + 1)[learns]
            teacher = bent(F.linear(wanted, self.rows), self.spec)
            losses.append(FADE**roll * divergence(logits[learns], teacher))
            right = self.vocabulary[logits.argmax(-1)] == ahead(lesson.states.best, roll + 1)
            alive = alive & counts & right
            survived.append(alive.sum())
        num_rows = int(ahead(lesson.counts, 1).sum())
        return Judged(torch.stack(losses).sum(), torch.stack(survived), num_rows)

    def written(self) -> Written:
        tensors = self.own.stored(STORED)
        knows = torch.zeros(int(self.config["vocab_size"]), dtype=torch.bool)
        knows[self.vocabulary.cpu()] = True
        tensors["d2t"] = self.vocabulary.cpu() - torch.arange(len(self.vocabulary))
        tensors["t2d"] = knows
        return Written(self.config, tensors)


def ahead(x: Tensor, by: int) -> Tensor:
    """Each position's neighbour so many ahead; zeros behind the end."""
    made = torch.zeros_like(x)
    made[:, :-by] = x[:, by:]
    return made


def make(target: Target, shape: Shape, schedule: Schedule, answers: Sequence[Answer]) -> Eagle3:
    """Raises BadRequest or NotSupported for a head that the target cannot have."""
    spec = target.source.spec
    if spec.rope is None:
        raise NotSupported(
            f"{spec.architecture} has learned positions, EAGLE-3 heads rotate theirs;"
            " take --kind draft_model"
        )
    size = shape.vocab or min(VOCAB, spec.vocab_size)
    if size > spec.vocab_size:
        raise BadRequest(f"got --vocab {size} of the target's {spec.vocab_size} tokens")
    vocabulary = commonest(answers, size, spec.vocab_size).to(target.device)
    config = _config(target, size, shape)
    rows = target.tensor(HEAD)[vocabulary]
    tensors = _tensors(target, config, rows * spec.logit_scale, schedule.seed)
    made = Eagle3Spec.of(config, tensors, spec)
    head = Eagle3Head(
        made, heads_of(made.layer, PAGE_SIZE), spec.max_positions, torch.float32, target.device
    )
    leaves = Leaves.fill(head.parameters(), eagle3_names(made), tensors)
    head.finish(LeafOps(), target.model)
    return Eagle3(head, leaves, config, vocabulary, rows, spec, shape.depth or ROLLS)


def commonest(answers: Sequence[Answer], size: int, num_tokens: int) -> Tensor:
    """[size] ids of the tokens written most often, ascending; then those with the lowest ids."""
    counted = Counter(id for answer in answers for id in answer.answer)
    order = [id for id, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]
    rest = (id for id in range(num_tokens) if id not in counted)
    chosen = [*order, *rest][:size]
    return torch.tensor(sorted(chosen))


def _config(target: Target, size: int, shape: Shape) -> dict[str, Any]:
    spec, theirs = target.source.spec, target.source.config
    count = spec.num_layers
    rope = {k: theirs[k] for k in ("rope_theta", "rope_scaling", "rope_parameters") if k in theirs}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": shape.ffn or spec.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": size,
        "tie_word_embeddings": False,
        "fc_norm": True,
        "torch_dtype": str(STORED).removeprefix("torch."),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [max(1, count // 3), max(1, count * 2 // 3), count],
        },
        **rope,
    }


def _tensors(
    target: Target, config: Mapping[str, Any], rows: Tensor, seed: int
) -> dict[str, Tensor]:
    """What learning begins with, by stored names."""
    spec, ffn = target.source.spec, int(config["intermediate_size"])
    hidden, q = spec.hidden_size, spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    generator = torch.Generator().manual_seed(seed)

    def fresh(num_out: int, num_in: int) -> Tensor:
        return torch.empty(num_out, num_in).normal_(0.0, num_in**-0.5, generator=generator)

    last = target.tensor("norm.weight").cpu() + spec.norm_offset
    at = "midlayer."
    ones = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    # The layer adds nothing at first, and the output is half as sure as the target's.
    return {
        **{f"{at}{name}.weight": torch.ones(hidden) for name in ones},
        f"{at}self_attn.q_proj.weight": fresh(q, 2 * hidden),
        f"{at}self_attn.k_proj.weight": fresh(kv, 2 * hidden),
        f"{at}self_attn.v_proj.weight": fresh(kv, 2 * hidden),
        f"{at}self_attn.o_proj.weight": torch.zeros(hidden, q),
        f"{at}mlp.gate_proj.weight": fresh(ffn, hidden),
        f"{at}mlp.up_proj.weight": fresh(ffn, hidden),
        f"{at}mlp.down_proj.weight": torch.zeros(hidden, ffn),
        "fc_norm.0.weight": torch.ones(hidden),
        "fc_norm.1.weight": torch.ones(hidden),
        "fc_norm.2.weight": last,
        # The feature begins as the state that the target's own head reads.
        "fc.weight": torch.cat((torch.zeros(hidden, 2 * hidden), torch.eye(hidden)), 1),
        "norm.weight": torch.full((hidden,), 0.5 * float(last.square().mean().sqrt())),
        "lm_head.weight": rows.cpu(),
    }
