"""LayerGroups: which layers share a page table, and what a request holds in each table.

Layers that see equally far back are put into groups of equal size. A page then has the same size
in every group: one *place* for each layer of a group. So one pool and one allocator serve all
groups. A windowed group gives its pages back as the window moves on, while a full one keeps them. A
group with too few layers leaves places of its pages unused; `layer_groups` keeps those few.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

Window = int | None  # how many last positions a layer sees, its own included; None: all

MAX_GROUPS = 8  # each costs a page table, a plan a step and a look at every reservation
FULL_WEIGHT = 8  # an unused place costs a whole context in a full group, a window elsewhere


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one page table; a layer's place in a page is its index here."""

    layers: tuple[int, ...]
    window: Window = None


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """All layers of a model, each in one group.

    >>> groups = layer_groups([64, 64, 64, None], 4)
    >>> groups.num_places, groups.windows
    (1, (None, 64, 64, 64))
    >>> groups.group_of(1), groups.place_of(1)
    (2, 0)
    """

    groups: tuple[LayerGroup, ...]
    num_places: int  # layers' worth of keys and values in a page

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def windows(self) -> tuple[Window, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    def group_of(self, layer: int) -> int:
        return next(i for i, group in enumerate(self.groups) if layer in group.layers)

    def place_of(self, layer: int) -> int:
        return self.groups[self.group_of(layer)].layers.index(layer)

    def of_layers(self, layers: Container[int]) -> LayerGroups:
        """What whoever has these layers alone keeps of a page. Groups and tables stay, even those
        that none of the layers is in.

        >>> layer_groups([64, 64, 64, None], 4).of_layers(range(2)).num_places
        1
        """
        kept = [
            replace(group, layers=tuple(i for i in group.layers if i in layers))
            for group in self.groups
        ]
        return LayerGroups(tuple(kept), max(len(group.layers) for group in kept))


def layer_groups(
    windows: Sequence[Window], num_layers: int, is_staged: bool = False
) -> LayerGroups:
    """Groups of one size, full ones first; no windows at all means that every layer sees all.

    `is_staged`: layers of a group lie far apart, so that whoever has some neighbouring layers has
    equally few of every group."""
    seen = list(windows) or [None] * num_layers
    if len(seen) != num_layers:
        raise ValueError(f"got {len(seen)} windows for {num_layers} layers, want one for each")
    if any(window is not None and window < 1 for window in seen):
        raise ValueError(f"got windows {seen}, want at least 1 position each")
    kinds: dict[Window, list[int]] = {}
    for layer, window in enumerate(seen):
        kinds.setdefault(window, []).append(layer)
    size = min(range(1, num_layers + 1), key=lambda size: _cost(kinds, size))
    order = sorted(kinds, key=lambda window: (window is not None, window or 0))
    groups = []
    for window in order:
        layers, count = kinds[window], -(-len(kinds[window]) // size)
        for i in range(count):
            some = layers[i::count] if is_staged else layers[i * size : (i + 1) * size]
            groups.append(LayerGroup(tuple(some), window))
    return LayerGroups(tuple(groups), size)


def _cost(kinds: dict[Window, list[int]], size: int) -> tuple[bool, int, int]:
    """(too many groups, weighted places, groups), to be minimised."""
    counts = {window: -(-len(layers) // size) for window, layers in kinds.items()}
    num_groups = sum(counts.values())
    places = sum(
        count * size * (FULL_WEIGHT if window is None else 1) for window, count in counts.items()
    )
    return num_groups > max(MAX_GROUPS, len(kinds)), places, num_groups


def kept_window(window: int, page_size: int) -> int:
    """How many positions a request keeps behind its newest one.

    More than a page, however short the window. The request then always holds the last published
    page, even when it copies its newest one, and with it its path in the prefix tree.
    """
    return max(window, page_size + 1)


def first_column(position: int, window: int, page_size: int) -> int:
    """The first column that a request at this position still holds.

    It keeps one position more than the next query sees. A request that finds its whole prompt in
    the cache computes the last token again, and that token sees one position further back.
    """
    return max(0, position - kept_window(window, page_size)) // page_size


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """How many pages one request may hold at once, over all groups.

    >>> PageNeeds(16, (None, 64), max_inflight=32).of(1600)  # 100 and (64 + 32) / 16 + 1
    107
    """

    page_size: int
    windows: tuple[Window, ...] = (None,)
    max_inflight: int = 1  # most tokens of a request in steps that are launched and not settled

    def of(self, num_tokens: int) -> int:
        return sum(self.in_group(window, num_tokens) for window in self.windows)

    def in_group(self, window: Window, num_tokens: int) -> int:
        columns = -(-num_tokens // self.page_size)
        if window is None:
            return columns
        span = kept_window(window, self.page_size) + self.max_inflight
        return min(columns, -(-span // self.page_size) + 1)
