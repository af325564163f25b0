"""Held-out text, cut into windows of token ids that are scored each on its own.

The text is known by name and fetched, or a file of the user's. Windows do not overlap and have one
length, so that every token is scored once, with up to a window's context. A model whose tokenizer
begins texts with a token of its own gets it at the start of every window.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from quire.errors import BadRequest
from quire.load.known_texts import SPEECHES
from quire.load.wheels import Progress
from quire.text.tokenizer import Tokenizer

MAX_TEXT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class HeldOut:
    name: str
    text: str
    sha256: str

    @staticmethod
    def known(progress: Progress) -> HeldOut:
        return HeldOut._read(SPEECHES.name, SPEECHES.fetch(progress))

    @staticmethod
    def file(path: Path) -> HeldOut:
        return HeldOut._read(path.name, path)

    @staticmethod
    def _read(name: str, path: Path) -> HeldOut:
        try:
            if path.stat().st_size > MAX_TEXT_BYTES:
                raise BadRequest(f"{path} has over {MAX_TEXT_BYTES} bytes; give a shorter text")
            data = path.read_bytes()
            return HeldOut(name, data.decode("utf-8"), hashlib.sha256(data).hexdigest())
        except OSError as error:
            raise BadRequest(f"cannot read the text {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BadRequest(f"{path} is no UTF-8 text (byte {error.start})") from error


@dataclass(frozen=True, slots=True)
class Windows:
    ids: tuple[tuple[int, ...], ...]  # all of one length
    num_bytes: int  # of the text whose tokens are scored

    @property
    def length(self) -> int:
        return len(self.ids[0])

    @property
    def num_scored(self) -> int:
        """A window's first token is predicted from nothing and not scored."""
        return len(self.ids) * (self.length - 1)


def cut(text: HeldOut, tokenizer: Tokenizer, length: int, num_tokens: int) -> Windows:
    """As many whole windows as `num_tokens` has, or the text if it is shorter."""
    ids = tokenizer.encode(text.text, add_special_tokens=False)
    begin = _begin(tokenizer)
    step = length - len(begin)
    count = min(max(1, num_tokens // length), len(ids) // step)
    if count == 0:
        raise BadRequest(
            f"the text {text.name!r} has {len(ids)} tokens, less than a window of {length};"
            f" give a longer one, or --window {len(ids)} or less"
        )
    windows = [(*begin, *ids[at * step : (at + 1) * step]) for at in range(count)]
    num_bytes = sum(len(tokenizer.decode(list(window[1:])).encode()) for window in windows)
    return Windows(tuple(windows), num_bytes)


def _begin(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before every text."""
    begin = tokenizer.bos_id
    return (begin,) if begin is not None and tokenizer.encode("a")[:1] == [begin] else ()
