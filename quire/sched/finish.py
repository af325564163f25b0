"""When a request is done: end of sequence, a stop token, length. Stop strings are in `text/`."""

from __future__ import annotations

from typing import NamedTuple

from quire.request import Request


class Finish(NamedTuple):
    reason: str
    stop_reason: int | None = None


def finish_of(request: Request, max_model_len: int) -> Finish | None:
    """Judge a request by its newest output token."""
    tokens, params = request.tokens, request.params
    num_output = len(tokens) - request.num_prompt
    if num_output >= params.min_tokens:
        token = tokens[-1]
        if token in request.eos_ids and not params.ignore_eos:
            return Finish("stop")
        if params.stop_token_ids and token in params.stop_token_ids:
            return Finish("stop", token)
    if num_output >= request.max_tokens or len(tokens) >= max_model_len:
        return Finish("length")
    return None
