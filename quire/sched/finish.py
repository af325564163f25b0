"""When a request is done: end of sequence, a stop token, length. Stop strings are in `text/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.request import Request


class Finish(NamedTuple):
    reason: str
    stop_reason: int | None = None


def finish_of(request: Request, max_model_len: int) -> Finish | None:
    """Judge a request by its newest output token."""
    return _judge(request, request.tokens[-1], len(request.tokens), max_model_len)


def up_to_finish(request: Request, tokens: Sequence[int], max_model_len: int) -> Sequence[int]:
    """Of several tokens that are to be appended, those up to the first that ends the request."""
    known = len(request.tokens)
    for count, token in enumerate(tokens, 1):
        if _judge(request, token, known + count, max_model_len) is not None:
            return tokens[:count]
    return tokens


def _judge(request: Request, token: int, num_tokens: int, max_model_len: int) -> Finish | None:
    """As if `token` were the newest of `num_tokens`."""
    params = request.params
    num_output = num_tokens - request.num_prompt
    if num_output >= params.min_tokens:
        if token in request.eos_ids and not params.ignore_eos:
            return Finish("stop")
        if params.stop_token_ids and token in params.stop_token_ids:
            return Finish("stop", token)
    if num_output >= request.max_tokens or num_tokens >= max_model_len:
        return Finish("length")
    return None
