"""Source: the model that is quantised, block by block, whatever files it comes in.

Names are those of Hugging Face checkpoints. Experts that are stored in one tensor come apart: the
layouts that are written know single projections only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compress.block import BlockTensors
from quire.compress.finite import check_finite
from quire.config import EngineArgs
from quire.errors import BadRequest, NotSupported
from quire.load.checkpoint import Checkpoint
from quire.load.fit import check_fit
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.load.loader import match
from quire.load.open import open_model
from quire.load.unpack import readable
from quire.models.names import Target
from quire.models.plan import empty_decoder
from quire.models.registry import architecture_of, names_of, spec_of
from quire.models.spec import ModelSpec
from quire.nn.parameter import Parameter
from quire.text.tokenizer import Tokenizer

HEAD = "head.weight"
ALWAYS_PLAIN = ("router.weight", "embed.weight", "positions.weight", "score.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor to be written comes from."""

    stored: str
    target: Target
    expert: int | slice | tuple[int, slice] | None = None  # of a tensor that holds all of them


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    checkpoint: Checkpoint  # plain
    tokenizer: Tokenizer | None
    spec: ModelSpec
    names: Mapping[str, Target]  # all that such a checkpoint may hold
    places: Mapping[str, Place]  # by the name to be written
    parameters: Mapping[str, Parameter]
    is_gguf: bool

    @staticmethod
    def open(model: str) -> Source:
        """Raises CheckpointError or NotSupported."""
        opened = open_model(EngineArgs(model=model))
        spec = spec_of(opened.checkpoint.config)
        check_fit(opened.checkpoint, spec, opened.tokenizer)
        plain = readable(opened.checkpoint, torch.device("cpu"))
        names, parameters = names_of(plain.config, spec), empty_decoder(spec).parameters()
        found = match(parameters, plain, names)
        is_gguf = isinstance(opened.checkpoint, GGUFCheckpoint)
        places = _places(found, names, parameters)
        return Source(
            opened.path, plain, opened.tokenizer, spec, names, places, parameters, is_gguf
        )

    @property
    def config(self) -> Mapping[str, Any]:
        return self.checkpoint.config

    @property
    def hf_class(self) -> str:
        return architecture_of(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """What tensors that stay plain are written in."""
        said = {"float16": torch.float16, "float32": torch.float32}
        return said.get(self.spec.dtype, torch.bfloat16)

    def read(self, name: str) -> Tensor:
        """Raises CheckpointError where a number is none."""
        place = self.places[name]
        tensor = self.checkpoint.read(place.stored)
        tensor = tensor if place.expert is None else tensor[place.expert]
        return check_finite(tensor, place.stored, self.checkpoint)

    def of_layer(self, layer: int | None) -> list[str]:
        """Names of a block's tensors; None: of those in no block."""
        prefix = "layers." if layer is None else f"layers.{layer}."
        return [
            name
            for name, place in self.places.items()
            if place.target.name.startswith(prefix) == (layer is not None)
        ]

    def block(self, layer: int, kept: frozenset[str], device: torch.device) -> BlockTensors:
        """A block's tensors in fp32, to be changed at will."""
        return self._tensors(f"layers.{layer}.", self.of_layer(layer), kept, device)

    def head(self, device: torch.device) -> BlockTensors:
        names = [name for name in self.of_layer(None) if self.places[name].target.name == HEAD]
        return self._tensors("", names, frozenset(), device)

    def _tensors(
        self, prefix: str, names: list[str], kept: frozenset[str], device: torch.device
    ) -> BlockTensors:
        # As it is stored to the device, and widened there: half the bytes on the way.
        tensors = {
            name: self.read(name).to(device).to(torch.float32, copy=True).contiguous()
            for name in names
        }
        targets = {name: self.places[name].target for name in names}
        made = BlockTensors.of(prefix, tensors, targets, self.parameters)
        made.kept = kept
        return made

    def modules(self) -> dict[str, tuple[int, int]]:
        """Every matrix that could be quantised, by module, and its shape."""
        found = {}
        for name, place in self.places.items():
            parameter = self.parameters[place.target.name]
            if parameter.can_pack and not place.target.name.endswith(ALWAYS_PLAIN):
                shape = parameter.shape_of(place.target.part)
                found[name.removesuffix(".weight")] = (shape[-2], shape[-1])
        return found

    def kept_modules(self, patterns: list[str]) -> frozenset[str]:
        """Modules that the user keeps, by name, last part or pattern. Raises BadRequest for a
        pattern that fits none."""
        modules, kept = self.modules(), set()
        for pattern in patterns:
            fits = {module for module in modules if _fits(module, pattern)}
            if not fits and pattern != "lm_head":  # which a tied model does not have
                raise BadRequest(
                    f"--keep {pattern!r} fits no projection of the model; they are called such as"
                    f" {', '.join(list(modules)[:3])}",
                    param="keep",
                )
            kept |= fits
        return frozenset(kept)

    def check_layout(self, method: str) -> None:
        """Raises NotSupported where no layout but GGUF could hold the weights."""
        if any(place.target.transposed for place in self.places.values()):
            raise NotSupported(
                f"{self.hf_class} stores its weights transposed (Conv1D), which --method {method}"
                " does not write; quire quantize --method gguf does"
            )
        if self.spec.moe is not None and self.spec.moe.expert_bias:
            raise NotSupported(
                f"{self.hf_class} keeps its experts in an MXFP4 layout of its own, with"
                " biases that other layouts have no place for; use it as it is"
            )
        if self.hf_class == "BitNetForCausalLM":
            raise NotSupported("BitNet weights are ternary already; there is nothing to gain")


def _fits(module: str, pattern: str) -> bool:
    """
    >>> _fits("model.layers.0.mlp.down_proj", "down_proj"), _fits("lm_head", "model.*")
    (True, False)
    """
    in_dots = f".{module}."
    return fnmatchcase(module, pattern) or f".{pattern}." in in_dots


def _places(
    found: Mapping[str, Target], names: Mapping[str, Target], parameters: Mapping[str, Parameter]
) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for theirs, target in found.items():
        parameter = parameters[target.name]
        is_stacked = target.part is None and len(parameter.shape) == 3 and parameter.can_pack
        if not is_stacked:
            places[theirs] = Place(theirs, target)
            continue
        stem = theirs.rpartition(".experts.")[0] + ".experts."
        for name, own in names.items():  # the names of single experts beside it
            if own.name == target.name and own.part is not None and name.startswith(stem):
                places[name] = Place(theirs, own, parameter.parts[own.part])
    return places
