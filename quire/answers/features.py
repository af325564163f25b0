"""Texts as numbers: hashed words, to find similar ones.

A cosine finds candidates and decides nothing: "enable" and "disable" are neighbours for it.
`sameness.py` decides. Everything is a function of the text alone.
"""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b
from itertools import pairwise
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]  # [SIZE], of length 1

SIZE = 512
_WORD = re.compile(r"[^\W_]+(?:['’.,:/-][^\W_]+)*")


def words_of(text: str) -> list[str]:
    return _WORD.findall(text)


def features(text: str) -> Vector:
    """Words, pairs of words and runs of three letters, hashed into one vector.

    >>> a, b, c = map(features, ("Name a colour.", "name a colour", "Add two numbers"))
    >>> bool(a @ b > 0.9 > 0.3 > a @ c)
    True
    """
    words = [word.lower() for word in words_of(text)]
    counts: Counter[str] = Counter(words)
    counts.update(f"{a} {b}" for a, b in pairwise(words))
    for word in words:
        padded = f"^{word}$"
        counts.update(f"#{padded[i : i + 3]}" for i in range(len(padded) - 2))
    made = np.zeros(SIZE, np.float32)
    for name, count in counts.items():
        number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        made[number % SIZE] += sqrt(count) * (1.0 if number >> 63 else -1.0)
    length = float(np.linalg.norm(made))
    return made / np.float32(length) if length else made
