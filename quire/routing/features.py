"""Features: an `Ask` as one vector: a few things that can be counted, and its hashed words.

What is counted is what makes questions hard for a small model: length, digits, code, tools, words
that ask for reasoning. Words themselves are hashed as in `answers/features.py`. A function of the
request alone: no model is asked, so a decision costs well under a millisecond.
"""

from __future__ import annotations

import re
from math import log1p

import numpy as np
from numpy.typing import NDArray

from quire.answers.features import features as hashed_words
from quire.answers.features import words_of
from quire.routing.ask import Ask

Vector = NDArray[np.float64]

MAX_CHARS = 20_000  # of a text that is looked at
_CODE = re.compile(r"```|\b(?:def|class|import|return|SELECT|function|const|public|void)\b|[{};]")
_MATH = re.compile(r"[=+*/^<>≤≥∑∫√%]|\\[a-zA-Z]+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FACTS = _words("what who when where which name capital define translate list spell")
_REASONS = _words("why how explain prove derive compare analyse analyze evaluate argue because if")
_TASKS = _words("write implement design refactor debug fix optimise optimize plan summarise")

NAMES = (
    *("length", "context_length", "messages", "words_per_sentence", "letters_per_word", "lines"),
    *("digits", "capitals", "beyond_ascii", "code", "mathematics", "questions"),
    *("facts", "reasons", "tasks", "tools", "images", "schema"),
)


def counted(ask: Ask) -> Vector:
    """[len(NAMES)], in the order of NAMES.

    >>> counted(Ask("What is 2 + 2?"))[NAMES.index("digits")] > 0
    True
    """
    text = ask.text[:MAX_CHARS]
    size = max(1, len(text))
    words = [word.lower() for word in words_of(text)]
    count = max(1, len(words))
    sentences = max(1, sum(text.count(mark) for mark in ".!?"))
    return np.array(
        [
            log1p(len(ask.text)),
            log1p(len(ask.context)),
            log1p(ask.num_messages),
            log1p(len(words) / sentences),
            sum(map(len, words)) / count,
            log1p(text.count("\n")),
            sum(letter.isdigit() for letter in text) / size,
            sum(letter.isupper() for letter in text) / size,
            sum(letter > "\x7f" for letter in text) / size,
            log1p(len(_CODE.findall(text))),
            log1p(len(_MATH.findall(text))),
            log1p(text.count("?")),
            sum(word in _FACTS for word in words) / count,
            sum(word in _REASONS for word in words) / count,
            sum(word in _TASKS for word in words) / count,
            log1p(ask.num_tools),
            log1p(ask.num_images),
            float(ask.has_schema),
        ]
    )


def vector_of(ask: Ask) -> Vector:
    """[len(NAMES) + 512]: what is counted, then words."""
    return np.concatenate([counted(ask), hashed_words(ask.text[:MAX_CHARS]).astype(np.float64)])
