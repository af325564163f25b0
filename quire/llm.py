"""LLM: the offline API. Prompts in, finished outputs or a stream of pieces out.

Importing this module does not import torch; building an LLM does. The class follows vLLM's `LLM`
so that changing the import is all a script needs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from quire.config import Decision, EngineArgs
from quire.engine.collector import no_full_collection
from quire.errors import BadRequest, EngineDead, NotSupported
from quire.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    StreamEvent,
)
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.intake import Prompt
    from quire.engine.output import Conversation
    from quire.models.sequence_head import Verdict
    from quire.request import RequestId
    from quire.sched.stats import SchedStats
    from quire.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

# vLLM arguments that mean nothing here; accepted so that its scripts run.
IGNORED = {"trust_remote_code", "disable_log_stats", "tokenizer_mode", "revision", "swap_space"}


class LLM:
    """A model ready to generate.

    >>> llm = LLM("default", device="cpu")                                      # doctest: +SKIP
    >>> llm.generate(["Once upon a time"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(self, model: str = "default", **kwargs: Any) -> None:
        from quire.engine.build import build_engine
        from quire.engine.intake import Intake, Limits
        from quire.load.open import open_model
        from quire.models.sequence_head import Verdict

        if revision := kwargs.get("revision"):
            raise NotSupported(
                f"got revision={revision!r}; write the model as '{model}@{revision}'"
            )
        args = EngineArgs(model=model, **_known_args(kwargs))
        opened = open_model(args)
        self.args = args
        self.tokenizer = opened.tokenizer
        self._engine = build_engine(args, opened.checkpoint, opened.tokenizer)
        config, spec = self._engine.config, self._engine.spec
        eos = self.tokenizer.eos_ids if self.tokenizer else spec.eos_ids
        limits = Limits(config.sched.max_model_len, spec.vocab_size)
        self._intake = Intake(self.tokenizer, limits, eos, args.seed)
        self._verdict = Verdict.of(opened.checkpoint.config)
        self._names = itertools.count()
        self._live: dict[RequestId, Conversation] = {}

    # ------------------------------------------------------------ generate

    @no_full_collection()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts as one continuous batch; outputs in the order of the prompts."""
        items = _prompt_list(prompts)
        params = _per_prompt(sampling_params, len(items))
        priorities = list(priority) if priority is not None else [0] * len(items)
        if len(priorities) != len(items):
            raise BadRequest(f"got {len(priorities)} priorities for {len(items)} prompts")
        conversations = [
            self._conversation(prompt, p, rank)
            for prompt, p, rank in zip(items, params, priorities, strict=True)
        ]
        self._run(conversations, use_tqdm)
        return [conversation.result() for conversation in conversations]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several."""
        tokenizer = self.get_tokenizer()
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = []
        for one in conversations:
            text = tokenizer.apply_chat_template(
                list(one),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamEvent]:
        """Pieces of the answer as they come. Closing the iterator aborts the request."""
        conversation = self._conversation(prompt, sampling_params or SamplingParams(), 0)
        return self._stream(conversation)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamEvent]:
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        return self.stream({"prompt": text, "prompt_token_ids": ids}, sampling_params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "mean",
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Hidden states of each prompt after the last norm: their mean, or the last token's.

        Not normalised; divide by the length where a cosine is wanted.
        """
        return [
            EmbeddingRequestOutput(
                p.request_id, p.prompt_token_ids, EmbeddingOutput(p.outputs.data)
            )
            for p in self._pool(prompts, pooling, use_tqdm)
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """How likely each label of a `...ForSequenceClassification` model is, for each prompt."""
        verdict = self._head("classify")
        made = []
        for p in self.reward(prompts, use_tqdm=use_tqdm):
            probs = verdict.probabilities(p.outputs.data)
            label = verdict.labels[probs.index(max(probs))]
            output = ClassificationOutput(probs, label)
            made.append(ClassificationRequestOutput(p.request_id, p.prompt_token_ids, output))
        return made

    def reward(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """The plain numbers of a classification head, one for each label: a reward's worth."""
        self._head("reward")
        return self._pool(prompts, "classify", use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling: str = "mean",
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of several, or each with its own.

        A model with a head of one label reads both as one prompt. Any other without a head embeds
        each, pooled as `embed` does, and the score is the cosine between the two.
        """
        from quire.text.pairs import cosine, encode_pair, pair_up

        first, second, pairs = pair_up(text_1, text_2)
        if self._verdict is not None:
            verdict, tokenizer = self._verdict.for_pairs(), self.get_tokenizer()
            prompts = [encode_pair(tokenizer, first[i], second[j]) for i, j in pairs]
            return [
                _scored(p, p, verdict.probabilities(p.outputs.data)[0])
                for p in self.reward(prompts, use_tqdm=use_tqdm)
            ]
        pooled = self._pool([*first, *second], pooling, use_tqdm)
        ones, others = pooled[: len(first)], pooled[len(first) :]
        return [
            _scored(ones[i], others[j], cosine(ones[i].outputs.data, others[j].outputs.data))
            for i, j in pairs
        ]

    # ------------------------------------------------------------ looking

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise NotSupported("the tokenizer was not loaded (skip_tokenizer_init=True)")
        return self.tokenizer

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was chosen at start-up, and why."""
        return self._engine.decisions

    def stats(self) -> SchedStats:
        return self._engine.core.scheduler.stats()

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes; returns the number of pages emptied."""
        return self._engine.core.scheduler.kv.flush()

    # ------------------------------------------------------------ inside

    def _conversation(self, prompt: Prompt, params: SamplingParams, priority: int) -> Conversation:
        from quire.engine.output import Conversation

        self._check_task(params)
        text, requests = self._intake.requests(prompt, params, priority)
        return Conversation(str(next(self._names)), text, requests, self.tokenizer)

    def _check_task(self, params: SamplingParams) -> None:
        if params.pooling is None and self._verdict is not None:
            raise NotSupported(
                f"{self._engine.spec.architecture} here classifies and cannot generate;"
                " use classify, reward, score or embed"
            )
        if params.pooling == "classify":
            self._head("pooling='classify'")

    def _head(self, what: str) -> Verdict:
        if self._verdict is None:
            raise NotSupported(
                f"{what} needs a model with a classification head (...ForSequenceClassification),"
                f" {self.args.model} has none; embed and score work with any model"
            )
        return self._verdict

    @no_full_collection()
    def _pool(self, prompts: Any, pooling: str, show: bool) -> list[PoolingRequestOutput]:
        params = SamplingParams(pooling=pooling, temperature=0.0, detokenize=False)
        conversations = [self._conversation(prompt, params, 0) for prompt in _prompt_list(prompts)]
        self._run(conversations, show)
        return [_pooled(conversation) for conversation in conversations]

    def _run(self, conversations: Sequence[Conversation], show: bool) -> None:
        try:
            for conversation in conversations:
                self._start(conversation)
            num_open = len(conversations)
            mine = {id(conversation) for conversation in conversations}
            with _progress(num_open, show) as advance:
                while num_open:
                    for conversation in self._pump():
                        if id(conversation) in mine:
                            num_open -= 1
                            advance()
        finally:  # Ctrl-C included: leave no request behind
            for conversation in conversations:
                self._drop(conversation)

    def _stream(self, conversation: Conversation) -> Iterator[StreamEvent]:
        inbox: deque[StreamEvent] = deque()
        conversation.inbox = inbox
        self._start(conversation)
        try:
            while not conversation.finished or inbox:
                while inbox:
                    yield inbox.popleft()
                if not conversation.finished:
                    self._pump()
        finally:
            self._drop(conversation)

    def _start(self, conversation: Conversation) -> None:
        self._live.update(dict.fromkeys(conversation.answers, conversation))
        self._engine.core.add(conversation.leader)

    def _drop(self, conversation: Conversation) -> None:
        for request_id in conversation.answers:
            if self._live.pop(request_id, None) is not None:
                self._engine.core.abort(request_id)

    def _fail_all(self) -> None:
        """A step was lost, and with it part of every running request's state: end them all."""
        core = self._engine.core
        core.abandon()
        for request_id, conversation in list(self._live.items()):
            for event in core.abort(request_id, "error"):
                conversation.take(event)
        self._live.clear()

    def _pump(self) -> list[Conversation]:
        """One step for everybody; each event goes to its conversation. Returns those now done."""
        core, done = self._engine.core, []
        try:
            events = core.step()
        except BaseException:
            self._fail_all()
            raise
        for event in events:
            conversation = self._live.get(event.request_id)
            if conversation is None:
                continue  # dropped while this step was in flight
            stop = conversation.take(event)
            if stop:
                core.abort(event.request_id, "stop")
            if stop or event.finish is not None:
                del self._live[event.request_id]
                if conversation.finished:
                    done.append(conversation)
        return done


def _pooled(conversation: Conversation) -> PoolingRequestOutput:
    result = conversation.result()
    if not conversation.embedding:
        raise EngineDead(f"prompt {result.request_id} ended without its numbers")
    return PoolingRequestOutput(
        result.request_id, result.prompt_token_ids, PoolingOutput(conversation.embedding)
    )


def _scored(
    first: PoolingRequestOutput, second: PoolingRequestOutput, score: float
) -> ScoringRequestOutput:
    ids = first.prompt_token_ids + (second.prompt_token_ids if second is not first else [])
    return ScoringRequestOutput(second.request_id, ids, ScoringOutput(score))


def _known_args(kwargs: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in fields(EngineArgs)} - {"model"}
    unknown = set(kwargs) - known - IGNORED
    if unknown:
        import difflib

        near = {u: difflib.get_close_matches(u, known, n=1) for u in sorted(unknown)}
        hints = ", ".join(
            f"{u!r} (did you mean {n[0]!r}?)" if n else f"{u!r}" for u, n in near.items()
        )
        raise NotSupported(f"unknown LLM argument {hints}; known: {', '.join(sorted(known))}")
    return {name: value for name, value in kwargs.items() if name in known}


def _prompt_list(prompts: Any) -> list[Any]:
    """One prompt or many: a text, a mapping or a list of ids stands for itself."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


def _per_prompt(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise BadRequest(f"got {len(params)} sampling_params for {count} prompts")
    return list(params)


def _progress(total: int, show: bool) -> AbstractContextManager[Any]:
    if not show:
        return nullcontext(lambda: None)
    from quire.progress import progress_bar

    return progress_bar("Generating", total)
