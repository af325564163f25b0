"""The forms of a prompt, as types; names follow vLLM. Plain dicts of the same shape do as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]  # prompts share cached prefixes only with those of the same salt


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # the same as text, given back with the output
    cache_salt: NotRequired[str]
