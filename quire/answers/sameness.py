"""When two questions are one question, and when two answers are one answer.

Both compare texts as they stand and list what may differ; any other difference counts, in whatever
language. So there is no list of dangers that could miss one: a number, a name, a negation, an order
of words nobody thought of is a difference like any other. What may differ in a question is how an
English one begins and ends; between, not a blank. `features.py` finds candidates, this decides.
"""

from __future__ import annotations

from itertools import chain
from unicodedata import normalize


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# None of them is a name: "Will" and "May" would be.
_QUESTIONS = _words(
    "what which who whose when where why how is are was were do does did can could would should"
)
_REQUESTS = _words(
    "explain describe summarise summarize tell give show write name list define compare translate"
    " convert suggest teach help find"
)
# "Can you write Chinese?" asks for something else than "Write Chinese."; these do not.
_ASKED_FOR = ("explain ", "describe ", "tell me ", "give me ", "show me ")
_ASKING = tuple(
    f"{verb} you {more}" for verb in ("can", "could", "would") for more in ("please ", "")
)
_POLITE = ("please ", "kindly ")
_ALIKE = {
    "what's the ": "what is the ",
    "what’s the ": "what is the ",
    "write me a ": "write a ",
    "write me an ": "write an ",
}
_QUOTING = frozenset(':"`“”„‘«»\n\t')  # what stands behind may be a text that is asked about
_ARTICLES = _words("a an the")


def asks_the_same(one: str, other: str) -> bool:
    """Whether an answer to one question answers the other.

    >>> asks_the_same("What is rain?", "what is rain")
    True
    >>> asks_the_same("Could you please explain rain?", "Explain rain.")
    True
    >>> asks_the_same("Did Anna sue Bob?", "Did Bob sue Anna?")
    False
    """
    return _question(one) == _question(other)


def _question(text: str) -> str:
    """What must be equal. Only what begins as an English question or request is touched."""
    whole = normalize("NFC", text).strip()
    begun = whole[:1].lower() + whole[1:]
    asking, asked = _split(begun, _ASKING)
    if asking and asked.startswith(_ASKED_FOR):
        return _without_mark(asked, ".?")
    _, asked = _split(begun, _POLITE)
    word = asked.split(" ", 1)[0]
    if word in _REQUESTS:
        return _without_mark(_begin_alike(asked), ".")
    if begun.split(" ", 1)[0].partition("'")[0].partition("’")[0] in _QUESTIONS:
        return _without_mark(_begin_alike(begun), "?")
    return whole


def _split(text: str, openings: tuple[str, ...]) -> tuple[str, str]:
    """The opening it has, "" for none, and the rest."""
    found = next((opening for opening in openings if text.startswith(opening)), "")
    return found, text[len(found) :]


def _begin_alike(text: str) -> str:
    short, rest = _split(text, tuple(_ALIKE))
    return _ALIKE[short] + rest if short else text


def _without_mark(text: str, marks: str) -> str:
    """The mark at the end goes, but not one that may be part of what is asked about."""
    is_quoting = not _QUOTING.isdisjoint(text)
    ends_a_word = len(text) > 1 and text[-2].isalnum()
    return text[:-1] if text[-1:] in marks and ends_a_word and not is_quoting else text


def says_the_same(one: str, other: str) -> bool:
    """Whether two answers have the same words in the same order.

    Line breaks, final points and commas, one article for another and the capital that begins a
    sentence make no difference; the indentation of a line does."""
    return _said(one) == _said(other)


def _said(text: str) -> list[str]:
    return list(chain.from_iterable(_line(line) for line in normalize("NFC", text).splitlines()))


def _line(line: str) -> list[str]:
    indent = len(line) - len(line.lstrip())
    said = [" " * indent] if indent else []
    begins = True
    for word in line.split():
        bare = word.rstrip(".,") or word
        if begins and bare[1:] == bare[1:].lower():
            bare = bare.lower()
        said.append("the" if bare in _ARTICLES else bare)
        begins = word[-1] in ".!?:"
    return said
