"""CacheSpec: what the cache keeps of a token, in which form, and how many bytes that is.

The one place that knows: the pool allocates by it, sizing divides memory by it, `quire inspect`
shows it and the roofline counts with it. A page holds `page_size` tokens at every place of a layer
group (`groups.py`). Scales lie in the page beside their codes, so whoever copies a page copies
them. Where codes and scales lie inside a page is the attention backend's to say.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from quire.errors import NotSupported
from quire.kv.forms import CacheForm
from quire.kv.groups import LayerGroups

WINDOWED = "sliding_window"  # vLLM's word for all layers with a window


class KvScales(NamedTuple):
    """A checkpoint's scales of a layer: the same for all its tokens and heads."""

    keys: float
    values: float


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer keeps of a token: `num_rows` rows of `width` numbers."""

    num_heads: int
    width: int
    num_parts: int = 2  # keys and values; 1: values are read out of the keys
    num_scales: int = 1  # of a row of codes: a latent and its rotated key have one each

    @property
    def num_rows(self) -> int:
        return self.num_heads * self.num_parts

    def token_bytes(self, form: CacheForm) -> int:
        return self.num_rows * form.row_bytes(self.width, self.num_scales)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    shape: KvShape
    groups: LayerGroups
    page_size: int
    plain: CacheForm  # of layers that keep floats
    coded: CacheForm | None = None  # of all others; None: all keep floats
    skipped: frozenset[int] = frozenset()  # layers that keep floats all the same
    scales: Mapping[int, KvScales] = field(default_factory=dict)  # by layer; else each row's own

    def form_of(self, layer: int) -> CacheForm:
        return self.plain if self.coded is None or layer in self.skipped else self.coded

    @property
    def form(self) -> CacheForm:
        """Of most layers."""
        return self.coded or self.plain

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers, while it is held."""
        return sum(self.layer_bytes(layer) for layer in self.groups.layers)

    def of_layers(self, layers: Container[int]) -> CacheSpec:
        """For whoever has these layers alone."""
        return replace(self, groups=self.groups.of_layers(layers))

    def layer_bytes(self, layer: int) -> int:
        """Of one token in one layer."""
        return self.shape.token_bytes(self.form_of(layer))

    def place_form(self, place: int) -> CacheForm:
        """The largest form of the layers, one of each group, that use this place of a page."""
        layers = [g.layers[place] for g in self.groups.groups if place < len(g.layers)]
        return max((self.form_of(layer) for layer in layers), key=self.shape.token_bytes)

    def part_bytes(self, form: CacheForm) -> int:
        """Of a page: the keys, or the values, of one layer."""
        return self.page_size * self.shape.token_bytes(form) // self.shape.num_parts

    @property
    def page_bytes(self) -> int:
        """Of a page, whichever group it serves."""
        forms = [self.place_form(place) for place in range(self.groups.num_places)]
        return sum(self.page_size * self.shape.token_bytes(form) for form in forms)

    @property
    def is_uniform(self) -> bool:
        """Every place of a page has the same form."""
        return self.coded is None or not self.skipped


def skipped_layers(words: Sequence[object], windows: Sequence[int | None]) -> frozenset[int]:
    """Layers that are named by number or, all that have a window, by `sliding_window`."""
    found: set[int] = set()
    for word in words:
        if word == WINDOWED:
            found |= {layer for layer, window in enumerate(windows) if window is not None}
        elif not (str(word).isdecimal() and int(str(word)) < len(windows)):
            raise NotSupported(
                f"got kv_cache_dtype_skip_layers={list(words)}: {word!r} is no layer; want numbers"
                f" from 0 to {len(windows) - 1} or {WINDOWED!r}"
            )
        else:
            found.add(int(str(word)))
    return frozenset(found)
