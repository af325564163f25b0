"""load_model: a checkpoint's weights into a decoder, in the form that was asked for."""

from __future__ import annotations

import gc

import torch

from quire.attn.backend import AttnSpec
from quire.config import EngineConfig
from quire.load.checkpoint import Checkpoint
from quire.load.loader import fill_random, load_weights
from quire.load.wish import Wish
from quire.models.decoder import Decoder
from quire.models.registry import names_of
from quire.models.spec import ModelSpec
from quire.nn.ops import Ops


def load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    heads: AttnSpec,
    config: EngineConfig,
    ops: Ops,
    wish: Wish,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    with torch.inference_mode():
        model = Decoder(spec, heads, config.sched.max_model_len, dtype, device)
        if config.load_format == "dummy":
            fill_random(model, config.seed, wish)
        else:
            load_weights(model, checkpoint, names_of(checkpoint.config, spec), wish)
        model.finish(ops)
    if device.type == "cuda":
        gc.collect()  # an engine before this one, freed while a graph is captured, would spoil it
    return model
