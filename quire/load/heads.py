"""Heads from their checkpoints: which tensors there are decides what a head is made of.

Medusa's and EAGLE-3's come in a folder of their own, MTP's layer lies in the target's. What a head
shares with its target is lent by the decoder. `models/heads/` has the heads and their layouts.
"""

from __future__ import annotations

from quire.attn.backend import AttnSpec
from quire.errors import CheckpointError
from quire.load.checkpoint import Checkpoint
from quire.load.loader import load_weights
from quire.load.wish import Wish
from quire.models.decoder import Decoder
from quire.models.heads.eagle3 import OFFSETS, Eagle3Head, Eagle3Spec, eagle3_names
from quire.models.heads.medusa import PREFIX, TOKEN_MAP, MedusaHeads, MedusaSpec, medusa_names
from quire.models.heads.mtp import MtpHead, mtp_names
from quire.models.heads.vocabulary import DraftVocabulary
from quire.models.spec import ModelSpec
from quire.nn.ops import Ops


def load_medusa(checkpoint: Checkpoint, target: Decoder, wish: Wish, ops: Ops) -> MedusaHeads:
    spec, names = target.spec, checkpoint.names()
    targets = medusa_names(names)
    outputs = {checkpoint.shape(n)[0] for n, t in targets.items() if t.name.endswith(".out.weight")}
    if len(outputs) > 1:
        raise CheckpointError(f"Medusa's products have {sorted(outputs)} outputs, want one number")
    num_outputs = next(iter(outputs), spec.vocab_size)
    made = MedusaSpec.of(names, spec.hidden_size, num_outputs)
    heads = MedusaHeads(made, target.dtype, target.device)
    load_weights(heads, checkpoint, targets, wish)
    maps = [name for name in names if PREFIX.sub("", name) == TOKEN_MAP]
    if maps and num_outputs < spec.vocab_size:
        heads.vocabulary = DraftVocabulary(
            checkpoint.read(maps[0]).long().to(target.device), spec.vocab_size
        )
    _check_outputs(num_outputs, heads.vocabulary, spec)
    heads.finish(ops, target)
    return heads


def load_eagle3(
    checkpoint: Checkpoint, spec: Eagle3Spec, heads: AttnSpec, target: Decoder, wish: Wish, ops: Ops
) -> Eagle3Head:
    head = Eagle3Head(spec, heads, target.num_positions, target.dtype, target.device)
    load_weights(head, checkpoint, eagle3_names(spec), wish)
    num_tokens = target.spec.vocab_size
    if OFFSETS in checkpoint.names() and spec.has_head:
        offsets = checkpoint.read(OFFSETS)
        if tuple(offsets.shape) != (spec.num_outputs,) or offsets.is_floating_point():
            raise CheckpointError(
                f"tensor {OFFSETS} is {offsets.dtype} of shape {tuple(offsets.shape)}, want a whole"
                f" number for each of {spec.num_outputs} outputs"
            )
        head.vocabulary = DraftVocabulary.from_offsets(offsets.to(target.device), num_tokens)
    if spec.has_head:
        _check_outputs(spec.num_outputs, head.vocabulary, target.spec)
    head.finish(ops, target)
    return head


def load_mtp(
    checkpoint: Checkpoint, layer: ModelSpec, heads: AttnSpec, target: Decoder, wish: Wish, ops: Ops
) -> MtpHead:
    head = MtpHead(layer, heads, target.num_positions, target.dtype, target.device)
    load_weights(head, checkpoint, mtp_names(layer, target.spec.num_layers), wish)
    head.finish(ops, target)
    return head


def _check_outputs(num: int, vocabulary: DraftVocabulary | None, target: ModelSpec) -> None:
    named = num if vocabulary is None else len(vocabulary.ids)
    wanted = target.vocab_size if vocabulary is None else num
    if named != wanted or num > target.vocab_size:
        raise CheckpointError(
            f"the head has {num} outputs for a target with {target.vocab_size} tokens, and no table"
            " that says which; it is for another model"
        )
