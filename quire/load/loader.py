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
from quire.load.unpack import readable
from quire.load.wish import Wish
from quire.models.decoder import Decoder
from quire.models.names import Target
from quire.nn.parameter import Parameter
from quire.quant.coded import Coded
from quire.quant.weight import Dense, Weight

DUMMY_STD = 0.02


def load_weights(
    model: Decoder,
    checkpoint: Checkpoint,
    names: Mapping[str, Target],
    wish: Wish = Wish(),  # noqa: B008 (a value, never changed)
) -> None:
    """Fill the model from the checkpoint; names it does not know are left alone."""
    stored, parameters = readable(checkpoint, model.device), model.parameters()
    for theirs, target in match(parameters, stored, names).items():
        parameter = parameters[target.name]
        packed = stored.packed(theirs) if parameter.can_pack else None
        if packed is not None:
            _check_shape(parameter, packed.shape, target, theirs)
            _put(parameter, target.name, target.part, packed, wish)
            continue
        tensor = stored.read(theirs)
        tensor = tensor.t() if target.transposed else tensor
        _check_shape(parameter, tuple(tensor.shape), target, theirs)  # files may lie about it
        _put_floats(parameter, target.name, target.part, tensor, wish)


def _put_floats(
    parameter: Parameter, name: str, part: str | None, tensor: Tensor, wish: Wish
) -> None:
    if not parameter.can_pack:
        parameter.put(part, tensor)
    elif tensor.ndim == 2:
        _put(parameter, name, part, Dense(tensor), wish)
    else:  # all experts in one
        for each, index in parameter.parts.items():
            _put(parameter, name, each, Dense(tensor[index]), wish)


def _put(parameter: Parameter, name: str, part: str | None, weight: Weight, wish: Wish) -> None:
    if (form := wish.form_of(name)) is not None:
        made = form.of(weight.dequantize().to(parameter.device, torch.float32))
        if made is not None:
            parameter.keep(part, made)
            return
    if wish.keep_packed and _is_worth_keeping(weight, parameter.dtype):
        parameter.keep(part, weight)
    else:
        parameter.put(part, weight.dequantize(), weight.inputs)


def _is_worth_keeping(weight: Weight, dtype: torch.dtype) -> bool:
    """Kernels know it as it is, and it is smaller so."""
    if isinstance(weight, Dense):
        return weight.tensor.dtype.itemsize < dtype.itemsize
    return isinstance(weight, Coded) and weight.is_plain


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


def _check_shape(parameter: Parameter, shape: tuple[int, ...], target: Target, theirs: str) -> None:
    if shape != (want := parameter.shape_of(target.part)):
        raise CheckpointError(f"tensor {theirs} has shape {shape}, the config asks for {want}")


def fill_random(model: Decoder, seed: int, wish: Wish = Wish()) -> None:  # noqa: B008
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
        if wish.form_of(name) is not None and parameter.can_pack:
            for part in parameter.parts or (None,):
                _put(parameter, name, part, Dense(parameter.view(part)), wish)
