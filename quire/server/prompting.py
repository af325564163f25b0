"""From a chat request to a job for the engine, and the way its output will be read.

Chat completions, Responses and Messages all reduce to a `ChatAsk`; `prepare` checks it, renders the
template, tokenises, settles tools, reasoning and structured output, and returns a `ChatPlan`. Its
`choices` reads a generation as parts: text, reasoning and tool calls, for each answer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.errors import BadRequest, CheckpointError
from quire.outputs import StreamEvent
from quire.params import SamplingParams, StructuredOutputsParams
from quire.server.cache_wish import Asked, chat_wish, mode_of
from quire.server.completions import cache_salt, check_grammar, check_length
from quire.server.fields import SamplingFields
from quire.server.generation import Generation, Job
from quire.server.http import HttpRequest
from quire.server.problems import Problem
from quire.server.sampling import sampling_params, structured_outputs
from quire.server.server import Server
from quire.text.reasoning import detect_reasoning, reasoning_splitter
from quire.text.tools.definitions import Tool, ToolChoice, check_tool_choice, check_tools
from quire.text.tools.forced import ForcedCallParser, forced_schema
from quire.text.tools.formats import detect_tool_format, needs_special_tokens, tool_parser
from quire.text.tools.parser import CallCut, CallStart, ToolParser
from quire.text.tools.prompt import template_inputs
from quire.text.tools.router import OutputRouter, ReasoningPart, RoutedPart

# Templates have these from us or from Jinja, or they say what is done with the text; a client may
# not put its own values there.
RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "documents"),
        *("messages", "raise_exception", "self", "strftime_now", "tokenize", "tools"),
        *("bos_token", "eos_token", "pad_token", "unk_token"),
    )
)
MAX_TEMPLATE_VALUES = 16
DEFAULT_TOOL_FORMAT = "hermes"  # what `spell_out_tools` teaches a model that knows none


@dataclass(slots=True, kw_only=True)
class ChatAsk:
    """What all chat-like endpoints have in common."""

    messages: list[dict[str, Any]]
    fields: SamplingFields
    max_tokens: int | None = None
    logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_values: dict[str, Any] = field(default_factory=dict)
    prediction: str = ""  # what the answer may be much like


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to one answer."""

    index: int
    parts: list[RoutedPart]
    finish: str | None  # "stop", "length" or "tool_calls"
    event: StreamEvent
    num_reasoning: int = 0  # tokens of this answer spent on thinking so far, markers included


class ChatPlan(NamedTuple):
    job: Job
    reasoning: str | None  # name of the splitter
    tool_format: str | None  # None: output is not searched for calls
    is_forced: bool

    @property
    def params(self) -> SamplingParams:
        return self.job.params

    @property
    def prompt_text(self) -> str:
        assert isinstance(self.job.prompt, dict)
        return str(self.job.prompt["prompt"])

    def router(self) -> OutputRouter:
        splitter = None
        if self.reasoning is not None:
            splitter = reasoning_splitter(self.reasoning, self.prompt_text)
        parser: ToolParser | None = None
        if self.is_forced:
            parser = ForcedCallParser()
        elif self.tool_format is not None:
            parser = tool_parser(self.tool_format)
        return OutputRouter(splitter, parser)

    async def choices(self, generation: Generation) -> AsyncIterator[list[Piece]]:
        """Pieces of all answers, for one who shows them when they are whole."""
        generation.gather()
        routers = self.readers()
        async for events in generation.pieces():
            yield [routers[event.index].piece(event) for event in events]

    def readers(self) -> list[Choice]:
        """One for each answer."""
        return [Choice(self.router()) for _ in range(self.params.n)]

    @property
    def is_text_alone(self) -> bool:
        """Neither reasoning nor calls are looked for."""
        return self.reasoning is None and self.tool_format is None and not self.is_forced


class Choice:
    """One answer: its router, and whether it called tools."""

    def __init__(self, router: OutputRouter) -> None:
        self.router = router
        self.has_calls = self.is_cut = False
        self._is_answering = self._has_thought = False
        self._num_before_answer = 0

    def piece(self, event: StreamEvent) -> Piece:
        parts = self.router.push(event.text) if event.text else []
        if event.finish_reason is not None:
            parts = [*parts, *self.router.finish()]
        for part in parts:
            self.has_calls |= isinstance(part, CallStart)
            self.is_cut |= isinstance(part, CallCut)
            self._has_thought |= isinstance(part, ReasoningPart)
            self._is_answering |= not isinstance(part, ReasoningPart)
        if not self._is_answering:
            self._num_before_answer += len(event.token_ids)
        finish = event.finish_reason
        if finish == "stop" and self.has_calls:  # a call without its end is not one to run
            finish = "length" if self.is_cut else "tool_calls"
        num_reasoning = self._num_before_answer if self._has_thought else 0
        return Piece(event.index, parts, finish, event, num_reasoning)


# ------------------------------------------------------------ preparing


async def prepare(server: Server, request: HttpRequest, ask: ChatAsk) -> ChatPlan:
    """Raises BadRequest or Problem; nothing reached the engine then."""
    if len(ask.messages) > server.limits.max_messages:
        raise BadRequest(
            f"got {len(ask.messages)} messages, want at most {server.limits.max_messages}",
            param="messages",
        )
    tools, choice = _tools(ask)
    structured = _structured(ask, tools, choice)
    if structured is not None:
        await check_grammar(request, server, structured)
    tool_format = None
    if tools and choice.mode != "none":
        tool_format = server.settings.tool_call_parser or _tool_format(server)
    params = sampling_params(
        ask.fields,
        server.settings,
        max_tokens=ask.max_tokens,
        logprobs=ask.logprobs,
        structured=structured,
    )
    if tool_format is not None and needs_special_tokens(tool_format):
        params = params.with_(skip_special_tokens=False)
    shown = [] if choice.mode == "none" else tools
    text = await render(server, ask.messages, shown, _template_options(server, ask))
    ids = await server.encode(text, "messages", add_special_tokens=False)
    check_length(ids, server, "messages")
    salt = cache_salt(request, server, ask.fields.cache_salt)
    prompt = {"prompt": text, "prompt_token_ids": ids, "cache_salt": salt}
    mode = mode_of(ask.fields.answer_cache, server)
    around = [ask.tools, ask.tool_choice, ask.template_values, ask.chat_template]
    asked = Asked(ask.messages, around, params, ask.fields.model)
    wish = chat_wish(mode, asked, may_answer=not tools)
    job = Job(prompt, params, ask.fields.priority or 0, ask.fields.timeout, wish)
    if ask.prediction:
        job = job._replace(hint=tuple(await _hint(server, request, ask.prediction)))
    reasoning = server.settings.reasoning_parser or detect_reasoning(
        server.tokenizer.chat_template, text
    )
    if structured is not None:
        reasoning = None  # every token follows the grammar, so there is no room for thinking
    return ChatPlan(job, reasoning, tool_format, choice.is_forced)


async def _hint(server: Server, request: HttpRequest, text: str) -> list[int]:
    spoken = server.settings.engine.speculative_config or {}
    if "hint" not in str(spoken.get("method")).split("+"):
        request.warnings.append("prediction is not used: the engine takes no hints")
        return []
    ids = await server.encode(text, "prediction", add_special_tokens=False)
    return [id for id in ids if id < server.hello.vocab_size]


def _tools(ask: ChatAsk) -> tuple[list[Tool], ToolChoice]:
    tools = check_tools(ask.tools)
    return tools, check_tool_choice(ask.tool_choice, tools)


def _structured(
    ask: ChatAsk, tools: list[Tool], choice: ToolChoice
) -> StructuredOutputsParams | None:
    asked = structured_outputs(ask.fields)
    if not choice.is_forced:
        return asked
    if asked is not None:
        raise BadRequest(
            "got both a forced tool_choice and a structured output; want one of them",
            param="tool_choice",
        )
    schema: dict[str, Any] = forced_schema(tools, choice, ask.parallel_tool_calls)
    return StructuredOutputsParams(json=schema)


def _tool_format(server: Server) -> str:
    found = detect_tool_format(server.tokenizer.chat_template)
    return found or DEFAULT_TOOL_FORMAT


def _template_options(server: Server, ask: ChatAsk) -> dict[str, Any]:
    _check_template_values(ask.template_values)
    if ask.chat_template is not None and not server.settings.trust_request_chat_template:
        raise BadRequest(
            "this server does not take chat templates from clients"
            " (it would have to be started with --trust-request-chat-template)",
            param="chat_template",
        )
    if ask.continue_final_message and ask.add_generation_prompt:
        raise BadRequest(
            "continue_final_message needs add_generation_prompt=false",
            param="continue_final_message",
        )
    return {
        **ask.template_values,
        "add_generation_prompt": ask.add_generation_prompt,
        "continue_final_message": ask.continue_final_message,
        "chat_template": ask.chat_template,
    }


def _check_template_values(values: dict[str, Any]) -> None:
    problem = None
    if len(values) > MAX_TEMPLATE_VALUES:
        problem = f"{len(values)} values, want at most {MAX_TEMPLATE_VALUES}"
    elif own := sorted(RESERVED & values.keys()):
        problem = (
            f"{', '.join(own)}: the server sets that itself; leave it out, or send the request's"
            " own field of that name"
        )
    elif odd := [name for name in values if not name.isidentifier() or name.startswith("_")]:
        problem = f"{odd[0][:60]!r}, want names such as enable_thinking"
    if problem is not None:
        raise BadRequest(f"got chat_template_kwargs with {problem}", param="chat_template_kwargs")


async def render(
    server: Server,
    messages: list[dict[str, Any]],
    tools: list[Tool],
    options: Mapping[str, Any],
) -> str:
    """Messages as the model's template writes them, off the loop when there is much of it."""
    size = sum(len(str(message)) for message in messages)
    server.check_text_size(size, "messages")
    variables = dict(options)
    source = variables.pop("chat_template", None)
    begins = variables.pop("add_generation_prompt", True)
    continues = variables.pop("continue_final_message", False)
    used = server.tokenizer.chat_template if source is None else source
    checked, definitions = template_inputs(messages, tools, used)

    def work() -> str:
        tokenizer = server.tokenizer
        if source is not None:
            tokenizer = tokenizer.with_chat_template(source)
        return tokenizer.render_chat(
            checked, definitions, begins, continue_final_message=continues, variables=variables
        )

    begun = time.monotonic()
    try:
        text = await server.in_thread(work, size)
    except CheckpointError as error:  # it does not compile, or goes out of bounds
        param = "messages" if source is None else "chat_template"
        raise BadRequest(str(error), param=param) from None
    if time.monotonic() - begun > server.limits.template_s:
        raise Problem(400, "the chat template took too long on these messages", param="messages")
    return text
