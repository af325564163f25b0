"""Launcher: launch a Triton kernel without asking Triton each time which compiled variant fits.

Triton looks at every argument of every launch to find the variant specialised for it, some 50
microseconds in Python, while a kernel may run for 10. Here the caller says what its launches have
in common (`kind`, and the compile-time constants): the first launch of a kind goes through Triton
and the compiled kernel is kept, later ones go straight to the driver. A kind must tell apart
everything Triton would: dtypes, which pointers are 16-byte aligned, integers that are 1 or
divisible by 16. Small integer helpers are here as well: Triton's own take 2 microseconds a call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from quire.kernels.rehearsal import current_rehearsal, outline

__all__ = ["Launcher", "alignments", "ceil_div", "int_kind", "pad_to_power"]

# Versions of Triton whose launchers we know from inside.
KNOWN_VERSIONS = ("3.6.",)


class Variant(NamedTuple):
    """A compiled kernel, ready for the driver.

    Called with the grid, the stream, `before`, the launch's own arguments and `after`."""

    launch: Any
    before: tuple[object, ...]
    after: tuple[object, ...]  # compile-time values, which the driver's argument list repeats


class Launcher:
    """
    >>> launch = Launcher(kernel)                                               # doctest: +SKIP
    >>> launch((rows, 1, 1), (x, y, n), {"BLOCK": 128, "num_warps": 4}, (x.dtype, int_kind(n)))
    """

    def __init__(self, kernel: Any, skips_rehearsals: bool = True) -> None:
        """`skips_rehearsals` is False for kernels whose results torch uses as indices."""
        self.kernel, self.skips_rehearsals = kernel, skips_rehearsals
        self._variants: dict[Hashable, Variant] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        args: tuple[object, ...],
        constants: Mapping[str, object],
        kind: Hashable,
    ) -> None:
        """`args` are the run-time arguments in order, `constants` the rest and options by name."""
        key = (kind, *constants.values())
        variant = self._variants.get(key)
        rehearsal = current_rehearsal()
        if rehearsal is not None and self.skips_rehearsals:
            if variant is None:
                outlines = tuple(map(outline, args))
                compile_it = partial(self._compile, grid, outlines, constants)
                keep = partial(self._keep, key, len(args), constants)
                rehearsal.add((self, key), (self, key[1:]), compile_it, keep)
            return
        if variant is None:
            if rehearsal is not None:
                rehearsal.settle()  # this loads a launcher as well
            self._keep(key, len(args), constants, self.kernel[grid](*args, **constants))
            return
        launch, before, after = variant
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        launch(*grid, stream, *before, *args, *after)

    def _compile(
        self,
        grid: tuple[int, int, int],
        args: tuple[object, ...],
        constants: Mapping[str, object],
    ) -> Any:
        """The slow part, run in a thread of a rehearsal."""
        compiled = self.kernel.warmup(*args, grid=grid, **constants)
        if compiled is not None:
            _build_entry(compiled)
        return compiled

    def _keep(
        self, key: Hashable, num_args: int, constants: Mapping[str, object], compiled: Any
    ) -> None:
        if compiled is None:  # the interpreter compiles nothing
            return
        names = self.kernel.arg_names[num_args:]
        values = tuple(constants[name] for name in names)
        launch, options = _entry(compiled.run)
        # No metadata for hooks, and no hooks before and after.
        hooks = (compiled.packed_metadata, None, None, None)
        self._variants[key] = Variant(launch, (compiled.function, *options, *hooks), values)


def _is_known() -> bool:
    version: str = triton.__version__
    return version.startswith(KNOWN_VERSIONS)


def _build_entry(compiled: Any) -> None:
    """Compile the launcher behind a kernel's `run` and leave it on disk; any thread may do this.

    The loaded launcher is dropped. All launchers are modules of one name, so two threads that load
    theirs at the same time could get each other's."""
    if _is_known():
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


def _entry(run: Any) -> tuple[Any, tuple[object, ...]]:
    """What to call, and what it takes after the kernel's function.

    Triton's launcher in Python makes room for scratch and passes on what never changes; a kernel
    without scratch goes to the compiled launcher behind it, which saves one of two microseconds.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    is_known = type(run) is CudaLauncher and _is_known()
    if not is_known or run.global_scratch_size or run.profile_scratch_size:
        return run, ()
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


def ceil_div(value: int, unit: int) -> int:
    """
    >>> ceil_div(33, 16)
    3
    """
    return -(-value // unit)


def pad_to_power(value: int) -> int:
    """The least power of two that is no less.

    >>> pad_to_power(1), pad_to_power(33), pad_to_power(64)
    (1, 64, 64)
    """
    return 1 << (value - 1).bit_length()


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
