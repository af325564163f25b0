"""Encoding: what `tokenizer(text)` returns, a mapping as Hugging Face tokenizers give it."""

from __future__ import annotations

Ids = list[int] | list[list[int]]


class Encoding(dict[str, Ids]):
    """Ids and mask of one text, or a list of each for several texts.

    >>> Encoding([5, 6], [1, 1])["input_ids"]
    [5, 6]
    """

    def __init__(self, input_ids: Ids, attention_mask: Ids) -> None:
        super().__init__(input_ids=input_ids, attention_mask=attention_mask)

    @property
    def input_ids(self) -> Ids:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Ids:
        return self["attention_mask"]
