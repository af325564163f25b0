"""LLM: the offline API. Prompts in, finished outputs or a stream of pieces out.

Importing this module does not import torch; building an LLM does. The class follows vLLM's `LLM`
so that changing the import is all a script needs. It may be used from several threads: their
requests run in one batch (`engine/joint_loop.py`). What the methods are made of is in `offline/`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from quire.config import Decision
from quire.engine.collector import no_collection, no_full_collection
from quire.errors import BadRequest, NotSupported
from quire.lora.request import LoRARequest, each_adapter
from quire.offline import pooled
from quire.offline.vllm_args import engine_args
from quire.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    StreamEvent,
)
from quire.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from quire.engine.intake import Prompt
    from quire.engine.output import Conversation
    from quire.models.sequence_head import Verdict
    from quire.offline.engine_view import EngineView
    from quire.sched.stats import SchedStats
    from quire.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None  # one for all prompts, or each its own


class LLM:
    """A model ready to generate.

    >>> llm = LLM("default", device="cpu")                                      # doctest: +SKIP
    >>> llm.generate(["Once upon a time"], SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    @no_collection()
    def __init__(
        self, model: str = "default", *, generation_config: str | None = "auto", **kwargs: Any
    ) -> None:
        from quire.load.open import open_model
        from quire.load.recommended import chosen_sampling

        self.args = args = engine_args(model, kwargs)
        opened = open_model(args)
        from quire.engine.build import build_engine  # after what needs no torch
        from quire.engine.intake import Intake, Limits
        from quire.engine.joint_loop import JointLoop
        from quire.models.sequence_head import Verdict

        self._default_sampling = chosen_sampling(generation_config, model, opened.path)
        self.tokenizer = opened.tokenizer
        self._engine = build_engine(args, opened.checkpoint, opened.tokenizer)
        config, spec = self._engine.config, self._engine.spec
        eos = self.tokenizer.eos_ids if self.tokenizer else spec.eos_ids
        limits = Limits(config.sched.max_model_len, spec.vocab_size)
        self._intake = Intake(self.tokenizer, limits, eos, args.seed)
        self._verdict = Verdict.of(opened.checkpoint.config)
        self._names = itertools.count()
        self._loop = JointLoop(self._engine.core)

    # ------------------------------------------------------------ generate

    @no_full_collection()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts as one continuous batch; outputs in the order of the prompts.

        A request the engine fails on ends with finish_reason "error" and the reason as stop_reason.
        """
        items = _prompt_list(prompts)
        params = self._per_prompt(sampling_params, len(items))
        priorities = list(priority) if priority is not None else [0] * len(items)
        if len(priorities) != len(items):
            raise BadRequest(f"got {len(priorities)} priorities for {len(items)} prompts")
        adapters = each_adapter(lora_request, len(items))
        conversations = [
            self._conversation(prompt, p, rank, adapter)
            for prompt, p, rank, adapter in zip(items, params, priorities, adapters, strict=True)
        ]
        self._run(conversations, use_tqdm)
        return [conversation.result() for conversation in conversations]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several."""
        from quire.offline.chat_prompt import ChatStyle, check_content_format

        check_content_format(chat_template_content_format)
        tokenizer = self.get_tokenizer()
        style = ChatStyle.of(
            tools,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
        )
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [style.prompt(tokenizer, one) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[StreamEvent]:
        """Pieces of the answer as they come. Closing the iterator aborts the request."""
        (params,) = self._per_prompt(sampling_params, 1)
        return self._loop.stream(self._conversation(prompt, params, 0, lora_request))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[StreamEvent]:
        from quire.offline.chat_prompt import ChatStyle

        prompt = ChatStyle.of().prompt(self.get_tokenizer(), messages)
        return self.stream(prompt, sampling_params, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, `concurrency_limit` prompts at a time."""
        from quire.offline.beam_search import BeamSearcher

        tokenizer, items = self.get_tokenizer(), _prompt_list(prompts)
        searcher = BeamSearcher(params, self._intake.eos_ids, self._intake.limits.max_model_len)
        found = []
        size = concurrency_limit or max(1, len(items))
        starts = range(0, len(items), size)
        with _progress(len(starts) * params.max_tokens, use_tqdm) as advance:
            for start in starts:
                asked = items[start : start + size]
                found += searcher.run(
                    asked, lambda p, s: self.generate(p, s, False, lora_request), advance
                )
        for beam in itertools.chain(*found):
            beam.text = tokenizer.decode(beam.tokens)
        return [BeamSearchOutput(beams) for beams in found]

    # ------------------------------------------------------------ numbers

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "mean",
        *,
        use_tqdm: bool = True,
        pooling_params: None = None,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """Hidden states of each prompt after the last norm: their mean, or the last token's.

        Not normalised; divide by the length where a cosine is wanted.
        """
        pooled.check_pooling_params(pooling_params)
        return [pooled.embedding(p) for p in self._pool(prompts, pooling, use_tqdm, lora_request)]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """The plain numbers of `embed`, or of a classification head where the model has one."""
        pooled.check_pooling_params(pooling_params)
        task = pooled.check_pooling_task(pooling_task, self._verdict is not None)
        return self._pool(prompts, "mean" if task == "embed" else task, use_tqdm, lora_request)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: None = None,
        lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """How likely each label of a `...ForSequenceClassification` model is, for each prompt."""
        pooled.check_pooling_params(pooling_params)
        verdict = self._head("classify")
        found = self._pool(prompts, "classify", use_tqdm, lora_request)
        return [pooled.classification(p, verdict) for p in found]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput]:
        """The plain numbers of a classification head, one for each label: a reward's worth."""
        self._head("reward")
        return self._pool(prompts, "classify", use_tqdm, lora_request)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling: str = "mean",
        use_tqdm: bool = True,
        pooling_params: None = None,
        lora_request: Adapters = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of several, or each with its own.

        A model with a head of one label reads both as one prompt. Any other without a head embeds
        each, pooled as `embed` does, and the score is the cosine between the two.
        """
        from quire.text.pairs import cosine, encode_pair, pair_up

        pooled.check_pooling_params(pooling_params)
        first, second, pairs = pair_up(text_1, text_2)
        if self._verdict is not None:
            verdict, tokenizer = self._verdict.for_pairs(), self.get_tokenizer()
            prompts = [encode_pair(tokenizer, first[i], second[j]) for i, j in pairs]
            return [
                pooled.scoring(p, p, verdict.probabilities(p.outputs.data)[0])
                for p in self._pool(prompts, "classify", use_tqdm, lora_request)
            ]
        found = self._pool([*first, *second], pooling, use_tqdm, lora_request)
        ones, others = found[: len(first)], found[len(first) :]
        return [
            pooled.scoring(ones[i], others[j], cosine(ones[i].outputs.data, others[j].outputs.data))
            for i, j in pairs
        ]

    # ------------------------------------------------------------ looking

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise NotSupported("the tokenizer was not loaded (skip_tokenizer_init=True)")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without sampling_params uses: as the model's makers recommend."""
        return SamplingParams().with_(**self._default_sampling)

    @property
    def llm_engine(self) -> EngineView:
        from quire.offline.engine_view import view_of

        return view_of(self._engine, self.args.model, self.tokenizer)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was chosen at start-up, and why."""
        return self._engine.decisions

    def stats(self) -> SchedStats:
        with self._loop.turn() as core:
            return core.scheduler.stats()

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes; returns the number of pages emptied."""
        with self._loop.turn() as core:
            return core.scheduler.kv.flush()

    # ------------------------------------------------------------ inside

    def _conversation(
        self, prompt: Prompt, params: SamplingParams, priority: int, lora: LoRARequest | None = None
    ) -> Conversation:
        from quire.engine.output import Conversation

        self._check_task(params)
        text, requests = self._intake.requests(prompt, params, priority)
        if lora is not None:
            self._read_adapter(lora)
            for request in requests:
                request.adapter_name = lora.lora_name
        return Conversation(str(next(self._names)), text, requests, self.tokenizer)

    def _read_adapter(self, lora: LoRARequest) -> None:
        with self._loop.turn() as core:
            assert core.adapters is not None
            if lora.lora_path:
                core.adapters.load(lora.lora_name, lora.lora_path)

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

    def _per_prompt(self, params: Any, count: int) -> list[SamplingParams]:
        """The engine's own copies: the caller may change his while they are in use."""
        if params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(params, SamplingParams):
            return [params.clone()] * count
        if len(params) != count:
            raise BadRequest(f"got {len(params)} sampling_params for {count} prompts")
        return [one.clone() for one in params]

    @no_full_collection()
    def _pool(
        self, prompts: Any, pooling: str, show: bool, lora: Adapters = None
    ) -> list[PoolingRequestOutput]:
        params = SamplingParams(pooling=pooling, temperature=0.0, detokenize=False)
        items = _prompt_list(prompts)
        adapters = each_adapter(lora, len(items))
        conversations = [
            self._conversation(prompt, params, 0, adapter)
            for prompt, adapter in zip(items, adapters, strict=True)
        ]
        self._run(conversations, show)
        return [pooled.pooled(conversation) for conversation in conversations]

    def _run(self, conversations: Sequence[Conversation], show: bool) -> None:
        with _progress(len(conversations), show) as advance:
            self._loop.run(conversations, advance)


def _prompt_list(prompts: Any) -> list[Any]:
    """One prompt or many: a text, a mapping or a list of ids stands for itself."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], int) else items


def _progress(total: int, show: bool) -> AbstractContextManager[Callable[[], None]]:
    if not show:
        return nullcontext(lambda: None)
    from quire.progress import progress_bar

    return progress_bar("Generating", total)
