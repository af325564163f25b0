"""Answers in the making: token events -> text, logprobs and finished outputs.

Strings live here and nowhere deeper. A stop string found in the text is the one arrow back into
the engine: `take` returns True when the request should be aborted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from quire.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamEvent
from quire.request import Request
from quire.step import TokenEvent, TokenLogprobs
from quire.text.detokenize import PROMPT_TAIL, Detokenizer
from quire.text.stops import StopMatcher
from quire.text.tokenizer import Tokenizer


class Answer:
    """One completion of one request."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request, self.tokenizer = request, tokenizer
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self.num_drafted = self.num_accepted = 0
        self.accepted_at: list[int] = []  # by places ahead
        self._text: list[str] = []
        self._detokenizer: Detokenizer | None = None
        self._stops: StopMatcher | None = None
        if tokenizer is not None and params.detokenize:
            end = request.num_prompt
            tail = request.tokens[max(0, end - PROMPT_TAIL) : end].tolist()
            self._detokenizer = Detokenizer(tokenizer, tail, params.skip_special_tokens)
            if params.stop_strings:
                self._stops = StopMatcher(params.stop_strings, params.include_stop_str_in_output)

    def take(self, event: TokenEvent, is_watched: bool) -> tuple[StreamEvent | None, bool]:
        """Fold an event in: (what to show if somebody watches, whether a stop string ended it)."""
        self.num_drafted += event.num_drafted
        self.num_accepted += event.num_accepted
        self.accepted_at += [0] * (event.num_accepted - len(self.accepted_at))
        for place in range(event.num_accepted):
            self.accepted_at[place] += 1
        if self._stops is not None and len(event.tokens) > 1:
            return self._take_each(event, is_watched)
        return self._take(event, is_watched)

    def _take_each(self, event: TokenEvent, is_watched: bool) -> tuple[StreamEvent | None, bool]:
        """A token at a time: the stop string may end inside a run of accepted drafts."""
        pieces: list[StreamEvent] = []
        last = len(event.tokens) - 1
        for i, token in enumerate(event.tokens):
            part = event._replace(tokens=(token,), logprobs=event.logprobs[i : i + 1])
            if i < last:
                part = part._replace(finish=None, stop_reason=None, error=None)
            piece, stop = self._take(part, is_watched)
            pieces += [] if piece is None else [piece]
            if stop:
                break
        if not pieces:
            return None, stop
        ids = [token for piece in pieces for token in piece.token_ids]
        text = "".join(piece.text for piece in pieces)
        return replace(pieces[-1], text=text, token_ids=ids), stop

    def _take(self, event: TokenEvent, is_watched: bool) -> tuple[StreamEvent | None, bool]:
        output = self.output
        if output.finish_reason is not None:
            return None, False  # the stop string was found before this event was settled
        output.token_ids.extend(event.tokens)
        for record in event.logprobs:
            assert output.logprobs is not None and output.cumulative_logprob is not None
            output.logprobs.append(logprob_dict(record, self.tokenizer))
            output.cumulative_logprob += record.logprob
        # As in vLLM the token that stopped it is in token_ids, but not in the text.
        hidden = event.finish == "stop" and not self.request.params.include_stop_str_in_output
        delta, matched = self._push(event.tokens[:-1] if hidden else event.tokens)
        if matched is not None:
            output.finish_reason, output.stop_reason = "stop", matched
        elif event.finish is not None:
            delta += self._flush()
            output.finish_reason = event.finish
            output.stop_reason = event.error if event.error is not None else event.stop_reason
        if delta:
            self._text.append(delta)
        if output.finish_reason is not None:
            output.text = "".join(self._text)
        if not is_watched:
            return None, matched is not None
        shown = StreamEvent(
            delta, list(event.tokens), output.index, output.finish_reason, output.stop_reason
        )
        return shown, matched is not None

    def _push(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        delta = self._detokenizer.push(tokens)
        if self._stops is None:
            return delta, None
        if len(self.output.token_ids) <= self.request.params.min_tokens:
            return delta, None
        return self._stops.push(delta)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        rest = self._detokenizer.flush()
        if self._stops is not None:
            emitted, _ = self._stops.push(rest)
            rest = emitted + self._stops.flush()
        return rest


class Conversation:
    """A prompt and its n answers on their way to a RequestOutput."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id, self.prompt, self.tokenizer = request_id, prompt, tokenizer
        self.answers = {r.id: Answer(r, i, tokenizer) for i, r in enumerate(requests)}
        self.inbox: deque[StreamEvent] | None = None  # set by whoever reads the pieces
        self.leader = requests[0]
        self.embedding: list[float] = []  # of the prompt, for a request that pools
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self.leader.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.leader.num_prompt

    @property
    def finished(self) -> bool:
        return all(answer.output.finished for answer in self.answers.values())

    def take(self, event: TokenEvent) -> bool:
        """Fold an event in; True when a stop string was found and the request should end."""
        if self.prompt_logprobs is not None:
            for offset, record in enumerate(event.prompt_logprobs, event.prompt_start + 1):
                self.prompt_logprobs[offset] = logprob_dict(record, self.tokenizer)
        if event.pooled:
            self.embedding = list(event.pooled)
        if not event.tokens and event.finish is None:
            return False
        inbox = self.inbox
        shown, stop = self.answers[event.request_id].take(event, inbox is not None)
        if inbox is not None and shown is not None:
            inbox.append(shown)
        return stop

    def result(self) -> RequestOutput:
        timing, answers = self.leader.timing, self.answers.values()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.leader.tokens[: self.leader.num_prompt].tolist(),
            outputs=[answer.output for answer in answers],
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=RequestMetrics(
                timing.arrival,
                timing.scheduled,
                timing.first_token,
                timing.last_token,
                sum(a.request.num_preempted for a in answers),
                sum(a.num_drafted for a in answers),
                sum(a.num_accepted for a in answers),
                tuple(map(sum, zip_longest(*(a.accepted_at for a in answers), fillvalue=0))),
                sum(a.request.draft_seconds for a in answers),
            ),
            num_cached_tokens=self.leader.num_cached,
            cache_note=self.leader.cache_note,
        )


def logprob_dict(record: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Chosen token first, then the most likely ones, as vLLM orders them."""

    def text(token: int) -> str | None:
        return tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None

    found = {record.token: Logprob(record.logprob, record.rank, text(record.token))}
    tops = zip(record.top_tokens, record.top_logprobs, strict=True)
    for rank, (token, value) in enumerate(tops, 1):
        if token not in found:
            found[token] = Logprob(value, rank, text(token))
    return found
