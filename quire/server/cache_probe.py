"""gap_of: one prefill of a cached answer behind a new prompt, and what the model thinks of it.

The prefill gives the model's likeliest token at every place of the answer. Where all of them are
the answer's own, the model would write exactly this: the gap is 0, and that is a proof, for a
prefill has the same bits as writing token by token. Else the gap is the most by which another
token was ahead, in nats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.answers.entries import Entry
from quire.params import MAX_LOGPROBS, SamplingParams
from quire.step import TokenLogprobs

if TYPE_CHECKING:
    from quire.server.generation import Generation

FAR = 60.0  # a token that is not even among the likely ones
NUM_TOP = 20


async def gap_of(entry: Entry, generation: Generation) -> float | None:
    """None where the answer cannot be judged: it does not fit, or there was no room in time."""
    request = generation.requests[0]
    said, end = _split(entry)
    is_cut = entry.finish == "length" and len(said) != request.max_tokens
    if not said or is_cut or len(entry.tokens) > request.max_tokens:
        return None
    prompt = request.tokens[: request.num_prompt].tolist()
    if len(prompt) + len(said) >= generation.server.max_model_len:
        return None
    with suppress(TimeoutError):
        async with asyncio.timeout(generation.server.limits.queue_timeout_s):
            records = await _prefill([*prompt, *said], generation)
            return _gap(records[len(prompt) - 1 :], said, end)
    return None


def _split(entry: Entry) -> tuple[tuple[int, ...], int | None]:
    """The answer's text, and the token that ended it, if one did."""
    if entry.finish == "stop" and entry.tokens:
        return entry.tokens[:-1], entry.tokens[-1]
    return entry.tokens, None


async def _prefill(tokens: list[int], generation: Generation) -> list[TokenLogprobs]:
    """What is known at every place: of the token that follows, and of the one that would."""
    server, request = generation.server, generation.requests[0]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=1,
        logprobs=min(NUM_TOP, MAX_LOGPROBS),
        detokenize=False,
    )
    prompt = {"prompt_token_ids": tokens, "cache_salt": request.cache_salt}
    _, (probe,) = server.intake.requests(prompt, params, request.priority)
    probe.tenant, probe.weight = request.tenant, request.weight
    probe.adapter_name = request.adapter_name
    tap = server.link.open([probe])
    records: dict[int, TokenLogprobs] = {}
    try:
        while True:
            for event in await tap.take():
                records |= dict(enumerate(event.prompt_logprobs, event.prompt_start))
                if event.logprobs:
                    records[len(tokens) - 1] = event.logprobs[0]
                if event.finish is not None:
                    return [records[at] for at in range(len(tokens)) if at in records]
    finally:
        server.link.close([probe.id])


def _gap(records: Sequence[TokenLogprobs], said: Sequence[int], end: int | None) -> float | None:
    """`records[i]`: what stands at place i of the answer; one more for its end."""
    if len(records) != len(said) + 1:
        return None
    gaps = [
        0.0 if record.top_tokens[0] == token else max(record.top_logprobs[0] - record.logprob, 1e-6)
        for record, token in zip(records, said, strict=False)
    ]
    if end is not None:
        gaps.append(_gap_of_end(records[-1], end))
    return max(gaps)


def _gap_of_end(record: TokenLogprobs, end: int) -> float:
    if record.token == end:
        return 0.0
    tops = dict(zip(record.top_tokens, record.top_logprobs, strict=True))
    return max(record.logprob - tops[end], 1e-6) if end in tops else FAR
