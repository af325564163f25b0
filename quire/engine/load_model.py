"""load_model: a checkpoint's weights into a decoder, in the form that was asked for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.attn.backend import AttnSpec
from quire.config import EngineConfig
from quire.dist.ranks import ALONE, Ranks
from quire.engine.cpu_path import CpuPath
from quire.engine.pack_identity import keep, packs_of
from quire.load.checkpoint import Checkpoint
from quire.load.loader import fill_random, load_weights
from quire.load.wish import Wish
from quire.models.decoder import Decoder
from quire.models.registry import names_of
from quire.models.spec import ModelSpec
from quire.nn.ops import Ops
from quire.ops.select import ops_of


class Loaded(NamedTuple):
    """A model, and the table of operations that made its kernels."""

    model: Decoder
    ops: Ops


def load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    heads: AttnSpec,
    config: EngineConfig,
    cpu: CpuPath,
    wish: Wish,
    dtype: torch.dtype,
    device: torch.device,
    change: Callable[[Decoder], None] | None = None,
    ranks: Ranks = ALONE,
) -> Loaded:
    """`change`: of weights that are in, before kernels are made of them."""
    library = cpu.library if dtype == torch.float32 else None
    # What is kept of a checkpoint's kernels is of its weights as they are.
    is_kept = library is not None and change is None
    packs = packs_of(checkpoint, wish, ranks) if is_kept else None
    ops = ops_of(device, library, packs, dtype)
    with torch.inference_mode():
        model = Decoder(spec, heads, config.sched.max_model_len, dtype, device, ranks)
        if config.load_format == "dummy":
            every = None if ranks.stage.is_only else model.of_all_stages().parameters()
            fill_random(model, config.seed, wish, every)
        else:
            load_weights(model, checkpoint, names_of(checkpoint.config, spec), wish)
        if change is not None:
            change(model)
        model.finish(ops)
    if device.type == "cuda":
        gc.collect()  # an engine before this one, freed while a graph is captured, would spoil it
    keep(packs)
    return Loaded(model, ops)
