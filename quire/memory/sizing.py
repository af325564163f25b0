"""Sizing: memory left after the weights and a real step -> number of pages. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import OutOfMemory
from quire.kv.groups import PageNeeds

CPU_DEFAULT = 4 << 30  # bytes of cache a CPU engine takes unless told otherwise
CPU_SHARE = 0.5  # ... and never more than this share of what is free


def cpu_cache_bytes(free: int, one_request: int) -> int:
    """Bytes of cache of a CPU engine: at least one full request, if free memory allows it."""
    return min(max(CPU_DEFAULT, one_request), int(free * CPU_SHARE))


@dataclass(frozen=True, slots=True)
class Room:
    """Where the bytes go."""

    total: int
    usable: int  # what we may use of it
    weights: int
    step: int  # activations, measured by running the largest step
    asked: int | None  # kv_cache_memory

    @property
    def cache(self) -> int:
        return self.asked if self.asked is not None else self.usable - self.weights - self.step

    def describe(self) -> str:
        if self.asked is not None:
            return f"{gib(self.asked)} asked for"
        return (
            f"{gib(self.usable)} usable of {gib(self.total)} - {gib(self.weights)} weights"
            f" - {gib(self.step)} largest step = {gib(self.cache)}"
        )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def num_pages(
    room: Room,
    page_bytes: int,
    page_size: int,
    max_model_len: int,
    max_num_seqs: int,
    needs: PageNeeds | None = None,
) -> int:
    """Pages that fit, the scratch page included; refuses when one full request does not fit.

    `needs` counts a request's pages where some layers are windowed; None: all layers see all.
    """
    needs = needs or PageNeeds(page_size)
    most = max_num_seqs * needs.of(max_model_len) + 1  # nobody could ever use more
    pages = min(room.cache // page_bytes, most)
    needed = needs.of(max_model_len) + 1
    if pages < needed:
        workable = _longest(needs, int(pages) - 1, max_model_len)
        hint = (
            f"the largest max_model_len that fits is {workable}"
            if workable >= page_size
            else "not even one page fits: use a smaller model or more memory"
        )
        raise OutOfMemory(
            f"max_model_len={max_model_len} needs {needed} pages of {page_bytes} bytes"
            f" = {gib(needed * page_bytes)} of cache, but there is {gib(max(0, room.cache))}"
            f" ({room.describe()}); {hint}"
        )
    if room.asked is not None and pages * page_bytes > room.total:
        raise OutOfMemory(
            f"got kv_cache_memory={room.asked} ({gib(room.asked)}), but the device has"
            f" {gib(room.total)}; ask for less, or leave it out to have it sized"
        )
    return int(pages)


def _longest(needs: PageNeeds, num_pages: int, max_model_len: int) -> int:
    """Tokens of the longest request that fits `num_pages`, in whole pages; 0: not even one page."""
    low, high = 0, -(-max_model_len // needs.page_size)  # columns: low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if needs.of(middle * needs.page_size) <= num_pages:
            low = middle
        else:
            high = middle
    return low * needs.page_size
