"""Loader: read -> rename -> convert -> copy into the parameter, one tensor in flight.

Every parameter must be filled completely and with the right shape; what is missing or misshapen
is named. `fill_random` does the same job without a disk, for benchmarks and tests.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.checkpoint import Checkpoint
from quire.load.ternary import TernaryForm, TernaryUnpacker, round_inputs
from quire.load.unpack import PlainCheckpoint, plain
from quire.models.decoder import Decoder, Parameter
from quire.models.names import Target

DUMMY_STD = 0.02


def load_weights(
    model: Decoder,
    checkpoint: Checkpoint,
    names: Mapping[str, Target],
    keep_packed: bool = False,
) -> None:
    """Fill the model from the checkpoint; names it does not know are left alone.

    `keep_packed`: weights that are stored in whole numbers stay so."""
    if TernaryForm.of(checkpoint.config) is not None:
        round_inputs(model)
    stored, parameters = readable(checkpoint, model.device), model.parameters()
    for theirs, target in match(parameters, stored, names).items():
        parameter = parameters[target.name]
        if not (keep_packed and _keep(parameter, stored, target, theirs)):
            _copy(parameter, stored.read(theirs), target, theirs)


def readable(checkpoint: Checkpoint, device: torch.device) -> Checkpoint:
    """With every weight under its own name and in its own shape, however it is stored."""
    checkpoint = plain(checkpoint, device)
    if (form := TernaryForm.of(checkpoint.config)) is not None:
        return PlainCheckpoint(checkpoint, TernaryUnpacker(checkpoint, form))
    return checkpoint


def match(
    parameters: Mapping[str, Parameter], stored: Checkpoint, names: Mapping[str, Target]
) -> dict[str, Target]:
    """Which stored tensor goes where; all are there, each in the shape asked for. Reads none."""
    found: dict[str, Target] = {}
    missing = {_label(name, part) for name, p in parameters.items() for part in (p.parts or [None])}
    for theirs in stored.names():
        target = target_of(names, theirs)
        parameter = parameters.get(target.name) if target else None
        if target is None or parameter is None:
            continue  # rotary buffers, a head tied to the embedding, heads of other tasks
        shape = stored.shape(theirs)
        _check_shape(parameter, shape[::-1] if target.transposed else shape, target, theirs)
        found[theirs] = target
        if target.part is None:
            missing -= {_label(target.name, part) for part in (parameter.parts or [None])}
        else:
            missing.discard(_label(target.name, target.part))
    if missing:
        lost = {label.partition(":")[0] for label in missing}
        shown = sorted(
            theirs
            for theirs, at in names.items()
            if (_label(at.name, at.part) in missing if at.part else at.name in lost)
        )
        raise CheckpointError(
            f"{len(missing)} tensors are missing, among them {', '.join(shown[:4])};"
            " the files do not hold the model that config.json describes"
        )
    return found


def target_of(names: Mapping[str, Target], theirs: str) -> Target | None:
    return names.get(theirs) or names.get(_with_prefix(theirs))


def _label(name: str, part: str | None) -> str:
    return name if part is None else f"{name}:{part}"


def _with_prefix(name: str) -> str:
    """Base-model checkpoints (GPT-2's own among them) leave out the outermost module's name."""
    return f"transformer.{name}" if name.startswith(("h.", "w", "ln_f")) else f"model.{name}"


def _keep(parameter: Parameter, stored: Checkpoint, target: Target, theirs: str) -> bool:
    """Whether the parameter took the tensor as it is stored."""
    if parameter.coded is None or (coded := stored.coded(theirs)) is None:
        return False
    _check_shape(parameter, coded.shape, target, theirs)
    parameter.coded[target.part] = coded
    return True


def _copy(parameter: Parameter, tensor: Tensor, target: Target, theirs: str) -> None:
    if target.transposed:
        tensor = tensor.t()
    _check_shape(parameter, tuple(tensor.shape), target, theirs)  # packed ones may lie about it
    _into(parameter, target).copy_(tensor)  # converts the dtype and moves to the device


def _check_shape(parameter: Parameter, shape: tuple[int, ...], target: Target, theirs: str) -> None:
    if shape != (want := tuple(_into(parameter, target).shape)):
        raise CheckpointError(f"tensor {theirs} has shape {shape}, the config asks for {want}")


def _into(parameter: Parameter, target: Target) -> Tensor:
    return parameter.tensor if target.part is None else parameter.parts[target.part]


def fill_random(model: Decoder, seed: int) -> None:
    """Small random weights, ones for norms: any config, no disk."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.parameters().items():
        tensor = parameter.tensor
        if "norm" in name and not name.endswith("bias"):
            tensor.fill_(1.0)
        elif tensor.ndim == 1:
            tensor.zero_()
        else:
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
