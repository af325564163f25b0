"""Beam search over `LLM.generate`: each round asks for the likeliest next tokens of every beam.

All beams of all prompts are one batch, and the prefix cache keeps what they have in common. Scores
and their order are vLLM's: a beam's log-probability over its length, prompt included, to the power
of `length_penalty`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.errors import EngineDead
from quire.outputs import BeamSearchSequence, RequestOutput
from quire.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from quire.engine.intake import Prompt

Generate = Callable[[Sequence[Any], SamplingParams], list[RequestOutput]]


@dataclass(slots=True)
class Search:
    """One prompt: the beams still growing, and those that ended."""

    prompt: Prompt
    growing: list[BeamSearchSequence] = field(default_factory=lambda: [BeamSearchSequence()])
    ended: list[BeamSearchSequence] = field(default_factory=list)

    def ask(self, beam: BeamSearchSequence) -> Any:
        """The prompt that continues a beam; before the first round that is the caller's own."""
        if not beam.tokens:
            return self.prompt
        salt = self.prompt.get("cache_salt") if isinstance(self.prompt, dict) else None
        return {"prompt_token_ids": beam.tokens, "cache_salt": salt}


class BeamSearcher:
    def __init__(
        self, params: BeamSearchParams, eos_ids: Collection[int], max_model_len: int
    ) -> None:
        self._params, self._max_len = params, max_model_len
        self._eos_ids = frozenset(eos_ids)
        self._sampling = SamplingParams(
            max_tokens=1,
            temperature=params.temperature,
            logprobs=params.num_candidates,
            detokenize=False,
        )

    def run(
        self, prompts: Sequence[Prompt], generate: Generate, advance: Callable[[], None]
    ) -> list[list[BeamSearchSequence]]:
        """The best beams of each prompt, best first; `advance` is called once a round."""
        searches = [Search(prompt) for prompt in prompts]
        for _ in range(self._params.max_tokens):
            self._round(searches, generate)
            advance()
        for search in searches:
            for beam in search.growing:
                beam.finish_reason = "length"
        return [self._best([*search.ended, *search.growing]) for search in searches]

    def _round(self, searches: Sequence[Search], generate: Generate) -> None:
        asked = [(search, beam) for search in searches for beam in search.growing]
        if not asked:
            return
        outputs = generate([search.ask(beam) for search, beam in asked], self._sampling)
        for search in searches:
            search.growing = []
        for (search, beam), output in zip(asked, outputs, strict=True):
            self._extend(search, beam, output)
        for search in searches:
            search.growing = self._best(search.growing)

    def _extend(self, search: Search, beam: BeamSearchSequence, output: RequestOutput) -> None:
        (answer,) = output.outputs
        if answer.finish_reason == "error" or not answer.logprobs:
            raise EngineDead(f"beam search cannot go on: {answer.stop_reason}")
        (found,) = answer.logprobs
        for token, record in found.items():
            longer = BeamSearchSequence(
                tokens=[*output.prompt_token_ids, token],
                logprobs=[*beam.logprobs, found],
                cum_logprob=beam.cum_logprob + record.logprob,
            )
            if token in self._eos_ids and not self._params.ignore_eos:
                longer.finish_reason, longer.stop_reason = "stop", token
                search.ended.append(longer)
            elif len(longer.tokens) >= self._max_len:
                longer.finish_reason = "length"
                search.ended.append(longer)
            else:
                search.growing.append(longer)

    def _best(self, beams: Sequence[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        # The token that ends a text is no part of its length.
        length = len(beam.tokens) - (beam.tokens[-1] in self._eos_ids)
        return beam.cum_logprob / math.pow(length, self._params.length_penalty)
