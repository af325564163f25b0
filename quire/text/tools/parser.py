"""What a tool-call parser gives back: text, calls and their arguments, in the model's order.

A parser takes the output of one completion in pieces and never cares where the cuts are: joined,
the parts are the same for every chunking. What cannot be read as a call is text. Joined, the
`CallArguments` of a call are valid JSON, unless a `CallCut` says that the output ended inside.
The formats are one file each; `formats.py` names them, `router.py` puts reasoning in front.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

MAX_NAME_CHARS = 64
_NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_-.")
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class TextPart:
    """Ordinary content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow under the same index."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class CallCut:
    """The arguments stopped before their end, so the call is not one to run unseen.

    `closing` is what would make them valid JSON. It is empty when the model's JSON broke and went
    on as text: the arguments were closed then, to what had been read.
    """

    index: int
    closing: str


Part: TypeAlias = TextPart | CallStart | CallArguments | CallCut
NewId: TypeAlias = Callable[[], str]


class ToolParser(Protocol):
    """Finds the calls in one completion's text."""

    def push(self, text: str) -> list[Part]:
        """What this piece makes certain; text that may begin a call is held back."""
        ...

    def finish(self) -> list[Part]:
        """The rest: what was held back is text now, or ends a call. Call once."""
        ...


def openai_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Mistral's templates refuse ids that are not nine letters and digits."""
    return "".join(_ID_CHARS[byte % len(_ID_CHARS)] for byte in secrets.token_bytes(9))


def is_call_name(name: str) -> bool:
    """Whether a tool could be called that; dots are for namespaces, which some models write."""
    return 0 < len(name) <= MAX_NAME_CHARS and _NAME_CHARS.issuperset(name)
