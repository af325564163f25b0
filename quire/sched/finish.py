"""When a request is done: end of sequence, a stop token, length. Stop strings are in `text/`."""

from __future__ import annotations

from typing import NamedTuple

from quire.request import Request


class Finish(NamedTuple):
    reason: str
    stop_reason: int | None = None


def finish_of(request: Request, max_model_len: int) -> Finish | None:
    """Judge a request by its newest output token."""
    token = request.tokens[-1]
    params = request.params
    if request.num_output >= params.min_tokens:
        if token in request.eos_ids and not params.ignore_eos:
            return Finish("stop")
        if params.stop_token_ids and token in params.stop_token_ids:
            return Finish("stop", token)
    if request.num_output >= request.max_tokens or len(request.tokens) >= max_model_len:
        return Finish("length")
    return None


def may_continue(request: Request, max_model_len: int) -> bool:
    """Whether one more token could be wanted, counting those still in flight."""
    return (
        request.num_output + request.num_pending < request.max_tokens
        and request.num_known < max_model_len
    )
