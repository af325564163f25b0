"""SimilarIndex: one tenant's entries by what they are about, searched by brute force.

A matrix with a row for each entry; a search is one product. It grows by what was stored since the
last look, by this process or another, and forgets what is gone when somebody asks for it. Some
thousands of entries take a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.answers.entries import Sketch
from quire.answers.features import SIZE, Vector

GROWTH = 256  # rows at a time


class Candidate(NamedTuple):
    key: bytes
    similarity: float
    has_same_frame: bool


class SimilarIndex:
    def __init__(self) -> None:
        self.last_number = 0
        self._rows = np.zeros((0, SIZE), np.float32)  # [room, features]
        self._keys: list[bytes] = []
        self._frames: list[bytes] = []
        self._places: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, sketches: Sequence[Sketch]) -> None:
        for sketch in sketches:
            self.last_number = max(self.last_number, sketch.number)
            at = self._places.get(sketch.key, len(self._keys))
            if at == len(self._keys):
                self._make_room(at + 1)
                self._keys.append(sketch.key)
                self._frames.append(sketch.frame)
                self._places[sketch.key] = at
            self._rows[at] = np.frombuffer(sketch.features, np.float32)
            self._frames[at] = sketch.frame

    def _make_room(self, count: int) -> None:
        if count > len(self._rows):
            more = np.zeros((max(GROWTH, len(self._rows)), SIZE), np.float32)
            self._rows = np.concatenate([self._rows, more])

    def remove(self, key: bytes) -> None:
        """The last row takes its place."""
        at, last = self._places.pop(key, None), len(self._keys) - 1
        if at is None:
            return
        if at != last:
            self._rows[at] = self._rows[last]
            self._keys[at], self._frames[at] = self._keys[last], self._frames[last]
            self._places[self._keys[at]] = at
        self._keys.pop()
        self._frames.pop()

    def nearest(self, features: Vector, frame: bytes, count: int = 1) -> list[Candidate]:
        """The most similar entries, best first; among equals those asked in the same way."""
        found = self._rows[: len(self._keys)] @ features  # [entries]
        same = np.fromiter((f == frame for f in self._frames), bool, len(self._frames))
        order = np.argsort(-(found + 1e-3 * same), kind="stable")[:count]
        return [Candidate(self._keys[at], float(found[at]), bool(same[at])) for at in order]

    def nearest_framed(self, features: Vector, frame: bytes) -> list[Candidate]:
        """The most similar entry that was asked in the same way."""
        same = [at for at, other in enumerate(self._frames) if other == frame]
        if not same:
            return []
        found = self._rows[same] @ features
        best = int(np.argmax(found))
        return [Candidate(self._keys[same[best]], float(found[best]), True)]
