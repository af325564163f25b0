"""PackedForms: CUDA kernels of packed weights where they hold, expanded weights where they do not.

A form is checked on the device when its first weight comes (`packed_check.py`). What fails is
expanded to the model's dtype as if nothing had been packed, and said once, with the reason.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.expand import Scratch, embed_packed
from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.matmul import Layouts
from quire.kernels.slabs import Slabs
from quire.nn.ops import SumKernel
from quire.ops.int8_inputs import Int8SumInputs
from quire.ops.int8_linear import Int8Linear, can_multiply, difference
from quire.ops.matmul_linear import MatmulLinear
from quire.ops.packed_check import failure_of, why_not
from quire.ops.packed_experts import ExpertRows, ExpertSlabs
from quire.ops.packed_linear import PackedLinear, PartsLinear
from quire.ops.slabs_of import joined, moved, slabs_of
from quire.quant.coded import Coded
from quire.quant.deferred import made
from quire.quant.weight import Dense, Weight

Check = Callable[[Weight, str | None, torch.dtype, bool], str | None]


class PackedForms:
    def __init__(
        self, device: torch.device, dtype: torch.dtype, layouts: Layouts, check: Check = why_not
    ) -> None:
        self.device, self.dtype, self.layouts, self.check = device, dtype, layouts, check
        self.check_int8 = difference
        self.scratch = Scratch()
        self.kept: Counter[str] = Counter()  # bytes of weights by their form
        self.refused: dict[str, str] = {}  # forms that are expanded, and why
        self._verdicts: dict[object, str | None] = {}

    def linear(self, weights: Sequence[Weight], bias: Tensor | None, gate: str | None) -> SumKernel:
        """Parts one below the other; those that are alike are one product."""
        parts = joined([self.ready(weight) for weight in weights])
        if len(parts) == 1:
            return self._part(parts[0], bias, gate)
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else list(bias.split(sizes))
        made_of = zip(parts, biases, strict=True)
        return PartsLinear([self._part(part, b, None) for part, b in made_of], gate)

    def ready(self, weight: Weight) -> Weight:
        """On the device, and no narrower than the model if it is of floats."""
        weight = moved(made(weight), self.device)
        if not isinstance(weight, Dense) or weight.tensor.itemsize >= self.dtype.itemsize:
            return weight  # what is wider than the model is so for a reason: routers are
        return Dense(weight.tensor.to(self.dtype), weight.inputs)

    def slabs(self, weight: Weight, gate: str | None = None, streams: bool = False) -> Slabs | None:
        """Counted as kept; None: the weight is to be expanded. `streams`: for products of one
        weight alone, laid out for `kernels/stream_packed.py` where it holds."""
        streams = streams and has_hopper_kernels(self.device)
        slabs = slabs_of(weight, gate is not None, self.dtype if streams else None)
        if slabs is None:
            return None
        key = (slabs.form, gate, slabs.order is not None, slabs.shape[1] % slabs.form.slab == 0)
        check = partial(self.check, weight, gate, self.dtype, slabs.form.lanes)
        refuse = self._refuse_stream if slabs.form.lanes else self._refuse
        if not self._holds(key, slabs.form.name, check, refuse):
            return self.slabs(weight, gate) if slabs.form.lanes else None
        self.kept[slabs.form.name] += slabs.num_bytes
        return slabs

    def _holds(
        self,
        key: object,
        form: str,
        check: Callable[[], str | None],
        refuse: Callable[[str, str], None],
    ) -> bool:
        """Whether a kernel may be used, asked once for each key."""
        if key not in self._verdicts:
            self._verdicts[key] = failure_of(check)
            if (why := self._verdicts[key]) is not None:
                refuse(form, why)
        return self._verdicts[key] is None

    def expert_slabs(self, rows: ExpertRows) -> ExpertSlabs | None:
        """None: they are to be expanded; so are sorted columns, which differ between experts."""
        (weight, *others) = rows.weights
        if others or isinstance(weight, Dense) or has_order(weight):
            return None
        slabs = self.slabs(weight)
        return None if slabs is None else ExpertSlabs(slabs, rows.bias)

    def expanded(self, weight: Weight) -> Tensor:
        tensor = weight.dequantize().to(self.dtype)
        self.kept[str(self.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
        return tensor

    def _part(self, weight: Weight, bias: Tensor | None, gate: str | None) -> SumKernel:
        if weight.inputs == "int8-row":
            return self._rounded(weight, bias, gate)
        slabs = self.slabs(weight, gate, streams=True)
        if slabs is None:
            return MatmulLinear(self.expanded(weight), bias, self.layouts, gate)
        return PackedLinear(slabs, bias, self.layouts, self.scratch, self.dtype, gate)

    def _rounded(self, weight: Weight, bias: Tensor | None, gate: str | None) -> SumKernel:
        """Inputs are rounded to int8: whole numbers throughout where there is such a product."""
        slabs = slabs_of(weight)
        if slabs is not None and can_multiply(weight, slabs):
            key = (slabs.form, "int8", slabs.shape[1] % slabs.form.slab == 0)
            check = partial(self.check_int8, weight, self.dtype)
            if self._holds(key, slabs.form.name, check, self._refuse):
                self.kept[slabs.form.name] += slabs.num_bytes
                return Int8Linear(slabs, bias, gate)
        return Int8SumInputs(self._part(as_it_is(weight), bias, gate))

    def _refuse_stream(self, form: str, why: str) -> None:
        warnings.warn(
            f"weights of form {form} are multiplied by a slower kernel: the streamed one fails here"
            f" ({why}); the results are the same",
            RuntimeWarning,
            stacklevel=2,
        )

    def _refuse(self, form: str, why: str) -> None:
        self.refused[form] = why
        warnings.warn(
            f"weights of form {form} are expanded to {self.dtype}: their packed kernel fails here"
            f" ({why}); they take more memory, the results are the same",
            RuntimeWarning,
            stacklevel=2,
        )


def as_it_is(weight: Weight) -> Weight:
    """The same for inputs that somebody else rounds."""
    form: Any = weight  # forms are dataclasses, which their protocol does not say
    made_of: Weight = replace(form, inputs="float")
    return made_of


def has_order(weight: Weight) -> bool:
    """Whether columns of codes are for other inputs than their place says."""
    return isinstance(weight, Coded) and weight.order is not None


class PackedTable:
    """Rows of a packed weight."""

    def __init__(self, slabs: Slabs, dtype: torch.dtype) -> None:
        assert slabs.order is None, "columns of an embedding are in their own order"
        self.slabs, self.dtype = slabs, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return embed_packed(self.slabs, ids, self.dtype)
