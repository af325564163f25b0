"""Texts as numbers: hashed words to find similar ones, and the words that must not differ.

A cosine finds candidates and decides nothing: "enable" and "disable" are neighbours for it. What
makes two similar texts ask for different things (numbers, names, dates, negations, opposites) is
compared as it stands (`anchors`). Everything is a function of the text alone.
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
SAME_WORDS = 0.8  # cosine between answers from which they may say the same
_WORD = re.compile(r"[^\W_]+(?:['’.,:/-][^\W_]+)*")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEGATIONS = _words(
    "no not never none nobody nothing neither nor nowhere without cannot except unless hardly"
    " false wrong incorrect untrue"
)
# Words whose opposite makes another question of it. Of "on" and "off" one is enough.
_OPPOSITES = _words(
    "off enable disable enabled disabled add remove start stop open close before after above below"
    " less least increase decrease down first last min max minimum maximum true yes always old new"
    " left right north south east west buy sell import export push pull read write lock unlock"
    " allow deny accept reject include exclude today tomorrow yesterday monday tuesday wednesday"
    " thursday friday saturday sunday january february march april june july august september"
    " october november december one two three four five six seven eight nine ten eleven twelve"
    " hundred thousand million billion half double twice"
)


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


def anchors(text: str) -> Counter[str]:
    """What two texts must share to be about the same: each as often.

    >>> anchors("Is 7 prime?") == anchors("Is 9 prime?")
    False
    >>> anchors("Who was Ada?") == anchors("who was Ada")
    True
    """
    found: Counter[str] = Counter()
    begins = True
    for match in _WORD.finditer(text):
        word = match[0]
        plain = word.lower().replace("’", "'")
        is_name = any(letter.isupper() for letter in (word[1:] if begins else word))
        is_number = any(letter.isdigit() for letter in word)
        is_negation = plain in _NEGATIONS or plain.endswith("n't")
        if is_name or is_number or is_negation or plain in _OPPOSITES:
            found[plain] += 1
        begins = text[match.end() : match.end() + 1] in (".", "!", "?", ":", "\n", '"')
    return found


def says_the_same(one: str, other: str) -> bool:
    """Whether two answers agree: the same anchors, and nearly the same words."""
    if _bare(one) == _bare(other):
        return True
    if anchors(one) != anchors(other):
        return False
    return bool(features(one) @ features(other) >= SAME_WORDS)


def _bare(text: str) -> list[str]:
    return [word.lower() for word in words_of(text)]
