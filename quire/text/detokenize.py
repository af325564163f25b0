"""Detokenizer: token ids in, text out as it becomes certain, a few tokens of work per token.

A character may be spread over several tokens, and a token's text may depend on the one before it
(a leading space), so each step decodes a short window that overlaps what was already shown.
Replacement characters at the end of a window may still become a real character: up to three are
held back, since UTF-8 leaves at most three bytes open. The pieces joined, with `flush()`, are the
decoding of the whole output after its prompt. Stop strings are `stops.py`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD = 3  # an unfinished UTF-8 character has at most three bytes, each its own token at worst
CONTEXT = 8  # tokens kept when the window is cut: more than MAX_HELD, so no open character is cut
MAX_WINDOW = 24
HARD_WINDOW = 64  # cut here even if the text before and after the cut disagree
PROMPT_TAIL = 64


class Decoder(Protocol):
    """The part of `Tokenizer` that is needed here."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one output, piece by piece."""

    def __init__(
        self, tokenizer: Decoder, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        tail = prompt_ids[-PROMPT_TAIL:]
        self._window = [i for i in tail if i not in self._skipped][-CONTEXT:]
        text = self._decode(self._window)
        self._shown = text[: len(text) - _num_held(text)]  # prefix of the window's text
        # Tokens at the window's start that are shown in full, and the text they make.
        self._num_done = len(self._window) if self._shown == text else 0
        self._done_chars = len(self._shown) if self._num_done else 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens add, less what the next ones could still change."""
        if self._skipped:
            token_ids = [i for i in token_ids if i not in self._skipped]
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            text = self._restart()
        delta = self._show(text, len(text) - _num_held(text))
        if len(self._window) > MAX_WINDOW:
            self._cut(text)
        return delta

    def flush(self) -> str:
        """What was held back, as it stands; call once, at the end."""
        text = self._decode(self._window)
        return self._show(text, len(text)) if text.startswith(self._shown) else ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _show(self, text: str, end: int) -> str:
        delta = text[len(self._shown) : end]
        self._shown = text[:end] if delta else self._shown
        if len(self._shown) == len(text):
            self._num_done, self._done_chars = len(self._window), len(text)
        return delta

    def _restart(self) -> str:
        """Decode only what is not shown yet: new tokens have changed the text of older ones.

        Byte-fallback vocabularies do this: one bad byte turns its whole run into U+FFFD. What was
        shown stays shown.
        """
        self._window = self._window[self._num_done :]
        text = self._decode(self._window)
        self._shown = text[: len(self._shown) - self._done_chars]
        self._num_done = self._done_chars = 0
        return text

    def _cut(self, text: str) -> None:
        """Drop the oldest tokens if the rest decodes to the same end of the text."""
        rest = self._window[-CONTEXT:]
        rest_text = self._decode(rest)
        open_chars = len(text) - len(self._shown)
        fits = text.endswith(rest_text) and len(rest_text) > open_chars
        if not fits and len(self._window) < HARD_WINDOW:
            return
        num_cut = len(self._window) - len(rest)
        self._window = rest
        self._shown = rest_text[: max(0, len(rest_text) - open_chars)]
        self._num_done = max(0, self._num_done - num_cut)
        self._done_chars = len(self._decode(rest[: self._num_done]))


def _num_held(text: str) -> int:
    tail = text[-MAX_HELD:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))
