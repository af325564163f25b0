"""POST /v1/generate: the plainest way in. A prompt, a few knobs, text and timings out."""

from __future__ import annotations

from collections.abc import AsyncIterator

from quire.server import sse
from quire.server.completions import cache_salt, check_length
from quire.server.fields import GenerateFields, SamplingFields, decode
from quire.server.generation import Generation, Job
from quire.server.http import EventStream, HttpRequest, Reply
from quire.server.sampling import sampling_params
from quire.server.server import Server
from quire.server.usage import usage_of

DEFAULT_MAX_TOKENS = 128
_PASSED = ("temperature", "top_p", "top_k", "seed", "stop")


async def generate(request: HttpRequest, server: Server) -> Reply | EventStream:
    fields = decode(request, GenerateFields)
    values = {k: v for k in _PASSED if (v := getattr(fields, k)) is not None}
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    params = sampling_params(
        SamplingFields(**values), server.settings, max_tokens=max_tokens, logprobs=None
    )
    ids = await server.encode(fields.prompt, "prompt")
    check_length(ids, server, "prompt")
    salt = cache_salt(request, server, None)
    prompt = {"prompt": fields.prompt, "prompt_token_ids": ids, "cache_salt": salt}
    job = Job(prompt, params, fields.priority or 0)
    if fields.stream:
        return EventStream(_chunks(Generation(server, request, job)), sse.failure)
    async with Generation(server, request, job) as generation:
        output = (await generation.whole()).outputs[0]
        return Reply(
            sse.encode(
                {
                    "id": request.id,
                    "text": output.text,
                    "finish_reason": output.finish_reason,
                    "usage": usage_of(generation),
                    "timings": generation.timings(),
                }
            )
        )


async def _chunks(generation: Generation) -> AsyncIterator[bytes]:
    async with generation:
        async for pieces in generation.pieces():
            if not pieces:
                yield sse.PING
            for piece in pieces:
                yield sse.data({"text": piece.text, "finish_reason": piece.finish_reason})
        yield sse.data({"usage": usage_of(generation), "timings": generation.timings()})
        yield sse.DONE
