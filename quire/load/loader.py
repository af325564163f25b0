"""Loader: read -> rename -> convert -> into the parameter, one tensor in flight.

Every parameter must be filled completely and with the right shape; what is missing or misshapen
is named. `fill_random` does the same job without a disk, for benchmarks and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.load.checkpoint import Checkpoint
from quire.load.unpack import readable
from quire.load.wish import Wish
from quire.models.decoder import Decoder
from quire.models.names import Target
from quire.nn.parameter import Index, Parameter
from quire.quant.deferred import Deferred
from quire.quant.load_forms import LoadForm
from quire.quant.weight import Dense, Weight

DUMMY_STD = 0.02


class Fillable(Protocol):
    """A model, or a head of one."""

    device: torch.device

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor the loader must fill, by our name."""
        ...


def load_weights(
    model: Fillable,
    checkpoint: Checkpoint,
    names: Mapping[str, Target],
    wish: Wish = Wish(),  # noqa: B008 (a value, never changed)
) -> None:
    """Fill the model from the checkpoint; names it does not know are left alone. Weights that stay
    packed are read when their kernel is made."""
    stored, parameters = readable(checkpoint, model.device), model.parameters()
    for theirs, target in match(parameters, stored, names).items():
        parameter = parameters[target.name]
        source = Source(stored, theirs, target, parameter, wish)
        if not parameter.can_pack:
            parameter.put(target.part, source.read())
        elif wish.is_packed:
            for part, weight in source.deferred().items():
                parameter.keep(part, weight)
        else:
            weight = own_inputs(source.weight(), parameter, target.name)
            parameter.put(target.part, weight.dequantize(), weight.inputs)


@dataclass(frozen=True, slots=True)
class Source:
    """One stored tensor and the place it is for."""

    stored: Checkpoint
    theirs: str
    target: Target
    parameter: Parameter
    wish: Wish

    def read(self) -> Tensor:
        """Raises CheckpointError."""
        tensor = self.stored.read(self.theirs)
        tensor = tensor.t() if self.target.transposed else tensor
        self._check_shape(tuple(tensor.shape))  # files may lie about it
        rows = self.parameter.own_rows(self.target.part)
        return tensor if rows is None else tensor[rows]

    def weight(self) -> Weight:
        rows = self.parameter.own_rows(self.target.part)
        near = rows if isinstance(rows, slice) else None
        packed = self.stored.packed(self.theirs, near)
        if packed is None:
            return Dense(self.read())
        if near is None:
            self._check_shape(packed.shape)
        return packed.pick(rows) if isinstance(rows, Tensor) else packed

    def deferred(self) -> dict[str | None, Weight]:
        """By part: of this tensor's own, or of all where it holds several (all experts in one)."""
        target, parameter = self.target, self.parameter
        if target.part is not None or len(parameter.shape) == 2:
            return {target.part: self._deferred(target.part, self.weight)}
        read = cache(self.read)  # by the first that is made, and gone with the last

        def of(index: Index) -> Weight:
            return Dense(read()[index])

        places = parameter.parts.items()
        return {part: self._deferred(part, partial(of, index)) for part, index in places}

    def _deferred(self, part: str | None, make: Callable[[], Weight]) -> Deferred:
        name, (num_out, num_in) = self.target.name, self.parameter.shape_of(part)

        def own() -> Weight:
            form = self.wish.form_of(name)
            weight = formed(make(), self.parameter, form, self.wish.keep_packed)
            return own_inputs(weight, self.parameter, name)

        return Deferred(_label(name, part), (num_out, num_in), own)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        _check_shape(self.parameter, shape, self.target, self.theirs)


def own_inputs(weight: Weight, parameter: Parameter, name: str) -> Weight:
    """Where ranks split a sum, this one's inputs of a weight that has all."""
    cut = parameter.own_columns
    if cut is None:
        return weight
    try:
        return weight.columns(cut.begin, cut.end)
    except ValueError as error:
        raise NotSupported(
            f"{name} cannot be split among ranks: {error}; use tp_reduce='exact'"
        ) from None


def formed(weight: Weight, parameter: Parameter, form: LoadForm | None, keep: bool) -> Weight:
    """The weight in the form that is asked for, else as it is stored, else in floats."""
    device, dtype = parameter.device, parameter.dtype
    if form is not None:
        made = form.of(weight.dequantize().to(device, torch.float32))
        if made is not None:
            return made
    if keep and _is_smaller(weight, dtype):
        return weight
    return Dense(weight.dequantize().to(device, dtype), weight.inputs)


def _is_smaller(weight: Weight, dtype: torch.dtype) -> bool:
    return not isinstance(weight, Dense) or weight.tensor.dtype.itemsize < dtype.itemsize


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
        if parameter.is_elsewhere(target.part):
            continue
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
    if shape != (want := parameter.stored_shape(target.part)):
        raise CheckpointError(f"tensor {theirs} has shape {shape}, the config asks for {want}")


def fill_random(
    model: Decoder,
    seed: int,
    wish: Wish = Wish(),  # noqa: B008
    every: Mapping[str, Parameter] | None = None,
) -> None:
    """Small random weights, ones for norms: any config, no disk. `every`: of the whole model, where
    other stages have some; None: we have all."""
    generator = torch.Generator(model.device).manual_seed(seed)
    ours = model.parameters()
    for name, of_all in (every or ours).items():
        parameter = ours.get(name)
        if parameter is None:  # another stage's; drawn all the same, so that ours are what they are
            if "norm" not in name and len(of_all.shape) > 1:
                shape = of_all.stored_shape(None)
                torch.empty(shape, dtype=of_all.dtype).normal_(0.0, DUMMY_STD, generator=generator)
            continue
        tensor, is_cut = parameter.tensor, parameter.kept is not None
        if is_cut:  # drawn for all ranks alike
            tensor = torch.empty(parameter.stored_shape(None), dtype=tensor.dtype)
        if "norm" in name and not name.endswith("bias"):
            tensor.fill_(1.0)
        elif tensor.ndim == 1:
            tensor.zero_()
        else:
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
        if is_cut:
            rows, columns = parameter.own_rows(None), parameter.own_columns
            own = tensor if rows is None else tensor[rows]
            parameter.put(None, own if columns is None else own[:, columns.begin : columns.end])
        if (form := wish.form_of(name)) is not None and parameter.can_pack:
            for part in parameter.parts or (None,):
                has_all = parameter.own_columns is None
                floats = Dense(parameter.view(part) if has_all else tensor)
                weight = formed(floats, parameter, form, wish.keep_packed)
                parameter.keep(part, own_inputs(weight, parameter, name))
