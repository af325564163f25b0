"""POST /v1/completions: plain text continuation, one or several prompts, streamed or whole."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from quire.errors import BadRequest
from quire.grammar.spec import ignored_formats
from quire.obs.log import log_event
from quire.outputs import StreamEvent
from quire.params import SamplingParams, StructuredOutputsParams
from quire.server import sse
from quire.server.cache_wish import Asked, mode_of, text_wish
from quire.server.fields import CompletionFields, decode
from quire.server.generation import Generation, Job
from quire.server.http import EventStream, HttpRequest, Reply
from quire.server.merge import all_whole, in_order, merged
from quire.server.outlet import Outlet
from quire.server.problems import Problem
from quire.server.sampling import sampling_params, structured_outputs
from quire.server.server import Server
from quire.server.usage import CompletionLogprobs, usage_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only


async def completions(request: HttpRequest, server: Server) -> Reply | EventStream:
    fields = decode(request, CompletionFields)
    model = server.check_model(fields.model, request)
    params = _params(fields, server)
    if params.structured_outputs is not None:
        await check_grammar(request, server, params.structured_outputs)
    prompts = await _prompts(fields, request, server)
    answer = Completion(request, server, model, fields, params)
    mode, asked = mode_of(fields.answer_cache, server), Asked([], [], params, fields.model)
    jobs = [
        Job(
            *(prompt, params, fields.priority or 0, fields.timeout),
            text_wish(mode, asked, prompt.get("prompt")),
        )
        for prompt in prompts
    ]
    if fields.stream:
        outlet = Outlet()
        return EventStream(answer.chunks(jobs, outlet), sse.failure, outlet=outlet)
    return Reply(sse.encode(await answer.whole(jobs)))


def _params(fields: CompletionFields, server: Server) -> SamplingParams:
    if fields.stream and fields.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs needs stream=false", param="prompt_logprobs")
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    if fields.echo and fields.max_tokens == 0:
        max_tokens = 1  # drawn, and then left out: the prompt's own logprobs are what is wanted
    if fields.echo and fields.logprobs is not None and fields.prompt_logprobs is None:
        fields.prompt_logprobs = fields.logprobs
    return sampling_params(
        fields,
        server.settings,
        max_tokens=max_tokens,
        logprobs=fields.logprobs,
        structured=structured_outputs(fields),
    )


async def _prompts(
    fields: CompletionFields, request: HttpRequest, server: Server
) -> list[dict[str, Any]]:
    items = items_of(fields.prompt, "prompt")
    if len(items) > server.limits.max_prompts:
        raise BadRequest(
            f"got {len(items)} prompts, want at most {server.limits.max_prompts}", param="prompt"
        )
    salt = cache_salt(request, server, fields.cache_salt)
    prompts = []
    for item in items:
        prompt: dict[str, Any] = {"prompt_token_ids": item, "cache_salt": salt}
        if isinstance(item, str):
            prompt["prompt"] = item
            special = fields.add_special_tokens is not False
            prompt["prompt_token_ids"] = await server.encode(item, "prompt", special)
        check_length(prompt["prompt_token_ids"], server, "prompt")
        prompts.append(prompt)
    return prompts


async def check_grammar(
    request: HttpRequest, server: Server, wanted: StructuredOutputsParams
) -> None:
    """Raises as the checker does; warns of string formats that are not enforced."""
    await server.checker(request.is_background).check(wanted)
    if ignored := ignored_formats(wanted):
        shown = ", ".join(name[:40] for name in ignored[:10])
        request.warnings.append(f"ignored unknown string formats: {shown}")
        log_event("formats_ignored", severity=logging.WARNING, request_id=request.id, formats=shown)


def check_length(ids: Sequence[int], server: Server, param: str) -> None:
    """Too long has a code of its own, which clients look for before they shorten and try again."""
    most = server.max_model_len
    if len(ids) >= most:
        raise Problem(
            400,
            f"the prompt has {len(ids)} tokens, but max_model_len={most} leaves room for"
            f" {most - 1}; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    if not ids:
        raise BadRequest("the prompt has no tokens; give at least one", param=param)


def items_of(given: str | list[Any], param: str) -> list[Any]:
    """One text or list of ids stands for itself; several of one kind for each of them."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        problem = "a mix of kinds" if kinds else "an empty list"
        raise BadRequest(f"got {problem}, want texts or lists of token ids", param=param)
    return [given] if kinds == {int} else given


def cache_salt(request: HttpRequest, server: Server, wanted: str | None) -> str:
    """Callers with different keys never share cached prefixes, unless the server says so."""
    own = (
        "" if server.settings.share_prefix_cache or request.caller is None else request.caller.salt
    )
    if wanted is not None and not 0 < len(wanted) <= 256:
        raise BadRequest("cache_salt must have 1 to 256 characters", param="cache_salt")
    return f"{own}/{wanted}" if wanted else own


class Completion:
    """One answer in the making."""

    def __init__(
        self,
        request: HttpRequest,
        server: Server,
        model: str,
        fields: CompletionFields,
        params: SamplingParams,
    ) -> None:
        self.request, self.server, self.fields, self.params = request, server, fields, params
        self.head = {
            "id": f"cmpl-{request.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def is_echo_alone(self) -> bool:
        """Only the prompt is wanted: the one token that was drawn is not shown."""
        return bool(self.fields.echo) and self.fields.max_tokens == 0

    def usage(self, generations: list[Generation], num_output: int | None = None) -> dict[str, Any]:
        usage = usage_of(*generations, num_output=num_output)
        if self.is_echo_alone:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    # ------------------------------------------------------------ whole

    async def whole(self, jobs: list[Job]) -> dict[str, Any]:
        generations = [Generation(self.server, self.request, job) for job in jobs]
        found = await all_whole(in_order(generations), self._choices)
        choices = [choice for made in found for choice in made]
        return self.head | {"choices": choices, "usage": self.usage(generations)}

    def _choices(self, prompt_index: int, generation: Generation) -> list[dict[str, Any]]:
        result, fields = generation.conversation.result(), self.fields
        made = []
        for output in result.outputs:
            shown = Shown(self, generation, output.index)
            before, logprobs = shown.prompt() if fields.echo else ("", None)
            text, token_ids = output.text, output.token_ids
            if self.is_echo_alone:
                text, token_ids = "", []
            elif (own := shown.answer(len(token_ids))) is not None:
                logprobs = {k: [*(logprobs or {}).get(k, ()), *own[k]] for k in own}
            choice: dict[str, Any] = {
                "index": prompt_index * self.params.n + output.index,
                "text": before + text,
                "logprobs": logprobs,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            if fields.return_token_ids:
                choice["token_ids"] = token_ids
                choice["prompt_token_ids"] = result.prompt_token_ids
            if fields.prompt_logprobs is not None and not fields.echo:
                choice["prompt_logprobs"] = result.prompt_logprobs
            made.append(choice)
        return made

    # ------------------------------------------------------------ streamed

    async def chunks(self, jobs: list[Job], outlet: Outlet) -> AsyncIterator[bytes]:
        options = self.fields.stream_options
        generations = [Generation(self.server, self.request, job) for job in jobs]
        shown = [[Shown(self, g, i) for i in range(self.params.n)] for g in generations]
        has_begun, num_sent = [False] * len(jobs), 0
        text_chunks = self._text_chunks(len(jobs) * self.params.n)

        def show(index: int, pieces: Sequence[StreamEvent]) -> bytes:
            nonlocal num_sent
            made: list[bytes] = []
            if not has_begun[index]:
                # Not sooner: what the prompt's logprobs are is known with the first token.
                has_begun[index] = True
                for chunk in self._beginning(index, shown[index]):
                    made.append(self._data(chunk, generations, num_sent))
            for piece in pieces:
                num_sent += len(piece.token_ids)
                if text_chunks and piece.finish_reason is None:
                    if piece.text:
                        number = index * self.params.n + piece.index
                        made.append(text_chunks[number](piece.text))
                elif (news := self._news(index, piece, shown[index][piece.index])) is not None:
                    made.append(self._data(news, generations, num_sent))
            return b"".join(made)  # a reader that is behind gets all in one write

        async with aclosing(merged(generations, outlet, show)) as found:
            async for made in found:
                yield made
            if options is not None and options.include_usage:
                timings = generations[0].timings()
                usage = self.usage(generations)
                yield sse.data(self.head | {"choices": [], "usage": usage, "timings": timings})
            yield sse.DONE

    def _text_chunks(self, count: int) -> list[sse.TextChunk]:
        """For streams whose news are text alone: one for each choice; else none."""
        fields, options = self.fields, self.fields.stream_options
        has_usage = options is not None and bool(options.continuous_usage_stats)
        is_plain = fields.logprobs is None and not fields.return_token_ids and not has_usage
        if not is_plain or self.is_echo_alone:
            return []
        head = self.head
        if options is not None and options.include_usage:
            head = head | {"usage": None}
        shapes = (
            head | {"choices": [_choice(index) | {"text": sse.HOLE}]} for index in range(count)
        )
        return [sse.TextChunk(shape) for shape in shapes]

    def _beginning(self, prompt_index: int, shown: list[Shown]) -> list[dict[str, Any]]:
        """What comes before the answers: the prompt's text or its ids, when they are wanted."""
        made = []
        for number, one in enumerate(shown):
            choice = _choice(prompt_index * self.params.n + number)
            if self.fields.echo:
                choice["text"], choice["logprobs"] = one.prompt()
            if self.fields.return_token_ids:
                choice |= {"token_ids": [], "prompt_token_ids": one.prompt_ids}
            if self.fields.echo or self.fields.return_token_ids:
                made.append(choice)
        return made

    def _news(self, prompt_index: int, piece: StreamEvent, shown: Shown) -> dict[str, Any] | None:
        choice = _choice(prompt_index * self.params.n + piece.index)
        choice["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self.is_echo_alone:
            return choice
        choice["text"] = piece.text
        choice["logprobs"] = shown.answer(len(piece.token_ids))
        if self.fields.return_token_ids:
            choice["token_ids"] = piece.token_ids
        has_news = piece.text or piece.finish_reason or choice["logprobs"] is not None
        return choice if has_news or self.fields.return_token_ids else None

    def _data(self, choice: dict[str, Any], generations: list[Generation], num_sent: int) -> bytes:
        chunk = self.head | {"choices": [choice]}
        options = self.fields.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk = chunk | {"usage": self.usage(generations, num_sent)}
        elif options is not None and options.include_usage:
            chunk = chunk | {"usage": None}
        return sse.data(chunk)


def _choice(index: int) -> dict[str, Any]:
    return {"index": index, "text": "", "logprobs": None, "finish_reason": None}


class Shown:
    """What of one answer the client has been shown: the echoed prompt, then tokens as they come."""

    def __init__(self, completion: Completion, generation: Generation, index: int) -> None:
        fields = completion.fields
        self._conversation, self._tokenizer = generation.conversation, completion.server.tokenizer
        self._output = list(self._conversation.answers.values())[index].output
        self.prompt_ids: list[int] = generation.requests[0].tokens[: generation.num_prompt].tolist()
        self._num_tokens = 0
        self._logprobs: CompletionLogprobs | None = None
        if fields.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                self._tokenizer,
                fields.logprobs,
                () if fields.echo else self.prompt_ids,
                completion.params.skip_special_tokens,
            )

    def prompt(self) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text and its logprobs; call before any `answer`."""
        text = self._conversation.prompt
        if text is None:
            text = self._tokenizer.decode(self.prompt_ids)
        if self._logprobs is None:
            return text, None
        records = self._conversation.prompt_logprobs
        assert records is not None, "echo with logprobs asks for the prompt's"
        return text, self._logprobs.prompt(self.prompt_ids, records, text)

    def answer(self, num_tokens: int) -> dict[str, Any] | None:
        """Logprobs of the next tokens; the answer may already know of later ones."""
        if self._logprobs is None:
            return None
        start = self._num_tokens
        self._num_tokens += num_tokens
        return self._logprobs.answer((self._output.logprobs or [])[start : self._num_tokens])
