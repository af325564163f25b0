"""Embedding and output of a model, whole on one rank, for what other ranks have no part in: heads
that draft, and whoever judges hidden states of prompts. With one rank they are the model's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.config import EngineArgs
from quire.engine.cpu_path import CpuPath
from quire.load.checkpoint import Checkpoint
from quire.load.loader import fill_random, load_weights
from quire.load.wish import Wish
from quire.models.decoder import Decoder
from quire.models.registry import names_of
from quire.nn.ops import Ops
from quire.ops.select import ops_of

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


class TargetModel(NamedTuple):
    """The model that is drafted for, as it was loaded."""

    model: Decoder
    checkpoint: Checkpoint
    wish: Wish
    tokenizer: Tokenizer | None


def whole_ends(args: EngineArgs, target: TargetModel, cpu: CpuPath) -> Decoder:
    """Whose embedding and output are whole: the model or, where ranks have parts of it, one without
    layers."""
    if target.model.ranks.num_processes == 1:
        return target.model
    made = target.model.ends()
    fill(made, args, target)
    made.finish(ops_for(made, cpu))
    return made


def fill(made: Decoder, args: EngineArgs, target: TargetModel) -> None:
    """Some of the target's layers, whole, in the form it has."""
    if args.load_format == "dummy":
        every = target.model.ends().of_all_stages().parameters()
        fill_random(made, args.seed or 0, target.wish, every)
    else:
        names = names_of(target.checkpoint.config, made.spec)
        load_weights(made, target.checkpoint, names, target.wish)


def ops_for(model: Decoder, cpu: CpuPath) -> Ops:
    """Kernels that are packed by no name: those of the target's layers are kept by theirs."""
    library = cpu.library if model.dtype == torch.float32 else None
    return ops_of(model.device, library, dtype=model.dtype)
