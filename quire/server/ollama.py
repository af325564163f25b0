"""POST /api/generate, /api/chat, /api/embed and /api/embeddings: Ollama's API around a chat plan.

What the request means is read in `ollama_input.py`, what the answer looks like is
`ollama_output.py`'s, and what is asked about models is `ollama_models.py`'s. Answers are streamed
as lines of JSON unless the request says otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import EngineDead
from quire.outputs import StreamEvent
from quire.server import sse
from quire.server.completions import cache_salt, check_grammar, check_length
from quire.server.embeddings import check_shape, finished
from quire.server.fields import decode
from quire.server.generation import Generation, Job
from quire.server.http import NDJSON_TYPE, EventStream, HttpRequest, Reply
from quire.server.ollama_input import (
    AnswerFields,
    OllamaChatFields,
    OllamaEmbeddingsFields,
    OllamaEmbedFields,
    OllamaGenerateFields,
    chat_ask,
    check_generate,
    generate_ask,
    max_tokens,
    note_options,
    sampling_fields,
)
from quire.server.ollama_models import served_name
from quire.server.ollama_output import (
    AnswerShape,
    Said,
    as_message,
    as_response,
    done_reason,
    durations,
    failure,
    line,
    said_by,
    said_in_all,
    since,
)
from quire.server.outlet import Outlet
from quire.server.pooled import Pooled, PoolJob, check_pooling, pool
from quire.server.prompting import ChatPlan, prepare
from quire.server.sampling import sampling_params, structured_outputs
from quire.server.segments import Segments
from quire.server.server import Server


async def chat(request: HttpRequest, server: Server) -> Reply | EventStream:
    fields = decode(request, OllamaChatFields)
    shape = AnswerShape(served_name(server, fields.model, request), as_message)
    note_options(request, server, fields.options)
    if not fields.messages:
        return _loaded(request, server, fields, shape)
    plan = await prepare(server, request, chat_ask(fields))
    return await _answered(OllamaAnswer(request, server, plan, shape), fields)


async def generate(request: HttpRequest, server: Server) -> Reply | EventStream:
    fields = decode(request, OllamaGenerateFields)
    shape = AnswerShape(served_name(server, fields.model, request), as_response)
    note_options(request, server, fields.options)
    if not fields.prompt:
        return _loaded(request, server, fields, shape)
    has_template = server.tokenizer.chat_template is not None
    check_generate(fields, has_template)
    if fields.raw or not has_template:
        plan = await _plain(server, request, fields, fields.prompt)
    else:
        plan = await prepare(server, request, generate_ask(fields))
    if fields.context:
        plan = _after(fields.context, plan, server)
    answer = OllamaAnswer(request, server, plan, shape, tells_context=not fields.raw)
    return await _answered(answer, fields)


def _loaded(
    request: HttpRequest, server: Server, fields: AnswerFields, shape: AnswerShape
) -> Reply:
    """The answer to an empty request, with which clients load a model, or unload it."""
    if (why := server.link.why_not_ready()) is not None:
        raise EngineDead(why)
    if fields.is_farewell:
        request.warnings.append("keep_alive=0: the model stays loaded while the server runs")
    reason = "unload" if fields.is_farewell else "load"
    return Reply(sse.encode(shape.last(Said(), reason)))


async def _plain(
    server: Server, request: HttpRequest, fields: OllamaGenerateFields, text: str
) -> ChatPlan:
    """The prompt as it stands, without a template around it."""
    sampling = sampling_fields(fields)
    structured = structured_outputs(sampling)
    if structured is not None:
        await check_grammar(request, server, structured)
    params = sampling_params(
        sampling,
        server.settings,
        max_tokens=max_tokens(fields),
        logprobs=None,
        structured=structured,
    )
    ids = await server.encode(text, "prompt")
    check_length(ids, server, "prompt")
    salt = cache_salt(request, server, None)
    job = Job({"prompt": text, "prompt_token_ids": ids, "cache_salt": salt}, params)
    return ChatPlan(job, reasoning=None, tool_format=None, is_forced=False)


def _after(context: Sequence[int], plan: ChatPlan, server: Server) -> ChatPlan:
    """The plan's prompt behind an earlier answer's `context`."""
    prompt = plan.job.prompt
    assert isinstance(prompt, dict)
    ids = prompt["prompt_token_ids"]
    if ids[0] == server.tokenizer.bos_id:  # the context has begun with it
        ids = ids[1:]
    ids = [*context, *ids]
    check_length(ids, server, "context")
    return plan._replace(job=plan.job._replace(prompt={**prompt, "prompt_token_ids": ids}))


# ------------------------------------------------------------ answers


async def _answered(answer: OllamaAnswer, fields: AnswerFields) -> Reply | EventStream:
    if fields.stream is False:
        return Reply(sse.encode(await answer.whole()))
    outlet = Outlet()
    return EventStream(answer.lines(outlet), failure, NDJSON_TYPE, outlet=outlet)


@dataclass(slots=True)
class OllamaAnswer:
    """One answer in the making."""

    request: HttpRequest
    server: Server
    plan: ChatPlan
    shape: AnswerShape
    tells_context: bool = False  # token ids of the prompt and the answer

    async def whole(self) -> dict[str, Any]:
        segments = Segments()
        async with Generation(self.server, self.request, self.plan.job) as generation:
            async for pieces in self.plan.choices(generation):
                for piece in pieces:
                    segments.take(piece)
            return self._last(said_in_all(segments), segments, generation)

    async def lines(self, outlet: Outlet) -> AsyncIterator[bytes]:
        segments = Segments()
        generation = Generation(self.server, self.request, self.plan.job)
        (reader,) = self.plan.readers()

        def show(events: Sequence[StreamEvent]) -> bytes:
            changes = (c for event in events for c in segments.take(reader.piece(event)))
            found = (said for change in changes if (said := said_by(change)) is not None)
            return b"".join(line(self.shape.news(said)) for said in found)

        generation.show_through(outlet, show)
        async with generation:
            async for events in generation.pieces():
                # A sign of life; clients parse every line, so it is one.
                if made := show(events) if events else line(self.shape.news(Said())):
                    yield made
            yield line(self._last(Said(), segments, generation))

    def _last(self, said: Said, segments: Segments, generation: Generation) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        if self.tells_context:
            prompt = generation.requests[0].tokens[: generation.num_prompt].tolist()
            (answer,) = generation.conversation.answers.values()
            rest["context"] = [*prompt, *answer.output.token_ids]
        return self.shape.last(said, done_reason(segments), **rest, **durations(generation))


# ------------------------------------------------------------ embeddings


async def embed(request: HttpRequest, server: Server) -> Reply:
    fields = decode(request, OllamaEmbedFields)
    model = served_name(server, fields.model, request)
    note_options(request, server, fields.options)
    check_shape(None, fields.dimensions, server)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    found = await _pooled(request, server, texts if fields.input else [], fields.truncate)
    body = {
        "model": model,
        "embeddings": [finished(vector, fields.dimensions, True) for vector in found.vectors],
        "total_duration": since(request.begun),
        "load_duration": 0,
        "prompt_eval_count": found.num_tokens,
    }
    return Reply(sse.encode(body))


async def embeddings(request: HttpRequest, server: Server) -> Reply:
    """One text; as in Ollama, the vector is not scaled to length 1."""
    fields = decode(request, OllamaEmbeddingsFields)
    served_name(server, fields.model, request)
    note_options(request, server, fields.options)
    texts = [fields.prompt] if fields.prompt else []
    vectors = (await _pooled(request, server, texts, fields.truncate)).vectors
    return Reply(sse.encode({"embedding": vectors[0] if vectors else []}))


async def _pooled(
    request: HttpRequest, server: Server, texts: Sequence[str] | None, truncate: bool | None
) -> Pooled:
    if not texts:  # a request to load the model
        return Pooled([], 0)
    fits = None if truncate is False else -1
    if fits is not None:  # longer ones would be refused before they are tokens
        most = server.limits.max_bytes_per_token * server.max_model_len
        texts = [text[:most] for text in texts]
    return await pool(request, server, texts, PoolJob(check_pooling(None), 0, fits))
