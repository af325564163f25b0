"""Triton's word of kernels that it compiles, for who counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from triton import knobs


def tell_compiles(compiled: Callable[[str], object]) -> None:
    """Call `compiled` with the name of each kernel that was not found compiled on disk, in whatever
    thread."""

    def listen(*, metadata: Mapping[str, object], cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled(str(metadata.get("name")))

    knobs.compilation.listener = listen
