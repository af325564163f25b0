"""Sizing: pages from bytes, and a refusal that names what would work."""

from __future__ import annotations

import re

import pytest

from quire.errors import OutOfMemory
from quire.kv.groups import PageNeeds
from quire.memory.sizing import Room, check_weights_fit, num_pages

GIB = 1 << 30


def room(cache: int, **more: int) -> Room:
    return Room(total=100 * GIB, usable=cache, weights=0, step=0, asked=None, **more)


def test_pages_are_what_is_left_divided_by_a_page() -> None:
    """Red when weights or activations are not subtracted, or the result rounds up."""
    left = Room(total=10_000, usable=9_000, weights=3_000, step=1_000, asked=None)
    assert left.cache == 5_000
    assert num_pages(left, 99, 16, 160, 1000) == 50


def test_asking_for_bytes_overrides_the_rest() -> None:
    """Red when kv_cache_memory is still reduced by weights or utilisation."""
    asked = Room(total=10_000, usable=100, weights=90, step=90, asked=5_000)
    assert num_pages(asked, 100, 16, 160, 1000) == 50


def test_nobody_gets_more_than_the_device_has() -> None:
    """Red when a kv_cache_memory beyond all memory is tried, and the machine with it."""
    asked = Room(total=10_000, usable=100, weights=90, step=90, asked=10**15)
    with pytest.raises(OutOfMemory, match=r"kv_cache_memory=1000000000000000 .*device has"):
        num_pages(asked, 100, 16, 160, 1000)
    assert num_pages(asked, 100, 16, 160, 9) == 91, "what could be used at most does fit"


def test_never_more_than_everyone_could_use() -> None:
    """Red when a small engine takes all memory for pages no row can reach."""
    assert num_pages(room(100 * GIB), 100, 16, 100, 4) == 4 * 7 + 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("max_model_len", [1, 15, 16, 17, 64])
def test_exactly_enough_is_enough(page_size: int, max_model_len: int) -> None:
    """Red when one full request and the scratch page do not fit what is called enough."""
    needed = -(-max_model_len // page_size) + 1
    assert num_pages(room(needed * 10), 10, page_size, max_model_len, 1) == needed
    with pytest.raises(OutOfMemory):
        num_pages(room(needed * 10 - 1), 10, page_size, max_model_len, 1)


@pytest.mark.parametrize("cache", [1_000, 1_599, 1_600, 5_555])
def test_refusal_names_the_largest_length_that_works(cache: int) -> None:
    """Red when the advice is wrong: the named length must work and one more must not."""
    with pytest.raises(OutOfMemory) as caught:
        num_pages(room(cache), 100, 16, 10_000, 8)
    workable = int(re.search(r"largest max_model_len that fits is (\d+)", str(caught.value))[1])
    assert num_pages(room(cache), 100, 16, workable, 8) >= 2
    with pytest.raises(OutOfMemory):
        num_pages(room(cache), 100, 16, workable + 1, 8)


@pytest.mark.parametrize("cache", [150, 0, -10_000])
def test_refusal_when_not_even_a_page_fits(cache: int) -> None:
    """Red when the advice is a length of zero or a negative one."""
    with pytest.raises(OutOfMemory, match="not even one page fits") as caught:
        num_pages(room(cache), 100, 16, 64, 8)
    assert "-" not in str(caught.value).split("but there is")[1].split("(")[0]


def test_refusal_shows_the_arithmetic() -> None:
    """Red when a number a user needs to decide is missing."""
    tight = Room(total=16 * GIB, usable=14 * GIB, weights=13 * GIB, step=GIB // 2, asked=None)
    with pytest.raises(OutOfMemory) as caught:
        num_pages(tight, 1 << 20, 16, 16_384, 8)
    for part in (
        "max_model_len=16384",
        "1025 pages",
        "14.00 GiB usable of 16.00 GiB",
        "13.00 GiB weights",
        "512 MiB largest step",
        "= 512 MiB",
    ):
        assert part in str(caught.value)
    assert tight.describe() in str(caught.value)


def test_refusal_is_a_memory_error() -> None:
    """Red when callers that catch MemoryError stop seeing it."""
    with pytest.raises(MemoryError, match=r"5\.00 GiB asked for"):
        num_pages(Room(0, 0, 0, 0, asked=5 * GIB), 1 << 30, 16, 1600, 1)


# ------------------------------------------------------------ layer groups

GEMMA = PageNeeds(16, (None, 64, 64, 64), max_inflight=32)  # 7 pages for each window at most


def test_windows_cost_a_window() -> None:
    """Red when windowed layers are charged the whole context, or full ones only a window."""
    assert [GEMMA.of(n) for n in (16, 96, 112, 1600)] == [4, 24, 28, 121]
    needed = 121 + 1
    assert num_pages(room(needed * 10), 10, 16, 1600, 1, GEMMA) == needed
    with pytest.raises(OutOfMemory, match="needs 122 pages"):
        num_pages(room(needed * 10 - 1), 10, 16, 1600, 1, GEMMA)
    assert num_pages(room(GIB), 10, 16, 1600, 8, GEMMA) == 8 * 121 + 1


@pytest.mark.parametrize("pages", [5, 9, 28, 29, 30, 60, 121])
def test_refusal_with_windows_names_the_largest_length_that_works(pages: int) -> None:
    """Red when the advice forgets a group: the named length must work, and a page more must not."""
    with pytest.raises(OutOfMemory) as caught:
        num_pages(room(pages * 100), 100, 16, 100_000, 8, GEMMA)
    workable = int(re.search(r"largest max_model_len that fits is (\d+)", str(caught.value))[1])
    assert num_pages(room(pages * 100), 100, 16, workable, 8, GEMMA) >= 2
    with pytest.raises(OutOfMemory):
        num_pages(room(pages * 100), 100, 16, workable + 1, 8, GEMMA)


def test_any_length_fits_where_all_layers_are_windowed() -> None:
    """Red when a model without full layers is refused a context its pages do not grow with."""
    needs = PageNeeds(16, (64,), max_inflight=32)
    assert num_pages(room(80), 10, 16, 1 << 20, 1, needs) == 8
    with pytest.raises(OutOfMemory, match=r"largest max_model_len that fits is 96"):
        num_pages(room(79), 10, 16, 1 << 20, 1, needs)


def test_weights_that_can_never_fit_are_refused_before_they_are_allocated() -> None:
    """Red when a machine that promises more memory than it has kills the process instead."""
    check_weights_fit(16 * GIB, 16 * GIB)
    with pytest.raises(OutOfMemory, match=r"weights take 16\.50 GiB, but there is 16\.00 GiB"):
        check_weights_fit(16 * GIB + GIB // 2, 16 * GIB)
