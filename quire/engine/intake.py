"""Intake: prompts and params as callers write them -> checked Requests.

Everything that can be wrong with a request is found here, before the engine knows of it.
"""

from __future__ import annotations

import itertools
import operator
import secrets
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from quire.errors import BadRequest
from quire.grammar.spec import PARAM, check_limits, require_llguidance
from quire.params import SamplingParams
from quire.request import Request
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# Keys of vLLM's prompts that say nothing when they are empty.
MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")

SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that distinct requests get distinct seeds


@dataclass(frozen=True, slots=True)
class Limits:
    max_model_len: int
    vocab_size: int


class Intake:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: Limits,
        eos_ids: Sequence[int],
        seed: int | None,
        ids: Iterator[int] | None = None,
    ) -> None:
        """`seed` makes the draws of requests without one repeat; None: they never do."""
        self.tokenizer, self.limits, self.seed = tokenizer, limits, seed
        # A tokenizer may know more ids than the model has logits for.
        self.eos_ids = frozenset(i for i in eos_ids if 0 <= i < limits.vocab_size)
        self._ids = ids or itertools.count(1)

    def requests(
        self, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> tuple[str | None, list[Request]]:
        """(text of the prompt if known, one request for each of n answers)."""
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
            raise BadRequest(
                f"got priority={priority!r}, want a whole number within 2**31", param="priority"
            )
        text, given, salt = self._read(prompt)
        if params.truncate_prompt_tokens is not None:
            given = _last(given, params.truncate_prompt_tokens, self.limits.max_model_len - 1)
        ids = self._checked_ids(given)
        params = self._check_params(params)
        room = self.limits.max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        made: list[Request] = []
        arrival = time.monotonic()
        for index in range(params.n):
            number = next(self._ids)
            base = self._seed(number) if params.seed is None else params.seed + index
            own = params if index == 0 else params.with_(prompt_logprobs=None)
            made.append(
                Request.new(
                    number,
                    ids,
                    own if own.seed is None else own.with_(seed=None),
                    max_tokens=max_tokens,
                    eos_ids=self.eos_ids,
                    priority=priority,
                    cache_salt=salt,
                    seed=_signed64(base),
                    arrival=arrival,
                )
            )
        made[0].children = made[1:]
        return text, made

    def _seed(self, number: int) -> int:
        return secrets.randbits(64) if self.seed is None else self.seed * SEED_STRIDE + number

    def _read(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str]:
        salt = ""
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            salt = str(prompt.get("cache_salt") or "")
            if "prompt_token_ids" in prompt:
                text = prompt.get("prompt")
                return text, _whole_numbers(prompt["prompt_token_ids"]), salt
            if "prompt" not in prompt:
                raise BadRequest(
                    f"got a prompt with keys {sorted(prompt)}, want 'prompt' or 'prompt_token_ids'"
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise BadRequest(
                    "got a text prompt, but the tokenizer was not loaded"
                    " (skip_tokenizer_init=True); pass {'prompt_token_ids': [...]}"
                )
            return prompt, self.tokenizer.encode(prompt), salt
        return None, _whole_numbers(prompt), salt

    def _checked_ids(self, ids: Sequence[int]) -> array[int]:
        """The prompt's own copy. Looked through as an array: prompts are long."""
        limits = self.limits
        if not ids:
            raise BadRequest("the prompt has no tokens; give at least one")
        if len(ids) >= limits.max_model_len:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens, but max_model_len={limits.max_model_len} leaves"
                f" room for {limits.max_model_len - 1}; shorten it or raise max_model_len"
            )
        try:
            tokens = array("i", ids)
        except OverflowError:
            self._refuse_ids(ids)
        values = np.frombuffer(tokens, np.int32)
        if values.min() < 0 or values.max() >= limits.vocab_size:
            self._refuse_ids(ids)
        return tokens

    def _refuse_ids(self, ids: Sequence[int]) -> NoReturn:
        bad = next(i for i in ids if not 0 <= i < self.limits.vocab_size)
        raise BadRequest(
            f"got token id {bad} in the prompt, want 0 <= id < {self.limits.vocab_size}",
            param="prompt_token_ids",
        )

    def _check_params(self, params: SamplingParams) -> SamplingParams:
        vocab = self.limits.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            bad = next((i for i in getattr(params, name) or () if i >= vocab), None)
            if bad is not None:
                raise BadRequest(f"got {name} with token id {bad}, want ids < {vocab}", param=name)
        if params.stop_strings and self.tokenizer is None:
            raise BadRequest("stop strings need a tokenizer; use stop_token_ids", param="stop")
        if params.structured_outputs is not None:
            if self.tokenizer is None:
                raise BadRequest("structured outputs need a tokenizer", param=PARAM)
            require_llguidance()
            check_limits(params.structured_outputs)
        if params.bad_words:
            if self.tokenizer is None:
                raise BadRequest("bad_words needs a tokenizer", param="bad_words")
            words = _bad_word_ids(params.bad_words, self.tokenizer)
            params = params.with_(bad_word_ids=tuple(w for w in words if max(w) < vocab))
        if params.allowed_token_ids is not None:
            self._check_allowed(params)
        return params

    def _check_allowed(self, params: SamplingParams) -> None:
        """What is allowed must not be banned altogether: then there would be nothing to draw."""
        left = set(params.allowed_token_ids or ())
        left -= {word[0] for word in params.bad_word_ids if len(word) == 1}
        if params.min_tokens:
            left -= {*self.eos_ids, *(params.stop_token_ids or ())}
        if not left:
            raise BadRequest(
                "got allowed_token_ids of which bad_words or min_tokens leave none;"
                " allow at least one more",
                param="allowed_token_ids",
            )


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for key in prompt:
        if key in PROMPT_KEYS or (key in MEDIA_KEYS and not prompt[key]):
            continue
        if key in MEDIA_KEYS:
            raise BadRequest(
                f"got a prompt with {key!r}: only text is read here, no images, audio or video;"
                " send what matters as text",
                param=key,
            )
        raise BadRequest(
            f"got a prompt with the key {key!r}, want only {', '.join(PROMPT_KEYS)}", param=str(key)
        )


def _last(ids: Sequence[int], count: int, most: int) -> Sequence[int]:
    """The end of a prompt; -1: as much as the context has room for."""
    return ids[-(most if count == -1 else count) :]


def _whole_numbers(ids: Any) -> Sequence[int]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        ids = ids.tolist() if hasattr(ids, "tolist") else None
    # Their types themselves: True and False are ints too.
    if not isinstance(ids, Sequence) or operator.countOf(map(type, ids), int) != len(ids):
        raise BadRequest("prompt_token_ids must be a list of whole numbers")
    return ids if isinstance(ids, list) else list(ids)  # an array would take a bytearray's memory


def _bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelt at the start of a text and after a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        for spelling in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if ids and ids not in found:
                found.append(ids)
    return tuple(found)


def _signed64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
