"""What a Responses request asks, as a `ChatAsk`: items to messages, flat tools to nested ones.

What the conversation goes on from comes from the store (`turns.py`). Everything that is not text is
refused. The answer's shape is `responses_output.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.errors import BadRequest
from quire.server.fields import SamplingFields
from quire.server.items import Item, wrong
from quire.server.prompting import ChatAsk
from quire.server.transcript import Transcript

LOGPROBS = "message.output_text.logprobs"
ROLES = ("user", "assistant", "system", "developer")
TEXT_KEYS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}


class TextFields(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningFields(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesFields(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`; from `top_k` on, fields OpenAI does not have."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    answer_cache: str | None = None


def chat_ask(fields: ResponsesFields, history: Sequence[dict[str, Any]] = ()) -> ChatAsk:
    """Raises BadRequest naming the field, or the item by its path. `history`: items before it."""
    _refuse_unknown(fields)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or [])]
    choice, tools = _tool_choice(fields.tool_choice, tools)
    values: dict[str, Any] = {}
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        effort = fields.reasoning.effort
        values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return ChatAsk(
        messages=_messages(fields, history),
        fields=_sampling(fields),
        max_tokens=fields.max_output_tokens,
        logprobs=num_logprobs(fields),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        template_values=values,
    )


def num_logprobs(fields: ResponsesFields) -> int | None:
    """How many alternatives per token; None when logprobs are not wanted."""
    if LOGPROBS in (fields.include or ()):
        return fields.top_logprobs or 0
    return fields.top_logprobs or None


def _refuse_unknown(fields: ResponsesFields) -> None:
    if fields.prompt is not None:
        raise BadRequest(
            "got prompt, but no prompts are stored here; send instructions and input",
            param="prompt",
        )
    if fields.truncation not in (None, "auto", "disabled"):
        raise wrong("truncation", fields.truncation, "'disabled' or 'auto'")


# ------------------------------------------------------------ sampling


def _sampling(fields: ResponsesFields) -> SamplingFields:
    return SamplingFields(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        stop=fields.stop,
        repetition_penalty=fields.repetition_penalty,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        timeout=fields.timeout,
        answer_cache=fields.answer_cache,
        model=fields.model,
        response_format=_response_format(fields.text),
    )


def _response_format(text: TextFields | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    given = Item(text.format, "text.format")
    kind = given.get("type")
    if kind == "text" or (kind == "json_object" and given.get("schema") is None):
        given.only(("type",))
        return {"type": kind}
    if kind in ("json_schema", "json_object"):
        schema = Item(given.get("schema"), "text.format.schema")
        return {"type": kind, "schema": schema.value}
    raise wrong("text.format.type", kind, "text, json_object or json_schema")


# ------------------------------------------------------------ tools


def _tool(given: dict[str, Any], where: str) -> dict[str, Any]:
    if given.get("type") != "function":
        raise wrong(f"{where}.type", given.get("type"), "'function': no tools are run here")
    Item(given, where).text("name")  # by which tool_choice may pick tools
    keys = ("name", "description", "parameters", "strict")
    function = {key: given[key] for key in keys if given.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]]]:
    """OpenAI's chat form of it, and the tools it leaves."""
    if not isinstance(choice, dict):
        return choice, tools
    item = Item(choice, "tool_choice")
    if item.get("type") == "function":
        return {"type": "function", "function": {"name": item.text("name")}}, tools
    if item.get("type") == "allowed_tools":
        names = {tool.text("name") for tool in item.items("tools")}
        return item.text("mode"), [t for t in tools if t["function"].get("name") in names]
    raise wrong("tool_choice.type", item.get("type"), "'function' or 'allowed_tools'")


# ------------------------------------------------------------ the conversation


def _messages(fields: ResponsesFields, history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    transcript = Transcript()
    if fields.instructions is not None:
        transcript.instruct(fields.instructions)
    read_items(transcript, history, "conversation")
    if isinstance(fields.input, str):
        transcript.say("user", fields.input)
    else:
        read_items(transcript, fields.input, "input")
    return transcript.messages


def read_items(transcript: Transcript, items: Sequence[dict[str, Any]], where: str) -> None:
    """Raises BadRequest naming the item by its path."""
    for i, item in enumerate(items):
        _add_item(transcript, Item(item, f"{where}[{i}]"))


def _add_item(transcript: Transcript, item: Item) -> None:
    kind = item.get("type")
    if kind is None or kind == "message":
        _add_message(transcript, item)
    elif kind == "function_call":
        arguments = item.text("arguments")
        transcript.call(item.text("call_id"), item.text("name"), arguments)
    elif kind == "function_call_output":
        transcript.result(item.text("call_id"), _content(item, "output"))
    elif kind == "reasoning":
        transcript.think("\n".join(_part(part) for part in item.items("content")))
    elif kind == "item_reference":
        raise wrong(
            f"{item.where}.type", kind, "the item itself: there is nothing stored it could name"
        )
    else:
        wanted = "message, function_call, function_call_output or reasoning"
        raise wrong(f"{item.where}.type", kind, wanted)


def _add_message(transcript: Transcript, item: Item) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise wrong(f"{item.where}.role", role, " or ".join(ROLES))
    text = _content(item, "content")
    if role in ("system", "developer"):
        transcript.instruct(text)
    else:
        transcript.say(role, text)


def _content(item: Item, key: str) -> str:
    if isinstance(item.get(key), str):
        return item.text(key)
    if not isinstance(item.get(key), list):
        raise wrong(f"{item.where}.{key}", item.get(key), "a string or a list of text parts")
    return "\n".join(_part(part) for part in item.items(key))


def _part(part: Item) -> str:
    kind = part.get("type")
    key = TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        wanted = "input_text or output_text: this server takes text, not images, audio or files"
        raise wrong(f"{part.where}.type", kind, wanted)
    return part.text(key)
