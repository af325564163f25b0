"""POST /v1/embeddings: the served model's own hidden states, pooled over the text."""

from __future__ import annotations

import base64
import math
import struct
from contextlib import AsyncExitStack
from typing import Any

from quire.errors import BadRequest
from quire.params import SamplingParams
from quire.server import sse
from quire.server.completions import cache_salt, check_length, items_of
from quire.server.fields import EmbeddingFields, decode
from quire.server.generation import Generation, Job
from quire.server.http import HttpRequest, Reply
from quire.server.merge import all_whole
from quire.server.server import Server

POOLINGS = ("mean", "last")
AT_ONCE = 64  # inputs in the engine at a time: a long list waits here, not in the shared queue


async def embeddings(request: HttpRequest, server: Server) -> Reply:
    fields = decode(request, EmbeddingFields)
    model = server.check_model(fields.model)
    _check(fields, server)
    params = SamplingParams(max_tokens=1, pooling=fields.pooling or "mean", detokenize=False)
    salt = cache_salt(request, server, None)
    vectors: list[list[float]] = []
    num_tokens = 0
    items = _inputs(fields, server)
    for start in range(0, len(items), AT_ONCE):
        async with AsyncExitStack() as stack:
            generations = []
            for item in items[start : start + AT_ONCE]:
                ids = await server.encode(item, "input") if isinstance(item, str) else item
                check_length(ids, server, "input")
                prompt = {"prompt_token_ids": ids, "cache_salt": salt}
                job = Job(prompt, params, fields.priority or 0)
                generation = Generation(server, request, job)
                generations.append(await stack.enter_async_context(generation))
            await all_whole(generations)
            num_tokens += sum(g.num_prompt for g in generations)
            vectors += [_finished(g.pooled or [], fields) for g in generations]
    return Reply(sse.encode(_body(vectors, fields, model, num_tokens)))


def _check(fields: EmbeddingFields, server: Server) -> None:
    if fields.pooling is not None and fields.pooling not in POOLINGS:
        raise BadRequest(f"got pooling={fields.pooling[:40]!r}, want mean or last", param="pooling")
    if fields.encoding_format not in (None, "float", "base64"):
        raise BadRequest(
            f"got encoding_format={fields.encoding_format[:40]!r}, want float or base64",
            param="encoding_format",
        )
    size = server.hello.hidden_size
    if fields.dimensions is not None and not 1 <= fields.dimensions <= size:
        raise BadRequest(
            f"got dimensions={fields.dimensions}, want 1 to {size}", param="dimensions"
        )


def _inputs(fields: EmbeddingFields, server: Server) -> list[Any]:
    given = items_of(fields.input, "input")
    if len(given) > server.limits.max_inputs:
        raise BadRequest(
            f"got {len(given)} inputs, want at most {server.limits.max_inputs}", param="input"
        )
    return given


def _finished(vector: list[float], fields: EmbeddingFields) -> list[float]:
    """Cut to the dimensions wanted, and scaled to length 1 unless told not to."""
    vector = vector[: fields.dimensions or len(vector)]
    if fields.normalize is False:
        return vector
    length = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
    return [x / length for x in vector]


def _body(
    vectors: list[list[float]], fields: EmbeddingFields, model: str, num_tokens: int
) -> dict[str, Any]:
    as_base64 = fields.encoding_format == "base64"
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": i, "embedding": _packed(v) if as_base64 else v}
            for i, v in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _packed(vector: list[float]) -> str:
    """Little-endian float32, which OpenAI's own clients ask for."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
