"""POST /v1/chat/completions: OpenAI's shape around a chat plan, streamed or whole."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from quire.errors import BadRequest
from quire.outputs import Logprob, StreamEvent
from quire.server import sse
from quire.server.fields import ChatFields, decode
from quire.server.generation import Generation, Show
from quire.server.http import EventStream, HttpRequest, Reply
from quire.server.items import Item, wrong
from quire.server.outlet import Outlet
from quire.server.prompting import ChatAsk, ChatPlan, Piece, prepare
from quire.server.server import Server
from quire.server.settings import Limits
from quire.server.stored_chats import keep_chat, wants_keeping
from quire.server.usage import chat_logprobs, usage_of
from quire.text.tools.parser import CallArguments, CallStart, TextPart
from quire.text.tools.router import ReasoningPart


async def chat_completions(request: HttpRequest, server: Server) -> Reply | EventStream:
    fields = decode(request, ChatFields)
    model = server.check_model(fields.model, request)
    plan = await prepare(server, request, _ask(fields, server.limits))
    answer = ChatAnswer(request, server, model, fields, plan)
    answer.is_kept = wants_keeping(fields, request, server)
    if fields.stream:
        outlet = Outlet()
        return EventStream(answer.chunks(outlet), sse.failure, outlet=outlet)
    return Reply(sse.encode(await answer.whole()))


def _ask(fields: ChatFields, limits: Limits) -> ChatAsk:
    num_top = fields.top_logprobs
    if num_top is not None and not fields.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if num_top is not None and not 0 <= num_top <= limits.max_logprobs:
        raise BadRequest(
            f"got top_logprobs={num_top}, want 0 to {limits.max_logprobs}", param="top_logprobs"
        )
    if fields.stream and fields.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs needs stream=false", param="prompt_logprobs")
    continues = bool(fields.continue_final_message)
    values = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        values.setdefault("reasoning_effort", fields.reasoning_effort)
        values.setdefault("enable_thinking", fields.reasoning_effort != "none")
    most = fields.max_completion_tokens
    return ChatAsk(
        messages=fields.messages,
        fields=fields,
        max_tokens=most if most is not None else fields.max_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        add_generation_prompt=(
            not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
        ),
        continue_final_message=continues,
        chat_template=fields.chat_template,
        template_values=values,
        prediction=_prediction(fields),
    )


def _prediction(fields: ChatFields) -> str:
    """OpenAI's Predicted Outputs: what the answer may be much like."""
    if fields.prediction is None:
        return ""
    item = Item(fields.prediction, "prediction").only(("type", "content"))
    if item.get("type") != "content":
        raise wrong("prediction.type", item.get("type"), "'content'")
    if isinstance(item.get("content"), str):
        return item.text("content")
    return "".join(part.text("text") for part in item.items("content"))


class ChatAnswer:
    def __init__(
        self,
        request: HttpRequest,
        server: Server,
        model: str,
        fields: ChatFields,
        plan: ChatPlan,
    ) -> None:
        self.request, self.server, self.fields, self.plan = request, server, fields, plan
        self.shows_reasoning = fields.include_reasoning is not False
        self.is_kept = False
        self._num_thought = [0] * plan.params.n  # tokens, for each answer
        self._num_seen = [0] * plan.params.n  # tokens in the pieces that came
        self.head = {
            "id": f"chatcmpl-{request.id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    # ------------------------------------------------------------ whole

    async def whole(self) -> dict[str, Any]:
        async with Generation(self.server, self.request, self.plan.job) as generation:
            messages = [Message() for _ in generation.requests]
            async for pieces in self.plan.choices(generation):
                for piece in pieces:
                    self._see(piece)
                    messages[piece.index].take(piece)
            body = self._body(messages, generation)
        if self.is_kept:
            await keep_chat(self.request, self.server, self.fields, body)
        return body

    def _body(self, messages: list[Message], generation: Generation) -> dict[str, Any]:
        outputs = generation.conversation.result()
        choices = []
        for message, output in zip(messages, outputs.outputs, strict=True):
            choice: dict[str, Any] = {
                "index": output.index,
                "message": message.body(self.shows_reasoning),
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": message.finish,
                "stop_reason": output.stop_reason,
            }
            if self.fields.return_token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        body = self.head | {
            "choices": choices,
            "usage": self._usage(generation),
            "timings": generation.timings(),
            "system_fingerprint": None,
        }
        if self.fields.prompt_logprobs is not None:
            body["prompt_logprobs"] = outputs.prompt_logprobs
        if self.fields.return_token_ids:
            body["prompt_token_ids"] = outputs.prompt_token_ids
        return body

    def _logprobs(self, records: Sequence[Mapping[int, Logprob]] | None) -> dict[str, Any] | None:
        if not self.fields.logprobs or records is None:
            return None
        return chat_logprobs(records, self.fields.top_logprobs or 0, self.server.tokenizer)

    def _usage(self, generation: Generation) -> dict[str, Any]:
        thinks = self.plan.reasoning is not None
        return usage_of(
            generation,
            num_output=sum(self._num_seen),
            reasoning_tokens=sum(self._num_thought) if thinks else None,
        )

    def _see(self, piece: Piece) -> None:
        self._num_seen[piece.index] += len(piece.event.token_ids)
        self._num_thought[piece.index] = piece.num_reasoning

    # ------------------------------------------------------------ streamed

    async def chunks(self, outlet: Outlet) -> AsyncIterator[bytes]:
        head = self.head | {"object": "chat.completion.chunk"}
        options = self.fields.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        if wants_usage:
            head["usage"] = None  # in all chunks but the last, as OpenAI has it
        messages = [Message() for _ in range(self.plan.params.n if self.is_kept else 0)]
        generation = Generation(self.server, self.request, self.plan.job)
        show = self._show(generation, head, messages)
        generation.show_through(outlet, show)
        async with generation:
            for index in range(self.plan.params.n):
                yield sse.data(head | self._beginning(index, generation))
            async for events in generation.pieces():
                if (made := show(events)) or not events:
                    yield made or sse.PING
            if wants_usage:
                usage = {"usage": self._usage(generation), "timings": generation.timings()}
                yield sse.data(head | {"choices": []} | usage)
            if messages:
                body = self._body(messages, generation)
                await keep_chat(self.request, self.server, self.fields, body)
            yield sse.DONE

    def _show(self, generation: Generation, head: dict[str, Any], messages: list[Message]) -> Show:
        """How pieces become chunks. Those of text alone are prepared."""
        options = self.fields.stream_options
        plain = not (
            self.fields.logprobs
            or self.fields.return_token_ids
            or (options is not None and options.continuous_usage_stats)
        )
        is_text_alone = plain and self.plan.is_text_alone and not messages
        text_chunks = [
            sse.TextChunk(head | {"choices": [_delta(i, {"content": sse.HOLE})]})
            for i in range(self.plan.params.n)
        ]
        readers = self.plan.readers()

        def show(events: Sequence[StreamEvent]) -> bytes:
            made = []
            for event in events:
                if is_text_alone and event.finish_reason is None:
                    self._num_seen[event.index] += len(event.token_ids)
                    if event.text:
                        made.append(text_chunks[event.index](event.text))
                    continue
                piece = readers[event.index].piece(event)
                self._see(piece)
                if messages:
                    messages[piece.index].take(piece)
                parts = piece.parts
                only = parts[0] if len(parts) == 1 else None
                if plain and piece.finish is None and isinstance(only, TextPart):
                    made.append(text_chunks[piece.index](only.text))
                else:
                    made += self._chunks_of(piece, generation, head)
            return b"".join(made)  # in one write, where the client is behind

        return show

    def _beginning(self, index: int, generation: Generation) -> dict[str, Any]:
        first = _delta(index, {"role": "assistant", "content": ""})
        begun: dict[str, Any] = {"choices": [first]}
        if index == 0 and self.fields.return_token_ids:
            prompt = generation.requests[0].tokens[: generation.num_prompt]
            begun["prompt_token_ids"] = prompt.tolist()
        return begun

    def _chunks_of(self, piece: Piece, generation: Generation, head: dict[str, Any]) -> list[bytes]:
        """A piece that is more than text. Logprobs and token ids ride on its first chunk."""
        deltas = [d for part in piece.parts if (d := _part_delta(part, self.shows_reasoning))]
        extra: dict[str, Any] = {}
        if self.fields.logprobs and piece.event.token_ids:
            extra["logprobs"] = self._logprobs(self._new_records(piece, generation))
        if self.fields.return_token_ids:
            extra["token_ids"] = piece.event.token_ids
        if not deltas and (piece.finish is not None or extra):
            deltas = [{}]
        made = []
        for number, delta in enumerate(deltas):
            choice = _delta(piece.index, delta)
            if number == 0:
                choice |= extra
            if number == len(deltas) - 1 and piece.finish is not None:
                choice["finish_reason"] = piece.finish
                choice["stop_reason"] = piece.event.stop_reason
            chunk = head | {"choices": [choice]}
            options = self.fields.stream_options
            if options is not None and options.continuous_usage_stats:
                chunk["usage"] = self._usage(generation)
            made.append(sse.data(chunk))
        return made

    def _new_records(self, piece: Piece, generation: Generation) -> Sequence[Mapping[int, Logprob]]:
        """Of this piece's tokens: the answer may already know of tokens in later pieces."""
        answers = list(generation.conversation.answers.values())
        end = self._num_seen[piece.index]
        start = end - len(piece.event.token_ids)
        return (answers[piece.index].output.logprobs or [])[start:end]


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _part_delta(part: object, shows_reasoning: bool) -> dict[str, Any] | None:
    if isinstance(part, TextPart):
        return {"content": part.text}
    if isinstance(part, ReasoningPart):
        return {"reasoning_content": part.text} if shows_reasoning else None
    if isinstance(part, CallStart):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": part.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(part, CallArguments):
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.delta}}]}
    return None


class Message:
    """One whole answer, put together from its parts."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish: str | None = None

    def take(self, piece: Piece) -> None:
        for part in piece.parts:
            if isinstance(part, TextPart):
                self.text.append(part.text)
            elif isinstance(part, ReasoningPart):
                self.reasoning.append(part.text)
            elif isinstance(part, CallStart):
                function = {"name": part.name, "arguments": ""}
                self.calls[part.index] = {"id": part.id, "type": "function", "function": function}
            elif isinstance(part, CallArguments):
                self.calls[part.index]["function"]["arguments"] += part.delta
        self.finish = piece.finish or self.finish

    def body(self, shows_reasoning: bool) -> dict[str, Any]:
        content: str | None = "".join(self.text)
        body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            body["content"] = content or None
            body["tool_calls"] = list(self.calls.values())
        if self.reasoning and shows_reasoning:
            body["reasoning_content"] = "".join(self.reasoning)
        return body
