"""What a Messages request asks, as a `ChatAsk`: Anthropic's turns of blocks to chat messages.

Turns of one role in a row are one turn, as Anthropic has it; results of tools, which it puts into
the user's turn, become messages of their own. Only text: images and documents are refused, and so
are tools that a server would have to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.server.fields import SamplingFields
from quire.server.items import Item, wrong
from quire.server.prompting import ChatAsk
from quire.server.transcript import Transcript

ROLES = ("user", "assistant", "system")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class OutputConfig(msgspec.Struct):
    format: dict[str, Any] | None = None
    effort: str | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """What makes the prompt, for `messages` and `count_tokens` alike."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # prefixes are cached without being told to


class CountTokensFields(PromptFields, kw_only=True):
    """`POST /v1/messages/count_tokens`."""


class MessagesFields(PromptFields, kw_only=True):
    """`POST /v1/messages`; from `seed` on, fields Anthropic does not have."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


def message_ask(fields: MessagesFields) -> ChatAsk:
    """Raises BadRequest naming the field, or the block by its path."""
    ask = prompt_ask(fields)
    ask.max_tokens = fields.max_tokens
    ask.tool_choice, ask.parallel_tool_calls = _tool_choice(fields.tool_choice)
    ask.fields = SamplingFields(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stop=fields.stop_sequences,
        seed=fields.seed,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        timeout=fields.timeout,
        response_format=_response_format(fields.output_config),
    )
    return ask


def prompt_ask(fields: PromptFields) -> ChatAsk:
    """As much of the request as the prompt depends on."""
    messages = _messages(fields)
    choice, _ = _tool_choice(fields.tool_choice)
    # A last turn of the assistant's is the beginning of the answer, which goes on from there.
    goes_on = bool(messages) and messages[-1]["role"] == "assistant"
    return ChatAsk(
        messages=messages,
        fields=SamplingFields(),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or [])],
        tool_choice="none" if choice == "none" else None,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        template_values=_template_values(fields),
    )


def _template_values(fields: PromptFields) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if fields.thinking is not None:
        kind = Item(fields.thinking, "thinking").text("type")
        values["enable_thinking"] = kind != "disabled"
    if fields.output_config is not None and fields.output_config.effort is not None:
        values["reasoning_effort"] = fields.output_config.effort
    return values


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    given = Item(config.format, "output_config.format")
    if given.get("type") != "json_schema":
        raise wrong("output_config.format.type", given.get("type"), "'json_schema'")
    schema = Item(given.get("schema"), "output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"schema": schema.value}}


# ------------------------------------------------------------ tools


def _tool(given: dict[str, Any], where: str) -> dict[str, Any]:
    if given.get("type") not in (None, "custom"):
        wanted = "'custom' or none: no tools are run here"
        raise wrong(f"{where}.type", given.get("type"), wanted)
    function = {"name": given.get("name"), "description": given.get("description")}
    return {"type": "function", "function": function | {"parameters": given.get("input_schema")}}


def _tool_choice(given: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """OpenAI's form of it, and whether calls may be made in parallel."""
    if given is None:
        return None, True
    choice = Item(given, "tool_choice")
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.text("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.text("name")}}, is_parallel
    if kind not in CHOICES:
        raise wrong("tool_choice.type", kind, "auto, any, tool or none")
    return CHOICES[kind], is_parallel


# ------------------------------------------------------------ the conversation


def _messages(fields: PromptFields) -> list[dict[str, Any]]:
    transcript = Transcript()
    if isinstance(fields.system, str):
        transcript.instruct(fields.system)
    elif fields.system is not None:
        blocks = [Item(block, f"system[{i}]") for i, block in enumerate(fields.system)]
        transcript.instruct(_joined(blocks))
    for role, blocks in _turns(fields.messages):
        if role == "assistant":
            _add_assistant(transcript, blocks)
        elif role == "user":
            _add_user(transcript, blocks)
        else:
            transcript.instruct(_joined(blocks))
    return transcript.messages


def _turns(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[Item]]]:
    """Neighbours of one role together, all content as blocks."""
    role, blocks = "", list[Item]()
    for i, given in enumerate(messages):
        message = Item(given, f"messages[{i}]")
        if message.get("role") not in ROLES:
            raise wrong(f"{message.where}.role", message.get("role"), " or ".join(ROLES))
        if message.get("role") != role:
            if blocks:
                yield role, blocks
            role, blocks = message.text("role"), []
        blocks += _blocks(message)
    if blocks:
        yield role, blocks


def _blocks(message: Item) -> list[Item]:
    content = message.get("content")
    if isinstance(content, str):
        return [Item({"type": "text", "text": content}, f"{message.where}.content")]
    if not isinstance(content, list):
        raise wrong(f"{message.where}.content", content, "a string or a list of blocks")
    return message.items("content")


def _add_assistant(transcript: Transcript, blocks: Sequence[Item]) -> None:
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            transcript.think(block.text("thinking"))
        elif kind == "tool_use":
            given = Item(block.get("input"), f"{block.where}.input").value
            transcript.call(block.text("id"), block.text("name"), given)
        elif kind != "redacted_thinking":
            transcript.say("assistant", _text(block))


def _add_user(transcript: Transcript, blocks: Sequence[Item]) -> None:
    said: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            transcript.result(block.text("tool_use_id"), _result(block))
        else:
            said.append(_text(block))
    if said:
        transcript.say("user", "\n".join(said))


def _result(block: Item) -> str:
    content = block.get("content")
    if content is None:
        return ""
    return content if isinstance(content, str) else _joined(block.items("content"))


def _joined(blocks: Sequence[Item]) -> str:
    return "\n".join(_text(block) for block in blocks)


def _text(block: Item) -> str:
    if block.get("type") != "text":
        wanted = "'text': this server takes text, not images, documents or searches"
        raise wrong(f"{block.where}.type", block.get("type"), wanted)
    return block.text("text")
