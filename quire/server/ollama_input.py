"""What Ollama's requests ask, as a `ChatAsk`: its options, messages, tools and formats.

Ollama's messages are nearly chat messages. Its calls have no ids, so they get some here and the
results that follow are matched with them by name and order. Options that only say how a model is
to be loaded are taken and change nothing; others we do not know are named in a warning.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quire.errors import BadRequest
from quire.server.fields import SamplingFields
from quire.server.http import HttpRequest
from quire.server.items import Item, wrong
from quire.server.prompting import ChatAsk
from quire.server.server import Server

LEVELS = ("low", "medium", "high")
_NO_TIME = re.compile(r"0+(\.0*)?(ns|us|ms|s|m|h)?")


class OllamaOptions(msgspec.Struct, kw_only=True):
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # negative: random
    num_predict: int | None = None  # below 1: as far as the context goes
    num_ctx: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # How a model is loaded and run; what comes out does not depend on it.
    embedding_only: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    low_vram: Any = None
    main_gpu: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_keep: Any = None
    num_thread: Any = None
    numa: Any = None
    use_mlock: Any = None
    use_mmap: Any = None
    vocab_only: Any = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """What all requests that run the model have."""

    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None  # the model stays, whatever it says
    truncate: bool | None = None  # of embeddings alone: prompts that are too long are refused

    @property
    def is_farewell(self) -> bool:
        """An empty request that asks to unload the model, and not to load it."""
        if isinstance(self.keep_alive, str):
            return _NO_TIME.fullmatch(self.keep_alive) is not None
        return self.keep_alive == 0


class AnswerFields(OllamaFields, kw_only=True):
    """What `generate` and `chat` share."""

    stream: bool | None = None  # null: yes
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    shift: bool | None = None  # answers end where the context does


class OllamaGenerateFields(AnswerFields, kw_only=True):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    suffix: str | None = None
    images: list[Any] | None = None


class OllamaChatFields(AnswerFields, kw_only=True):
    """`POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaEmbedFields(OllamaFields, kw_only=True):
    """`POST /api/embed`."""

    input: str | list[str] | None = None
    dimensions: int | None = None


class OllamaEmbeddingsFields(OllamaFields, kw_only=True):
    """`POST /api/embeddings`, the older way to embed."""

    prompt: str | None = None


class OllamaModelFields(msgspec.Struct, kw_only=True):
    """A model, under the newer or the older name of the field."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


# ------------------------------------------------------------ options


def note_options(request: HttpRequest, server: Server, options: OllamaOptions | None) -> None:
    """Warn of a context that this server does not have."""
    if options is None or options.num_ctx is None:
        return
    if options.num_ctx > server.max_model_len:
        request.warnings.append(
            f"num_ctx={options.num_ctx} is more than this server's context of"
            f" {server.max_model_len} tokens, which --max-model-len sets"
        )


def max_tokens(fields: AnswerFields) -> int | None:
    wanted = fields.options.num_predict if fields.options is not None else None
    return wanted if wanted is not None and wanted > 0 else None


def sampling_fields(fields: AnswerFields) -> SamplingFields:
    options = fields.options or OllamaOptions()
    is_seeded = options.seed is not None and options.seed >= 0
    return SamplingFields(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed if is_seeded else None,
        stop=options.stop,
        repeat_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        response_format=_response_format(fields.format),
    )


def _response_format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"schema": given}}
    if given == "json":
        return {"type": "json_object"}
    if given:
        raise wrong("format", given, "'json' or a JSON schema")
    return None


def _template_values(think: bool | str | None) -> dict[str, Any]:
    if isinstance(think, str):
        if think not in LEVELS:
            raise wrong("think", think, f"true, false, {', '.join(LEVELS)}")
        return {"enable_thinking": True, "reasoning_effort": think}
    return {} if think is None else {"enable_thinking": think}


# ------------------------------------------------------------ prompts


def generate_ask(fields: OllamaGenerateFields) -> ChatAsk:
    """One turn of the user's, with the system's before it."""
    messages = [{"role": "user", "content": fields.prompt}]
    if fields.system:
        messages.insert(0, {"role": "system", "content": fields.system})
    return ChatAsk(
        messages=messages,
        fields=sampling_fields(fields),
        max_tokens=max_tokens(fields),
        chat_template=fields.template or None,
        template_values=_template_values(fields.think),
    )


def check_generate(fields: OllamaGenerateFields, has_template: bool) -> None:
    """Raises BadRequest for what cannot be done with this prompt."""
    if fields.suffix:
        raise wrong("suffix", fields.suffix, "none: text is continued here, not filled in")
    if fields.images:
        raise wrong("images", fields.images, "none: this server reads text alone")
    if fields.raw or not has_template:
        given: dict[str, object] = {"system": fields.system, "template": fields.template}
        given |= {"context": fields.context} if fields.raw else {}
        bad = next((name for name, value in given.items() if value), None)
        if bad is not None:
            why = "raw: true" if fields.raw else "a model without a chat template"
            raise BadRequest(f"got {bad} with {why}, want the prompt alone", param=bad)


def chat_ask(fields: OllamaChatFields) -> ChatAsk:
    """Raises BadRequest naming the field, or the message by its path."""
    messages = _messages(fields.messages or [])
    last = messages[-1]
    # A last message of the assistant's is the beginning of the answer, which goes on from there.
    says = bool(str(last["content"]).strip()) and "tool_calls" not in last
    goes_on = last["role"] == "assistant" and says
    return ChatAsk(
        messages=messages,
        fields=sampling_fields(fields),
        max_tokens=max_tokens(fields),
        tools=[{"type": "function", **tool} for tool in fields.tools or []],
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        template_values=_template_values(fields.think),
    )


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = _Calls()
    return [_message(Item(one, f"messages[{i}]"), calls) for i, one in enumerate(given)]


def _message(given: Item, calls: _Calls) -> dict[str, Any]:
    if given.get("images"):
        raise wrong(f"{given.where}.images", given.get("images"), "none: this server reads text")
    made: dict[str, Any] = {"role": given.get("role"), "content": given.get("content") or ""}
    if made["role"] == "tool":
        made["name"] = given.get("tool_name") or given.get("name")
        made["tool_call_id"] = given.get("tool_call_id") or calls.answered(made["name"])
    if given.get("thinking"):
        made["reasoning_content"] = given.text("thinking")
    if given.get("tool_calls"):
        made["tool_calls"] = [calls.named(call) for call in given.items("tool_calls")]
    return made


class _Calls:
    """Ids for calls that came without, and which of them a result belongs to."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []  # id and name of calls without a result so far

    def named(self, call: Item) -> dict[str, Any]:
        self._num_calls += 1
        # Nine letters and digits: Mistral's templates refuse other ids.
        id = call.get("id") or f"call{self._num_calls:05d}"
        function = Item(call.get("function"), f"{call.where}.function")
        self._open.append((id, function.text("name")))
        return {"id": id, "type": "function", "function": function.value}

    def answered(self, name: str | None) -> str | None:
        """The id of the oldest open call of that name, or else of the oldest."""
        oldest = next(iter(self._open), None)
        found = next((call for call in self._open if call[1] == name), oldest)
        if found is None:
            return None
        self._open.remove(found)
        return found[0]
