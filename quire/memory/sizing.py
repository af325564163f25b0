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
            return f"{size_text(self.asked)} asked for"
        taken = {"weights": self.weights, "largest step": self.step}
        terms = [f" - {size_text(size)} {what}" for what, size in taken.items() if size]
        result = f" = {size_text(self.cache)}" if terms else ""
        usable = f"{size_text(self.usable)} usable of {size_text(self.total)}"
        return usable + "".join(terms) + result


def size_text(num_bytes: int) -> str:
    """In the unit that fits.

    >>> size_text(0), size_text(1536), size_text(300 << 20), size_text(5 << 30)
    ('0 bytes', '1.50 KiB', '300 MiB', '5.00 GiB')
    """
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "bytes" or abs(size) >= 100 else 2
    return f"{size:.{digits}f} {unit}"


def on_each(num_homes: int) -> str:
    """Behind a number of pages, where several ranks keep so many each of their own requests."""
    return f", on each of {num_homes} ranks" if num_homes > 1 else ""


def check_weights_fit(num_bytes: int, total: int) -> None:
    """Before memory is asked for: a system that promises more than it has would kill us later."""
    if num_bytes > total:
        raise OutOfMemory(
            f"the weights take {size_text(num_bytes)}, but there is {size_text(total)} of memory in"
            " all; use a smaller model, or a smaller dtype"
        )


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
            f" = {size_text(needed * page_bytes)} of cache, but there is"
            f" {size_text(max(0, room.cache))} ({room.describe()}); {hint}"
        )
    if room.asked is not None and pages * page_bytes > room.total:
        raise OutOfMemory(
            f"got kv_cache_memory={room.asked} ({size_text(room.asked)}), but the device has"
            f" {size_text(room.total)}; ask for less, or leave it out to have it sized"
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
