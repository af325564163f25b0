"""Calibration text: the one that comes along, or a user's file, cut into sequences of tokens.

The built-in text is prose in the public domain, source code and notes of this project
(`calibration.txt`). It is never to be evaluated on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import BadRequest
from quire.text.tokenizer import Tokenizer

BUILT_IN = Path(__file__).with_name("calibration.txt")
MAX_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is read: at most `samples` sequences of `length` tokens."""

    samples: int
    length: int
    file: Path | None = None

    def text(self) -> str:
        path = self.file or BUILT_IN
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadRequest(f"cannot read {path}: {error.strerror}", param="calibration") from None
        if len(data) > MAX_BYTES:
            raise BadRequest(
                f"{path} has {len(data)} bytes, calibration takes at most {MAX_BYTES}",
                param="calibration",
            )
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise BadRequest(
                f"{path} is not UTF-8 text, which calibration needs", param="calibration"
            ) from None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()

    def sequences(self, tokenizer: Tokenizer) -> Tensor:
        """[sequences, length] int64, at even distances over the text. Each starts as prompts do.
        Raises BadRequest where the text is shorter than one."""
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        begin = begin if tokenizer.encode("a")[: len(begin)] == begin else []
        ids = tokenizer.encode(self.text(), add_special_tokens=False)
        each = self.length - len(begin)
        if each < 1 or len(ids) < each:
            raise BadRequest(
                f"the calibration text has {len(ids)} tokens, fewer than one sequence of"
                f" {self.length}; give more text (--calibration FILE) or a smaller --length",
                param="calibration",
            )
        count = min(self.samples, len(ids) // each)
        step = (len(ids) - each) // max(1, count - 1)
        starts = [i * step for i in range(count)]
        return torch.tensor([begin + ids[start : start + each] for start in starts])
