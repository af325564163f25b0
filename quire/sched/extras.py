"""What few requests have beside tokens: logprobs, prompt logprobs, embeddings, trees of drafts."""

from __future__ import annotations

from collections.abc import Container

from quire.request import RequestId
from quire.step import StepPlan, StepResult, TokenEvent


def with_extras(
    events: list[TokenEvent], plan: StepPlan, result: StepResult, running: Container[RequestId]
) -> list[TokenEvent]:
    """Attach them to their events; works that only read a prompt get an event of their own."""
    extras = (result.logprobs, result.prompt_logprobs, result.pooled, result.branches)
    if all(extra is None for extra in extras):
        return events
    by_id = {event.request_id: event for event in events}
    for index, branch in (result.branches or {}).items():
        id = plan.works[index].request_id
        if id in by_id:
            num = by_id[id].num_accepted
            by_id[id] = by_id[id]._replace(branch=tuple(branch[:num]))
    for index, embedding in (result.pooled or {}).items():
        id = plan.works[index].request_id
        if id in by_id:  # the token drawn along with it means nothing
            by_id[id] = by_id[id]._replace(tokens=(), pooled=embedding)
    for index, work in enumerate(plan.works):
        id = work.request_id
        chosen = result.logprobs[index] if result.logprobs is not None else ()
        prompt = (result.prompt_logprobs or {}).get(index, ())
        if (chosen or prompt) and (id in by_id or id in running):
            event = by_id.get(id, TokenEvent(id, ()))
            # Tokens after one that ended the request were never drawn.
            by_id[id] = event._replace(
                logprobs=chosen[: len(event.tokens)],
                prompt_logprobs=prompt,
                prompt_start=work.start,
            )
    return list(by_id.values())
