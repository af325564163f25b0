"""What counts as similar, and the index that finds it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.answers.entries import Sketch
from quire.answers.features import SIZE, features
from quire.answers.index import SimilarIndex
from tests.answers.pairs import ADVERSARIAL, SAME


@pytest.mark.parametrize(("one", "other"), ADVERSARIAL)
def test_what_asks_for_something_else_looks_alike(one: str, other: str) -> None:
    """Red when the pairs have become too easy: a threshold on the cosine would do."""
    assert features(one) @ features(other) > 0.25


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_asks_for_the_same_is_found(one: str, other: str) -> None:
    assert features(one) @ features(other) > 0.6


def sketch(number: int, frame: bytes, vector: np.ndarray) -> Sketch:
    return Sketch(number, b"key%d" % number, frame, vector.astype(np.float32).tobytes())


def test_the_index_is_brute_force() -> None:
    """Red when growth, removal or replacement loses a row or mixes two up."""
    rng = np.random.default_rng(0)
    index, known = SimilarIndex(), {}
    for number in range(1, 700):
        vector = rng.normal(size=SIZE).astype(np.float32)
        vector /= np.linalg.norm(vector)
        known[b"key%d" % number] = (b"f%d" % (number % 3), vector)
        index.add([sketch(number, b"f%d" % (number % 3), vector)])
    for key in random.Random(1).sample(sorted(known), 300):
        index.remove(key)
        index.remove(key)  # gone is gone
        del known[key]
    assert len(index) == len(known) and index.last_number == 699
    for _ in range(20):
        asked = rng.normal(size=SIZE).astype(np.float32)
        asked /= np.linalg.norm(asked)
        near = index.nearest(asked, b"none", 3)
        assert not near[0].has_same_frame
        ranked = sorted(known, key=lambda k: -float(known[k][1] @ asked))
        assert [one.key for one in near] == ranked[:3]
        (framed,) = index.nearest_framed(asked, b"f1")
        assert framed.key == next(k for k in ranked if known[k][0] == b"f1")
    assert index.nearest_framed(asked, b"none") == SimilarIndex().nearest(asked, b"") == []
