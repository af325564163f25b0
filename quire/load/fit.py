"""check_fit: whether the numbers of a config are those of the tensors really there.

Asked before memory is taken for what a config describes: the count of layers and experts, the shape
of every tensor, rotary frequencies that are finite, and ending tokens that the model has. Reads
headers only. `models/spec.py` has judged each number alone, `loader.py` copies the weights later.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from quire.errors import CheckpointError
from quire.load.checkpoint import Checkpoint
from quire.load.loader import match, target_of
from quire.load.unpack import readable
from quire.models.plan import empty_decoder
from quire.models.registry import layer_names_of, names_of
from quire.models.spec import ModelSpec, RopeSpec
from quire.nn.rope import inverse_frequencies

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.([0-9]{1,6})\.")


def check_fit(checkpoint: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer | None = None) -> None:
    """Raises CheckpointError that names what does not fit."""
    for rope in (spec.rope, spec.local_rope):
        if rope is not None:
            _check_rope(rope, spec.max_positions)
    if tokenizer is not None:
        _check_tokens(tokenizer, spec)
    if not checkpoint.names():
        return  # load_format="dummy": the config is all there is
    _check_counts(checkpoint, spec)  # first: the rest walks through all layers and experts
    stored = readable(checkpoint, torch.device("cpu"))
    match(empty_decoder(spec).parameters(), stored, names_of(checkpoint.config, spec))


def _check_counts(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    layers = {int(found[1]) for name in checkpoint.names() if (found := _LAYER.search(name))}
    if spec.num_layers > len(layers):
        raise CheckpointError(
            f"config.json says {spec.num_layers} layers, the tensors are those of {len(layers)}"
        )
    if spec.moe is None:
        return
    names, want = layer_names_of(checkpoint.config, spec), spec.moe.router.num_experts
    for name in checkpoint.names():
        target = target_of(names, name)
        if target is None or not target.name.endswith("router.weight") or target.part != "experts":
            continue
        if (shape := checkpoint.shape(name))[:1] != (want,):
            raise CheckpointError(
                f"config.json says {want} experts, the router {name} has shape {shape}"
            )


def _check_rope(rope: RopeSpec, max_positions: int) -> None:
    """With every list of factors; each number is sane alone, together they may not be."""
    for num_positions in (1, max_positions):
        try:
            frequencies, scale = inverse_frequencies(rope, num_positions)
            furthest = float(frequencies.abs().max()) * max_positions * scale
        except (ZeroDivisionError, OverflowError, ValueError):
            furthest = torch.inf
        if not furthest <= torch.finfo(torch.float32).max:
            raise CheckpointError(
                f"config.json: a rotary embedding of kind {rope.kind!r} with theta {rope.theta:g},"
                f" factor {rope.factor:g} and {rope.dim} dims gives angles that are no numbers"
            )


def _check_tokens(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    # Tokenizers with a few tokens more than their model are common and do no harm; tables of all
    # tokens, which grammars need, are as long as the largest id says.
    if (largest := tokenizer.largest_id) >= 2 * spec.vocab_size:
        raise CheckpointError(
            f"the tokenizer has a token of id {largest}, the model's vocab_size is"
            f" {spec.vocab_size}: they do not belong together"
        )
