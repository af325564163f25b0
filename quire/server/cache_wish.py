"""CacheWish: whether and how an answer may come from the cache, and what it is about.

The flag `--answer-cache` says how far requests may go, the field `answer_cache` how far this one
goes. The *frame* is everything the answer depends on except the last message of the user: all other
messages, tools, template values and sampling. Two requests are compared by their last messages
only where their frames are equal. `answer_cache.py` looks and learns.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.answers.sameness import asks_the_same
from quire.errors import BadRequest
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.server.server import Server

OFF, EXACT, DRAFT, ANSWER = MODES = ("off", "exact", "draft", "answer")
# Keys in the order they came: another order is another request, which only costs a miss.
_encode = msgspec.msgpack.Encoder().encode


class CacheWish(NamedTuple):
    mode: str
    frame: bytes = b""
    text: str = ""  # the last message; "": nothing is similar to this
    may_answer: bool = False  # no call of a tool can be in the answer
    model: str = ""  # as it was named: several may be served
    is_prompt: bool = False  # to be gone on with: a point more at its end is another beginning

    def asks_as(self, text: str) -> bool:
        """Whether an answer to `text`, in the same frame, answers this without a proof."""
        return self.text == text if self.is_prompt else asks_the_same(self.text, text)


def mode_of(asked: str | None, server: Server) -> str:
    """Raises BadRequest for what is no mode, or more than the server was started with."""
    most = server.settings.answer_cache if server.answers is not None else OFF
    if asked is None:
        return DRAFT if most == ANSWER else most
    if asked not in MODES:
        raise BadRequest(
            f"got answer_cache={asked[:40]!r}, want one of {', '.join(MODES)}", param="answer_cache"
        )
    if MODES.index(asked) > MODES.index(most):
        raise BadRequest(
            f"got answer_cache={asked!r}, but the server allows {most!r} at most"
            f" (quire serve --answer-cache {asked})",
            param="answer_cache",
        )
    return asked


class Asked(NamedTuple):
    """A conversation, and the rest of what the answer depends on."""

    messages: list[dict[str, Any]]
    surroundings: list[Any]  # tools and values of the template, as they came
    params: SamplingParams
    model: str | None


def chat_wish(mode: str, asked: Asked, may_answer: bool) -> CacheWish | None:
    if mode == OFF:
        return None
    model, messages = asked.model or "", asked.messages
    last = messages[-1] if messages else {}
    text = last.get("content") if last.get("role") == "user" else None
    if not isinstance(text, str):
        return CacheWish(mode, model=model)
    around = [model, messages[:-1], asked.surroundings, settings_bytes(asked.params)]
    return CacheWish(mode, sha256(_encode(around)).digest(), text, may_answer, model)


def text_wish(mode: str, asked: Asked, text: str | None) -> CacheWish | None:
    """Of a plain prompt, which has no last message: all of it is the text."""
    if mode == OFF:
        return None
    model = asked.model or ""
    frame = sha256(_encode([model, settings_bytes(asked.params)])).digest()
    return CacheWish(mode, frame, text or "", True, model, is_prompt=True)


def settings_bytes(params: SamplingParams) -> bytes:
    """What the answer depends on besides its prompt and seed."""
    return _encode(params.with_(seed=None, num_speculative_tokens=None))
