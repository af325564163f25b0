"""An early exit, for the composition root: the target's first layers draft, on the target's pages.

Plain, the target's own norm and head follow them. Distilled, an adapter stands in the norm's place
(`models/heads/exit_adapter.py`), read from a folder that `quire distill` wrote.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import cast

import torch

from quire.config import EngineArgs
from quire.engine.cpu_path import CpuPath
from quire.engine.gpu_weights import keeps_packed_on
from quire.engine.whole_ends import TargetModel
from quire.errors import NotSupported
from quire.load.loader import load_weights
from quire.load.open import open_model
from quire.load.wish import Wish
from quire.models.decoder import Decoder
from quire.models.heads.exit_adapter import NAMES, ExitAdapter, exit_sizes
from quire.nn.norm import RMSNorm
from quire.ops.select import ops_of
from quire.quant.load_forms import load_form
from quire.speculative import SpecConfig

EXIT_SHARE = 3  # an early exit takes one of so many layers unless told otherwise


@dataclass(frozen=True, slots=True)
class ExitPart:
    depth: int  # layers before the exit
    adapter: ExitAdapter | None
    page_bytes: int = 0
    taps: tuple[int, ...] = ()
    most: int | None = None

    def cut(self, model: Decoder) -> Decoder:
        """The model's first layers, with its head."""
        made = copy.copy(model)
        made.blocks, made.layers = model.blocks[: self.depth], model.layers[: self.depth]
        made.spec = replace(model.spec, num_layers=self.depth)
        if self.adapter is not None:
            made.norm = cast("RMSNorm", self.adapter)  # called as one
        return made


def open_exit(config: SpecConfig, args: EngineArgs, target: TargetModel, cpu: CpuPath) -> ExitPart:
    """Raises NotSupported and CheckpointError."""
    model = target.model
    if config.model is not None:
        return _distilled(config, args, model, cpu)
    most = model.spec.num_layers
    depth = config.exit_layer or max(1, most // EXIT_SHARE)
    if depth >= most:
        raise NotSupported(
            f"got speculative_config.exit_layer={depth}, but the model has {most} layers;"
            f" use {most - 1} or less"
        )
    return ExitPart(depth, None)


def _distilled(config: SpecConfig, args: EngineArgs, model: Decoder, cpu: CpuPath) -> ExitPart:
    assert config.model is not None
    own = replace(args, model=config.model, skip_tokenizer_init=True, load_format="auto")
    checkpoint = open_model(own).checkpoint
    depth, ffn_size = exit_sizes(checkpoint.config, model.spec)
    if config.exit_layer not in (None, depth):
        raise NotSupported(
            f"got speculative_config.exit_layer={config.exit_layer} with an exit that was trained"
            f" after layer {depth}; leave it out"
        )
    form = load_form(config.quantization) if config.quantization else None
    library = cpu.library if model.dtype == torch.float32 else None
    with torch.inference_mode():
        adapter = ExitAdapter(model.spec, ffn_size, model.dtype, model.device)
        packs = cpu.keeps_packed or keeps_packed_on(model.device, own, checkpoint)
        load_weights(adapter, checkpoint, NAMES, Wish(packs, form))
        adapter.finish(ops_of(model.device, library, dtype=model.dtype))
    return ExitPart(depth, adapter)
