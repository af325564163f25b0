"""Prompts that come back as numbers: the part that embeddings, scores and classes have in common.

A request may bring thousands of texts. They are tokenised as there is room for them in the engine
(see `merge.py`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from quire.errors import BadRequest
from quire.params import SamplingParams
from quire.server.completions import cache_salt, check_length
from quire.server.generation import Generation, Job
from quire.server.http import HttpRequest
from quire.server.merge import all_whole
from quire.server.server import Server

EMBEDDINGS = ("mean", "last")


class Pooled(NamedTuple):
    vectors: list[list[float]]  # one for each prompt
    num_tokens: int

    def usage(self) -> dict[str, Any]:
        """As vLLM tells it."""
        return {
            "prompt_tokens": self.num_tokens,
            "total_tokens": self.num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }


def listing(
    name: str, request: HttpRequest, model: str, data: list[dict[str, Any]], pooled: Pooled
) -> dict[str, Any]:
    """The body around one record for each prompt or pair; `name` begins its id."""
    return {
        "id": f"{name}-{request.id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": pooled.usage(),
    }


class PoolJob(NamedTuple):
    pooling: str
    priority: int = 0
    max_tokens: int | None = None  # prompts are cut to so many; None: too long is an error
    param: str = "input"  # where the prompts came from, for messages


async def pool(
    request: HttpRequest, server: Server, items: Sequence[str | list[int]], job: PoolJob
) -> Pooled:
    """Texts or token ids -> what the model makes of each. Raises Problem or BadRequest."""
    check_count(len(items), server, job.param)
    params = SamplingParams(max_tokens=1, pooling=job.pooling, detokenize=False)
    salt = cache_salt(request, server, None)

    async def generations() -> AsyncGenerator[Generation, None]:
        for item in items:
            ids = await server.encode(item, job.param) if isinstance(item, str) else item
            ids = _cut(ids, job.max_tokens, server)
            check_length(ids, server, job.param)
            prompt = {"prompt_token_ids": ids, "cache_salt": salt}
            yield Generation(server, request, Job(prompt, params, job.priority))

    found = await all_whole(generations(), lambda _, made: (made.pooled or [], made.num_prompt))
    return Pooled([vector for vector, _ in found], sum(size for _, size in found))


def check_count(num_inputs: int, server: Server, param: str) -> None:
    most = server.limits.max_inputs
    if num_inputs > most:
        raise BadRequest(f"got {num_inputs} inputs, want at most {most}", param=param)


def _cut(ids: list[int], most: int | None, server: Server) -> list[int]:
    if most is None:
        return ids
    if most != -1 and most < 1:
        raise BadRequest(
            f"got truncate_prompt_tokens={most}, want a number >= 1, or -1 for what fits",
            param="truncate_prompt_tokens",
        )
    return ids[: server.max_model_len - 1 if most == -1 else most]


def check_pooling(pooling: str | None) -> str:
    """How embeddings are made of hidden states; the default where nothing was said."""
    if pooling is not None and pooling not in EMBEDDINGS:
        want = " or ".join(EMBEDDINGS)
        raise BadRequest(
            f"got pooling={pooling[:40]!r}, want {want}; the first token of a decoder has seen"
            " nothing but itself",
            param="pooling",
        )
    return pooling or EMBEDDINGS[0]
