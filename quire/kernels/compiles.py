"""Triton's word of kernels that it compiles, for who counts them."""

from __future__ import annotations

from collections.abc import Callable

from triton import knobs


def tell_compiles(compiled: Callable[[], object]) -> None:
    """Call `compiled` after each kernel that was not found compiled on disk, in whatever thread."""

    def listen(*, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled()

    knobs.compilation.listener = listen
