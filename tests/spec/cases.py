"""Requests of every kind, tiny models of every kind, and drafts of known quality."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from quire.llm import LLM
from quire.models.tiny import tiny_model
from quire.outputs import RequestOutput
from quire.params import SamplingParams, StructuredOutputsParams
from quire.request import Request, RequestId
from quire.runner.drafter import ModelDrafter
from quire.runner.feature_drafter import FeatureDrafter
from quire.sched.scheduler import Scheduler
from quire.spec.jumps import Jumps
from quire.spec.proposer import NOTHING, Guess, Proposer
from quire.spec.speculation import Speculation
from quire.spec.tree import paths_of
from quire.step import Draft, StepPlan, TokenEvent, Took

FAMILIES = ("llama", "gemma3_text", "deepseek_v3", "mixtral")  # dense, window, MLA, MoE
TEXTS = (
    "the cat sat on the mat, the cat sat on the mat, the cat",
    "one two three four one two three four one two",
    "a",
    "def f(x): return x\ndef g(x): return x\ndef h(x):",
)
LETTERS = StructuredOutputsParams(regex="(ab|cd){3,9}[0-9]+")
RECORD = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"name": {"enum": ["alpha", "beta"]}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
)

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.8, "top_k": 30},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
    "penalties": {
        "temperature": 0.7,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
        "allowed_token_ids": list(range(70, 82)),  # so few that drafts repeat each other
    },
    "edits": {
        "temperature": 0.0,
        "logit_bias": {70: 4.0, 75: -4.0},
        "bad_words": ["th", "a"],
        "min_tokens": 6,
        "stop_token_ids": list(range(100, 140)),
    },
    "grammar": {"temperature": 0.9, "structured_outputs": LETTERS},
    "json": {"temperature": 0.0, "structured_outputs": RECORD, "max_tokens": 40},
    "logprobs": {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 1},
    "n=4": {"temperature": 0.7, "n": 4, "logprobs": 0},
    "stops": {"temperature": 0.9, "stop": ["e", "\x80", "Q"], "logprobs": 1},
}


def sampling(kind: str, seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": seed, **KINDS[kind], **changes})


def everyone() -> list[tuple[str, SamplingParams]]:
    """Requests of each kind."""
    made = []
    for seed, kind in enumerate(KINDS):
        few = ("warm", "top-p", "min-p", "logprobs", "n=4")
        texts = TEXTS[seed % 2 :: 3] if kind in few else TEXTS
        made += [(text, sampling(kind, seed)) for text in texts]
    return made


def open_tiny(folder: Path, family: str, **changes: Any) -> LLM:
    at = folder / family
    if not at.exists():
        # Heads of 16 numbers, so that dense steps are recorded ones on a CPU.
        tiny_model(family, at, seed=3, **({"hidden_size": 64} if family == "llama" else {}))
    if (spare := changes.pop("num_spare_pages", None)) is not None:
        runner = open_tiny(folder, family, **changes)._engine.runner
        pools, drafter = [runner.pool], runner.drafter
        if isinstance(drafter, FeatureDrafter):
            pools.append(drafter.layer.pool)
        if isinstance(drafter, ModelDrafter) and drafter.runner.pool is not runner.pool:
            pools.append(drafter.runner.pool)
        num_pages = len(pools[0].groups) * 192 // changes.get("page_size", 4) + 1 + spare
        page_bytes = sum(pool.data.nbytes // pool.num_pages for pool in pools)
        changes["kv_cache_memory"] = num_pages * page_bytes
    args = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": 4,
        "max_model_len": 192,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 96,
        "kv_cache_memory": 1 << 22,
        "generation_config": None,
        **changes,
    }
    return LLM(str(at), **args)


def undrafted(llm: LLM) -> LLM:
    """The same, without what grammars force: a token a step."""
    llm._engine.core.drafts = None
    return llm


def answer(llm: LLM, asked: list[tuple[str, SamplingParams]]) -> list[object]:
    """All that a caller can see of the answers, but for clocks."""
    outputs = llm.generate([text for text, _ in asked], [p for _, p in asked], use_tqdm=False)
    return [seen(output) for output in outputs]


FIELDS = ("tokens", "text", "reason", "stop", "logprobs", "sum of logprobs")  # of an output


def seen(output: RequestOutput) -> object:
    return (
        output.prompt_logprobs,
        [
            (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, o.cumulative_logprob)
            for o in output.outputs
        ],
    )


def difference(asked: list[tuple[str, SamplingParams]], got: list[Any], want: list[Any]) -> str:
    """Where answers to `everyone` first differ, and in what; empty if nowhere."""
    for (text, params), mine, theirs in zip(asked, got, want, strict=True):
        where = f"{list(KINDS)[params.seed or 0]} behind {text[:16]!r}"
        if mine[0] != theirs[0]:
            return f"{where}: prompt logprobs"
        for nth, (one, other) in enumerate(zip(mine[1], theirs[1], strict=True)):
            if apart := tokens_apart(one[0], other[0]):
                return f"{where}, output {nth}: {apart}"
            if one != other:
                fields = zip(FIELDS, one, other, strict=True)
                return f"{where}, output {nth}: {[name for name, a, b in fields if a != b]}"
    return ""


def tokens_apart(got: Sequence[int], want: Sequence[int]) -> str:
    """The first position at which tokens differ, and both; empty if there is none."""
    for at, (one, other) in enumerate(zip_longest(got, want)):
        if one != other:
            return f"token {at} is {one} and not {other}"
    return ""


class Shortened:
    """A proposer's guesses, cut off at a random place each step."""

    def __init__(self, proposer: Proposer, rng: random.Random) -> None:
        self._proposer, self._rng = proposer, rng

    def propose(self, request: Request, most: int) -> Guess:
        depth = self._rng.randint(0, most)
        return self._proposer.propose(request, depth) if depth else NOTHING

    def forget(self, request: Request) -> None:
        self._proposer.forget(request)


def at_random_depths(llm: LLM) -> LLM:
    """The same, whose drafts are as many as a die says."""
    drafts, rng = llm._engine.core.drafts, random.Random(7)
    assert isinstance(drafts, Speculation)
    for source in drafts._sources:
        source.proposer = Shortened(source.proposer, rng)
    return llm


@dataclass
class Told:
    """Drafts from answers that are known, wrong now and then, of random depth each step."""

    answers: dict[tuple[tuple[int, ...], int], list[int]]  # (prompt, seed) -> output
    rng: random.Random
    error: float = 0.2
    most: int = 7
    branching: float = 0.0  # how often a draft follows another than the one before it
    num_drafted: int = 0
    num_accepted: int = 0
    num_refused: int = 0

    @classmethod
    def of(cls, llm: LLM, asked: list[tuple[str, SamplingParams]], **changes: Any) -> Told:
        """Runs the requests without drafts first, and remembers what they drew."""
        made = cls({}, random.Random(5), **changes)
        core = llm._engine.core
        assert isinstance(core.drafts, Jumps), "a method would draft beside these"
        core.drafts = made
        answer(llm, asked)
        return made

    def awaits_results(self, scheduler: Scheduler) -> bool:
        return True

    def marked(self, plan: StepPlan) -> StepPlan:
        return plan

    def make(self, scheduler: Scheduler) -> dict[RequestId, Draft]:
        return {
            request.id: draft
            for request in scheduler.running.values()
            if request.num_to_feed == 1
            and not request.num_pending
            and (draft := self._draft(request)).num
        }

    def _draft(self, request: Request) -> Draft:
        key = (tuple(request.tokens[: request.num_prompt]), request.seed)
        known = self.answers.setdefault(key, [])
        if len(known) < request.num_output:
            known[:] = request.output
        if self.branching:
            return self._tree(known[request.num_output :])
        depth = self.rng.randint(0, self.most)
        tokens = known[request.num_output : request.num_output + depth]
        tokens += [self.rng.randrange(258) for _ in range(depth - len(tokens))]
        tokens = [self.rng.randrange(258) if self.rng.random() < self.error else t for t in tokens]
        return Draft(depth, tuple(tokens))

    def _tree(self, known: list[int]) -> Draft:
        """A tree of any shape, whose drafts are right as often as those of a chain."""
        rng = self.rng
        parents: list[int] = []
        for node in range(rng.randint(0, self.most)):
            parents.append(rng.randint(0, node) if rng.random() < self.branching else node)
        depths = [len(path) for path in paths_of(tuple(parents))][1:]
        tokens = [
            known[depth - 1]
            if depth <= len(known) and rng.random() >= self.error
            else rng.randrange(258)
            for depth in depths
        ]
        return Draft(len(parents), tuple(tokens), tuple(parents))

    def learn(self, plan: StepPlan, events: list[TokenEvent], took: Took) -> None:
        for event in events:
            self.num_drafted += event.num_drafted
            self.num_accepted += event.num_accepted
            self.num_refused += event.num_accepted < event.num_drafted
