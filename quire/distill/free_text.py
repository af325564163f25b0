"""Free text: answers to no prompt, which begin with one token drawn from all that the model knows.

Prompts lead a model through a narrow part of what it can say. Begun anywhere and drawn at a
temperature of 1, its texts are spread like those that it learned from, so far as it learned them.
They go on past an end, as texts that are learned from do, so none is short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.distill.recipe import Corpus
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FreeText:
    before: tuple[int, ...]  # what the tokenizer puts before every text
    tokens: tuple[int, ...]  # that are text
    share: float  # of all answers
    seed: int

    @staticmethod
    def of(tokenizer: Tokenizer, corpus: Corpus) -> FreeText:
        before, tokens = _before(tokenizer), _tokens_of_text(tokenizer)
        return FreeText(before, tokens, corpus.free_share, corpus.seed)

    def has(self, number: int) -> bool:
        """Whether the answer of this number is one: they lie among the others evenly."""
        return int((number + 1) * self.share) > int(number * self.share)

    def begin(self, number: int) -> list[int]:
        """The same for the same number, whenever it is asked for."""
        return [*self.before, random.Random(f"{self.seed} {number}").choice(self.tokens)]


def _before(tokenizer: Tokenizer) -> tuple[int, ...]:
    begin = tokenizer.bos_id
    return (begin,) if begin is not None and tokenizer.encode("a")[:1] == [begin] else ()


def _tokens_of_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Without those that stand for something else, or for a piece of a character."""
    said = ((id, tokenizer.decode([id])) for id in range(len(tokenizer)))
    return tuple(id for id, text in said if text and "\ufffd" not in text)
