"""PrefixIndex: which prefixes one upstream has in its cache, as far as the router knows.

An upstream that publishes its cache sends numbered changes; whoever has missed some, or speaks of
an earlier life of the process, gets the whole list instead (`kv/cache_news.py`). What was just
sent there is *promised*: it counts as cached until the upstream has had time to say so itself. An
upstream that publishes nothing is known by its promises alone, the oldest of which are forgotten.
How much a full cache drops for what it takes in is learned from the same changes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

KEY_BYTES = 8
PROMISE_S = 10.0  # by then a promise was kept, or will not be
STALE_S = 5.0  # without news of the cache
MOST_PROMISES = 200_000
TYPICAL_PAGES = 64  # of a change that weighs as much as all before it


class CacheNews(msgspec.Struct, frozen=True):
    """What an upstream says of its cache: changes after number `since`, or everything."""

    epoch: str  # of its process
    next: int  # number of the change to come
    page_size: int
    is_whole: bool
    added: str = ""  # keys, hexadecimal, one after the other
    removed: str = ""


def split_keys(text: str) -> list[bytes]:
    raw = bytes.fromhex(text)
    if len(raw) % KEY_BYTES:
        raise ValueError(f"{len(raw)} bytes of keys")
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


@dataclass(slots=True)
class PrefixIndex:
    epoch: str = ""
    next: int = 0
    page_size: int = 0  # tokens of a page; 0: it publishes nothing
    heard: float = float("-inf")
    num_resyncs: int = 0
    displaced: float = 0.0  # pages it dropped for each that it added lately, 0 to 1
    _known: set[bytes] = field(default_factory=set)
    _promised: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # until when

    @property
    def is_published(self) -> bool:
        return self.page_size > 0

    def is_stale(self, now: float) -> bool:
        """It publishes, and has not been heard of: promises and old news would mislead."""
        return self.is_published and now - self.heard > STALE_S

    def take(self, news: CacheNews, now: float) -> bool:
        """False: these changes do not follow what is known; ask for everything."""
        if not news.is_whole and (news.epoch != self.epoch or news.next < self.next):
            return False
        if news.is_whole:
            self._known = set(split_keys(news.added))
            self.num_resyncs += 1
            if news.epoch != self.epoch:
                self._promised.clear()
        else:
            self._change(split_keys(news.added), split_keys(news.removed))
        self.epoch, self.next, self.heard = news.epoch, news.next, now
        self.page_size = news.page_size
        return True

    def _change(self, added: list[bytes], removed: list[bytes]) -> None:
        self._known.difference_update(removed)
        self._known.update(added)
        for key in added:
            self._promised.pop(key, None)  # kept
        for key in removed:
            # Made before the last news: it was kept, and what it promised is gone since.
            if self._promised.get(key, float("inf")) - PROMISE_S < self.heard:
                del self._promised[key]
        if added:
            share = min(1.0, len(removed) / len(added))
            self.displaced += (share - self.displaced) * len(added) / (len(added) + TYPICAL_PAGES)

    def forget(self) -> None:
        """The upstream went away; whoever comes back begins with an empty cache."""
        self.epoch, self.next, self.displaced = "", 0, 0.0
        self._known.clear()
        self._promised.clear()

    def promise(self, keys: Sequence[bytes], now: float) -> None:
        until = now + PROMISE_S if self.is_published else float("inf")
        for key in keys:
            self._promised[key] = until
            self._promised.move_to_end(key)
        while len(self._promised) > MOST_PROMISES:
            self._promised.popitem(last=False)

    def num_cached(self, keys: Sequence[bytes], now: float | None = None) -> int:
        """How many leading keys it holds. A page is never held without those before it."""
        now = time.monotonic() if now is None else now
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._holds(keys[middle], now):
                low = middle + 1
            else:
                high = middle
        return low

    def _holds(self, key: bytes, now: float) -> bool:
        return key in self._known or self._promised.get(key, float("-inf")) > now

    def __len__(self) -> int:
        return len(self._known) or len(self._promised)
