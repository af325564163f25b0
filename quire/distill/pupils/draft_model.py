"""A small draft model of the target's family: some of its layers, or fresh narrow ones.

At the target's own width it begins with layers copied from the target at even distances, embedding,
norm and head included, and has to learn little. At another width all weights are fresh. It is
written as an ordinary checkpoint of the family; `student.py` has the lessons.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.compress.files import files_of
from quire.compress.source import Source
from quire.distill.decoder import TrainableDecoder
from quire.distill.pupils.student import Student, plain_config
from quire.distill.recipe import Schedule, Shape
from quire.distill.teacher import Target
from quire.errors import BadRequest, NotSupported
from quire.models.names import Target as Place
from quire.models.plan import empty_decoder
from quire.models.registry import names_of, spec_of
from quire.models.spec import ModelSpec

STD = 0.02  # of fresh weights
LAYERS_SHARE = 8  # of the target's layers a draft model has one in so many, unless told otherwise


def make(target: Target, shape: Shape, schedule: Schedule, answers: object) -> Student:
    """Raises BadRequest or NotSupported for sizes that the family cannot have."""
    source = target.source
    spec, config = source.spec, dict(source.config)
    num_layers = shape.layers or max(1, spec.num_layers // LAYERS_SHARE)
    if not 1 <= num_layers <= spec.num_layers:
        raise BadRequest(
            f"got --layers {num_layers} for a target of {spec.num_layers}; want from 1 to as many"
        )
    config["num_hidden_layers"] = num_layers
    if spec.windows:
        raise NotSupported(
            f"{spec.architecture} has layers that see only a window, which a draft model cannot"
            " have; take --kind early_exit"
        )
    is_copied = shape.hidden in (None, spec.hidden_size) and shape.ffn in (None, spec.ffn_size)
    if not is_copied:
        config |= _narrow(spec, shape)
    own = spec_of(config)
    names = names_of(config, own)
    tensors = _copied(source, own) if is_copied else _fresh(source, own, names, schedule.seed)
    trainable = TrainableDecoder.of(own, names, tensors, target.device)
    return Student(trainable, plain_config(config, source.dtype), files_of(source), source.dtype)


def _narrow(spec: ModelSpec, shape: Shape) -> dict[str, Any]:
    """Sizes of a fresh model, with heads of the target's own width."""
    hidden = shape.hidden or spec.hidden_size
    if hidden % spec.head_dim:
        raise BadRequest(
            f"got --hidden {hidden}, want a multiple of the target's heads of {spec.head_dim}"
        )
    heads = hidden // spec.head_dim
    group = max(1, spec.num_heads // spec.num_kv_heads)
    kv_heads = heads // group if heads % group == 0 else heads
    ffn = shape.ffn or max(1, spec.ffn_size * hidden // spec.hidden_size)
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": spec.head_dim,
    }


def chosen_layers(num_target: int, num_own: int) -> list[int]:
    """The first and the last among them, and others at even distances.

    >>> chosen_layers(30, 4), chosen_layers(5, 1)
    ([0, 10, 19, 29], [0])
    """
    if num_own == 1:
        return [0]
    return [round(i * (num_target - 1) / (num_own - 1)) for i in range(num_own)]


def _copied(source: Source, own: ModelSpec) -> dict[str, Tensor]:
    tensors = {name: source.read(name) for name in source.of_layer(None)}
    for at, layer in enumerate(chosen_layers(source.spec.num_layers, own.num_layers)):
        for name in source.of_layer(layer):
            tensors[name.replace(f".{layer}.", f".{at}.", 1)] = source.read(name)
    return tensors


def _fresh(source: Source, own: ModelSpec, names: dict[str, Place], seed: int) -> dict[str, Tensor]:
    """Small random weights, ones for norms; the names are those the target's files use."""
    parameters = empty_decoder(own).parameters()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    used = {*source.of_layer(None), *source.of_layer(0)}
    used |= {name.replace(".0.", f".{i}.", 1) for name in used for i in range(own.num_layers)}
    for theirs, place in names.items():
        if theirs not in used or place.name not in parameters:
            continue
        shape = parameters[place.name].shape_of(place.part)
        tensor = torch.zeros(shape[::-1] if place.transposed else shape)
        if "norm" in place.name and place.name.endswith("weight"):
            tensor.fill_(1.0 - own.norm_offset)
        elif tensor.ndim > 1:
            tensor.normal_(0.0, STD, generator=generator)
        tensors[theirs] = tensor
    return tensors
