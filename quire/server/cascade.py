"""Gate: the small model's answer is held back until its own logprobs say whether it will do.

The first tokens of an answer are judged, or all of a shorter one: by their mean logprob and by the
least likely of them. An answer that will do goes on as if it had never been held. Else `Escalated`
is raised before the client has heard anything, and the large model answers in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.params import SamplingParams
from quire.step import TokenEvent

if TYPE_CHECKING:
    from quire.server.generation import Generation


class Escalated(Exception):
    """The answer will not do; the message says by which measure."""


@dataclass(frozen=True, slots=True)
class Gate:
    tokens: int  # of each answer that are judged
    mean_logprob: float
    min_logprob: float

    def watched(self, params: SamplingParams) -> SamplingParams:
        """With the logprobs of drawn tokens, which change nothing else."""
        return params if params.logprobs is not None else params.with_(logprobs=0)

    async def hold(self, generation: Generation) -> None:
        """Returns when the answer may be read, from its beginning. Raises Escalated."""
        if generation.looked is not None and generation.looked.is_given:
            return  # by the cache, whose entries passed this gate
        tap = generation.tap
        held: list[TokenEvent] = []
        logprobs: dict[int, list[float]] = {request.id: [] for request in generation.requests}
        waiting = set(logprobs)
        while waiting:
            events = await tap.take()
            held += events
            for event in events:
                found = logprobs[event.request_id]
                found += [record.logprob for record in event.logprobs]
                if event.finish is not None or len(found) >= self.tokens:
                    waiting.discard(event.request_id)
        if not any(event.finish == "error" for event in held):  # which its reader tells
            for found in logprobs.values():
                self._judge(found[: self.tokens])
        tap.events[:0] = held

    def _judge(self, logprobs: list[float]) -> None:
        if not logprobs:
            return
        mean, least = sum(logprobs) / len(logprobs), min(logprobs)
        if mean < self.mean_logprob:
            raise Escalated(f"mean_logprob={mean:.2f}<{self.mean_logprob:.2f}")
        if least < self.min_logprob:
            raise Escalated(f"min_logprob={least:.2f}<{self.min_logprob:.2f}")
