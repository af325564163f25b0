"""Detokenizer: token ids in, text out as it becomes certain, constant work per token.

Byte-level vocabularies: each token is some bytes, and an incremental UTF-8 decoder keeps what is
not yet a character. Other vocabularies: a token's text can depend on the one before it (a leading
space), so a short window that overlaps what was already shown is decoded again each time. Either
way the pieces joined, with `flush()`, are the decoding of the whole output after its prompt. Stop
strings are `stops.py`'s.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_OPEN = 3  # an unfinished UTF-8 character has at most three bytes, each its own token at worst
CONTEXT = 6  # tokens kept when the window is cut: more than MAX_OPEN, so no open character is cut
MAX_WINDOW = 12
HARD_WINDOW = 40  # cut here whatever the text looks like, so that noise cannot pile up
PROMPT_TAIL = 64


class Decoder(Protocol):
    """The part of `Tokenizer` that is needed here."""

    @property
    def special_ids(self) -> Collection[int]: ...

    @property
    def is_byte_level(self) -> bool: ...

    def token_bytes(self, id: int) -> bytes: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class _Pieces(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The text of one output, piece by piece."""

    def __init__(
        self, tokenizer: Decoder, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._skipped = frozenset(tokenizer.special_ids if skip_special_tokens else ())
        tail = [i for i in prompt_ids[-PROMPT_TAIL:] if i not in self._skipped][-CONTEXT:]
        kind = _BytePieces if tokenizer.is_byte_level else _WindowPieces
        self._pieces: _Pieces = kind(tokenizer, tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens add, less what the next ones could still change."""
        if not self._skipped.isdisjoint(token_ids):
            token_ids = [i for i in token_ids if i not in self._skipped]
        return self._pieces.push(token_ids) if token_ids else ""

    def flush(self) -> str:
        """What was held back, as it stands; call once, at the end."""
        return self._pieces.flush()


class _BytePieces:
    def __init__(self, tokenizer: Decoder, prompt_tail: Sequence[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_open = False  # a character is, in `_utf8`
        self.push(prompt_tail)  # a character may begin in the prompt and end in the output

    def push(self, ids: Sequence[int]) -> str:
        data = b"".join(map(self._token_bytes, ids))
        if not self._is_open and data.isascii():
            return data.decode("ascii")  # most tokens are, and this takes a tenth of the time
        text = self._utf8.decode(data)
        self._is_open = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowPieces:
    def __init__(self, tokenizer: Decoder, prompt_tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_tail)
        text = self._decode(self._window)
        self._shown = text.rstrip(REPLACEMENT)  # prefix of the window's text
        # Tokens at the window's start that are shown in full, and how much text they make.
        self._num_done = len(self._window) if self._shown == text else 0
        self._done_chars = len(self._shown) if self._num_done else 0

    def push(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            text = self._restart()
        delta = self._show(text, self._num_final(text))
        if len(self._window) > MAX_WINDOW:
            self._cut(text)
        return delta

    def flush(self) -> str:
        text = self._decode(self._window)
        return self._show(text, len(text)) if text.startswith(self._shown) else ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _num_final(self, text: str) -> int:
        """Characters that no further token can change.

        With byte fallback a run of bytes is good or bad as a whole, so any replacement character
        at the end may still become, or merge into, real ones.
        """
        settled = len(text.rstrip(REPLACEMENT))
        return settled if len(self._window) < HARD_WINDOW else max(settled, len(text) - MAX_OPEN)

    def _show(self, text: str, end: int) -> str:
        delta = text[len(self._shown) : end]
        self._shown += delta
        if len(self._shown) == len(text):
            self._num_done, self._done_chars = len(self._window), len(text)
        return delta

    def _restart(self) -> str:
        """New tokens have changed the text of older ones: decode only what is not shown yet.

        Byte-fallback vocabularies do this: one bad byte turns its whole run of bytes into U+FFFD.
        What was shown stays shown.
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
        num_open = len(text) - len(self._shown)
        fits = text.endswith(rest_text) and len(rest_text) > num_open
        if not fits and len(self._window) < HARD_WINDOW:
            return
        num_cut = len(self._window) - len(rest)
        self._window = rest
        self._shown = rest_text[: max(0, len(rest_text) - num_open)]
        self._num_done = max(0, self._num_done - num_cut)
        self._done_chars = len(self._decode(rest[: self._num_done]))
