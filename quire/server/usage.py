"""Usage: what a request cost, in OpenAI's shape; and logprobs in both of its shapes.

A token that is not whole characters by itself is written as its bytes, so that two such tokens
never look alike and a client can put the text together again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.outputs import Logprob
from quire.server.generation import Generation
from quire.text.detokenize import Detokenizer
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0  # what OpenAI writes for minus infinity

Record = Mapping[int, Logprob]  # the chosen token first, then the most likely ones


def usage_of(
    *generations: Generation, num_output: int | None = None, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """`num_output`: the tokens sent so far, where they are fewer than those generated."""
    prompt = sum(g.num_prompt for g in generations)
    output = sum(g.num_output for g in generations) if num_output is None else num_output
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(g.num_cached for g in generations)},
    }
    details: dict[str, int] = {}
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = reasoning_tokens
    accepted, rejected = map(sum, zip(*(g.num_predicted for g in generations), strict=True))
    if accepted or rejected:
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = rejected
    if details:
        usage["completion_tokens_details"] = details
    return usage


# ------------------------------------------------------------ tokens


def _token_bytes(id: int, found: Logprob, tokenizer: Tokenizer | None) -> bytes:
    if tokenizer is not None and tokenizer.is_byte_level:
        return tokenizer.token_bytes(id)
    return (found.decoded_token or "").encode("utf-8", "replace")


def _escaped(spelling: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in spelling)


def _is_text(spelling: bytes) -> bool:
    try:
        spelling.decode()
    except UnicodeDecodeError:
        return False
    return True


def _most_likely(record: Record, count: int) -> list[tuple[int, Logprob]]:
    """The chosen token comes first in a record; the rest are in order of rank."""
    ranked = sorted(record.items(), key=lambda item: item[1].rank or 0)
    return ranked[:count]


# ------------------------------------------------------------ chat


def chat_logprobs(
    records: Sequence[Record], num_top: int, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = []
    for record in records:
        id, found = next(iter(record.items()))
        tops = [_token(i, one, tokenizer) for i, one in _most_likely(record, num_top)]
        content.append({**_token(id, found, tokenizer), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _token(id: int, found: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    spelling = _token_bytes(id, found, tokenizer)
    return {
        "token": (found.decoded_token or "") if _is_text(spelling) else _escaped(spelling),
        "logprob": max(found.logprob, LOWEST),
        "bytes": list(spelling),
    }


# ------------------------------------------------------------ plain completions


class CompletionLogprobs:
    """`choices[].logprobs` of one plain completion, in as many pieces as it is sent.

    `text_offset` counts characters from where the shown text begins: at the prompt when it is
    echoed, else at the answer. A character spelled by several tokens stands where it begins.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_top: int, prompt_ids: Sequence[int], skips_special: bool
    ) -> None:
        """`prompt_ids`: what stands before the shown text; none when the prompt is echoed."""
        self._tokenizer, self._num_top = tokenizer, num_top
        self._hidden = tokenizer.special_ids if skips_special else frozenset()
        self._text = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=False)
        self._offset = 0

    def prompt(
        self, ids: Sequence[int], records: Sequence[Record | None], text: str
    ) -> dict[str, Any]:
        """The echoed prompt. What the tokenizer put in front of it is a token without text."""
        piece = _empty()
        for id, record in zip(ids, records, strict=True):
            shown = self._tokenizer.decode([id], skip_special_tokens=False)
            is_special = id in self._tokenizer.special_ids
            is_hidden = is_special and not text.startswith(shown, self._offset)
            self._add(piece, id, record or {}, is_hidden)
        return piece

    def answer(self, records: Sequence[Record]) -> dict[str, Any]:
        piece = _empty()
        for record in records:
            id = next(iter(record))
            self._add(piece, id, record, id in self._hidden)
        return piece

    def _add(self, piece: dict[str, Any], id: int, record: Record, is_hidden: bool) -> None:
        chosen = record.get(id)  # None: a prompt's first token was never predicted
        name = self._name(id, chosen)
        piece["tokens"].append(name)
        piece["token_logprobs"].append(max(chosen.logprob, LOWEST) if chosen else None)
        piece["text_offset"].append(self._offset)
        tops: dict[str, float] | None = None
        if chosen is not None:
            # As OpenAI does: the chosen token is there even when it is not among the likely ones.
            named = [*_most_likely(record, self._num_top), (id, chosen)]
            tops = {self._name(i, one): max(one.logprob, LOWEST) for i, one in named}
        piece["top_logprobs"].append(tops)
        if not is_hidden:
            self._offset += len(self._text.push([id]))

    def _name(self, id: int, found: Logprob | None) -> str:
        if found is None:
            found = Logprob(0.0, None, self._tokenizer.decode([id], skip_special_tokens=False))
        spelling = _token_bytes(id, found, self._tokenizer)
        text = found.decoded_token or ""
        return text if _is_text(spelling) else f"bytes:{_escaped(spelling)}"


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
