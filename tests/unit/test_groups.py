"""Layer groups and what requests hold in them: arithmetic without an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.groups import (
    FULL_WEIGHT,
    MAX_GROUPS,
    PageNeeds,
    Window,
    first_column,
    layer_groups,
)

windows_of_layers = st.lists(st.sampled_from([None, None, 64, 128]), min_size=1, max_size=70)


def every(step: int, num_layers: int, window: int) -> list[Window]:
    """Every `step`-th layer sees all."""
    return [None if (layer + 1) % step == 0 else window for layer in range(num_layers)]


@given(windows_of_layers)
def test_each_layer_has_one_place(windows: list[Window]) -> None:
    """Red when a layer is lost, doubled, or put among layers that see another distance."""
    groups = layer_groups(windows, len(windows))
    places = [(groups.group_of(i), groups.place_of(i)) for i in range(len(windows))]
    assert len(set(places)) == len(windows) == groups.num_layers
    assert all(place < groups.num_places for _, place in places)
    assert [groups.windows[group] for group, _ in places] == windows
    assert len(groups) <= max(MAX_GROUPS, len(set(windows)))


@given(windows_of_layers)
def test_no_size_wastes_less(windows: list[Window]) -> None:
    """Red when another size would cost a request less memory with as few groups."""

    def cost(size: int) -> tuple[int, int]:
        weights = {w: FULL_WEIGHT if w is None else 1 for w in set(windows)}
        counts = {w: -(-windows.count(w) // size) for w in set(windows)}
        return sum(counts.values()), sum(counts[w] * size * weights[w] for w in counts)

    groups = layer_groups(windows, len(windows))
    _, least = cost(groups.num_places)
    for size in range(1, len(windows) + 1):
        num_groups, places = cost(size)
        assert num_groups > max(MAX_GROUPS, len(set(windows))) or places >= least


@pytest.mark.parametrize(
    ("windows", "num_layers", "places", "full", "windowed"),
    [
        ([], 32, 32, 1, 0),  # Llama
        ([4096] * 32, 32, 32, 0, 1),  # Mistral v0.1
        (every(2, 24, 128), 24, 12, 1, 1),  # gpt-oss-20b
        (every(2, 42, 4096), 42, 21, 1, 1),  # Gemma 2 9B
        (every(6, 26, 512), 26, 4, 1, 6),  # Gemma 3 1B: 22 windowed layers, two places unused
        (every(6, 34, 1024), 34, 5, 1, 6),  # Gemma 3 4B: 29
        (every(6, 48, 1024), 48, 8, 1, 5),  # Gemma 3 12B: 40
        (every(6, 62, 1024), 62, 10, 1, 6),  # Gemma 3 27B: 52
        ([None] * 20 + [64] * 8, 28, 4, 5, 2),
    ],
)
def test_known_models(
    windows: list[Window], num_layers: int, places: int, full: int, windowed: int
) -> None:
    """Red when full layers, whose pages a long context keeps, get places they do not use."""
    groups = layer_groups(windows, num_layers)
    assert groups.num_places == places
    assert [window is None for window in groups.windows] == [True] * full + [False] * windowed


def test_bad_windows_are_refused() -> None:
    """Red when a config with too few windows or an empty one is taken to mean something."""
    with pytest.raises(ValueError, match="got 2 windows for 3 layers"):
        layer_groups([None, 4], 3)
    with pytest.raises(ValueError, match="at least 1 position"):
        layer_groups([None, 0, 4], 3)


@given(
    position=st.integers(0, 500),
    window=st.integers(1, 100),
    page_size=st.sampled_from([1, 2, 4, 16]),
)
def test_what_is_kept_covers_what_is_seen(position: int, window: int, page_size: int) -> None:
    """Red when a query at this position, or at the one before, would find a page gone."""
    first = first_column(position, window, page_size)
    oldest_seen = max(0, position - 1 - window + 1)
    assert first * page_size <= oldest_seen
    # ... and nothing that lies wholly behind both the window and a page more than the newest.
    kept = max(window, page_size + 1)
    assert first == 0 or (first + 1) * page_size > position - kept


@given(
    window=st.one_of(st.none(), st.integers(1, 100)),
    page_size=st.sampled_from([1, 2, 4, 16]),
    computed=st.integers(0, 300),
    inflight=st.integers(1, 50),
)
def test_needs_bound_what_can_be_held(
    window: Window, page_size: int, computed: int, inflight: int
) -> None:
    """Red when sizing plans for less than a request may come to hold at any alignment."""
    first = 0 if window is None else first_column(computed, window, page_size)
    held = -(-(computed + inflight) // page_size) - first
    needs = PageNeeds(page_size, (window,), max_inflight=inflight)
    assert held <= needs.of(computed + inflight)
