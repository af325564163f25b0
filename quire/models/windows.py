"""Which layers see only the last positions, and how many: `layer_types` where a config lists
them, else the rule by which its family counts layers. No torch."""

from __future__ import annotations

from collections.abc import Callable

from quire.models.spec import Config

LOCAL, FULL = "sliding_attention", "full_attention"


def windows_of(
    config: Config, num_layers: int, is_local: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """By layer, as in ModelSpec; () where no layer has a window. `is_local` is the family's rule,
    asked where the config lists no types."""
    if not config.has("sliding_window"):
        return ()
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = [LOCAL if is_local(layer) else FULL for layer in range(num_layers)]
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in (LOCAL, FULL) for kind in kinds):
        raise config.error("layer_types", f"{num_layers} of {LOCAL!r} or {FULL!r}")
    if LOCAL not in kinds:
        return ()
    window = config.count("sliding_window")
    return tuple(window if kind == LOCAL else None for kind in kinds)
