"""Launcher: launch a Triton kernel without asking Triton each time which compiled variant fits.

Triton looks at every argument of every launch to find the variant specialised for it, some 50
microseconds in Python, while a kernel may run for 10. Here the caller says what its launches have
in common (`kind`, and the compile-time constants): the first launch of a kind goes through Triton
and the compiled kernel is kept, later ones go straight to the driver. A kind must tell apart
everything Triton would: dtypes, which pointers are 16-byte aligned, integers that are 1 or
divisible by 16.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Launcher", "alignments", "int_kind"]


class Variant(NamedTuple):
    """A compiled kernel, ready for the driver."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[object, ...]  # compile-time values, which the driver's argument list repeats


class Launcher:
    """
    >>> launch = Launcher(kernel)                                               # doctest: +SKIP
    >>> launch((rows, 1, 1), (x, y, n), {"BLOCK": 128, "num_warps": 4}, (x.dtype, int_kind(n)))
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._variants: dict[Hashable, Variant] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        args: tuple[object, ...],
        constants: Mapping[str, object],
        kind: Hashable,
    ) -> None:
        """`args` are the run-time arguments in order, `constants` the rest by name and options."""
        key = (kind, *constants.values())
        variant = self._variants.get(key)
        if variant is None:
            compiled = self.kernel[grid](*args, **constants)
            if compiled is not None:  # the interpreter compiles nothing
                self._variants[key] = self._variant(compiled, len(args), constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        variant.run(
            *grid, stream, variant.function, variant.metadata, None, None, None,
            *args, *variant.constants,
        )  # fmt: skip

    def _variant(self, compiled: Any, num_args: int, constants: Mapping[str, object]) -> Variant:
        names = self.kernel.arg_names[num_args:]
        values = tuple(constants[name] for name in names)
        return Variant(compiled.run, compiled.function, compiled.packed_metadata, values)


def int_kind(value: int) -> int:
    """What Triton specialises an integer on.

    >>> int_kind(1), int_kind(48), int_kind(7)
    (1, 16, 0)
    """
    return 1 if value == 1 else 16 if value % 16 == 0 else 0


def alignments(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """What Triton specialises pointers on, one by one: a variant built for one misaligned tensor
    still reads the others 16 bytes at a time."""
    return tuple(t.data_ptr() % 16 == 0 for t in tensors if t is not None)
