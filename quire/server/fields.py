"""Request bodies as msgspec structs: typed decoding, and the errors it gives.

Every field may be null, because real clients send nulls for what they do not set. Fields we know
and have no use for are listed, so that only truly unknown ones are named in the warning header; in
`structured_outputs`, where ignoring one would lift a constraint, they are refused.
What the values mean is `sampling.py`'s and the handlers' business.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from quire.server.http import HttpRequest
from quire.server.items import Item
from quire.server.problems import Problem

T = TypeVar("T", bound=msgspec.Struct)

# OpenAI and vLLM fields that change nothing about the answer here, so not worth a warning.
QUIET = frozenset(
    (
        *("metadata", "store", "service_tier", "user", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "verbosity", "modalities", "request_id", "response_role"),
        "spaces_between_special_tokens",
    )
)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredFields(msgspec.Struct):
    """vLLM's `structured_outputs`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and plain completions share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # llama.cpp's name for it
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None  # 0: no drafts for this request
    answer_cache: str | None = None  # off, exact, draft or answer
    vllm_xargs: dict[str, Any] | None = None  # vLLM's place for it
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatFields(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None


class CompletionFields(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]  # a text, ids, or several of either
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class GenerateFields(msgspec.Struct, kw_only=True):
    """`/v1/generate`: a prompt and a few knobs, the plainest way in."""

    prompt: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    priority: int | None = None


class EmbeddingFields(msgspec.Struct, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


class PairFields(msgspec.Struct, kw_only=True):
    """What scores and ranks share."""

    model: str | None = None
    pooling: str | None = None  # of the embeddings, where the model has no head
    use_activation: bool | None = None  # False: the head's plain numbers
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


class ScoreFields(PairFields, kw_only=True):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None  # vLLM's other names for the two
    documents: str | list[str] | None = None


class RerankFields(PairFields, kw_only=True):
    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None  # 0: all
    return_documents: bool | None = None


class ClassifyFields(msgspec.Struct, kw_only=True):
    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_generation_prompt: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


class PoolingFields(ClassifyFields, kw_only=True):
    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    pooling: str | None = None
    normalize: bool | None = None


class TokenizeFields(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def decode(request: HttpRequest, kind: type[T]) -> T:
    """The body as a struct; raises Problem 400 naming the field, what came and what is wanted."""
    if not request.body:
        raise Problem(400, "got an empty body, want a JSON object")
    try:
        fields = _decoder(kind).decode(request.body)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        param = found.group(1) if found else None
        raise Problem(
            400, f"bad value for {param or 'the body'}: {_PATH.sub('', text)}", param=param
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is not valid JSON: {_short(error)}") from None
    _note_unknown(request, kind)
    return fields


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    return decoder


_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {}
_TOP_LEVEL = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _note_unknown(request: HttpRequest, kind: type[msgspec.Struct]) -> None:
    given = _TOP_LEVEL.decode(request.body)
    known = _known(kind)
    unknown = [name for name in given if name not in known]
    for name, inside in _inner_structs(kind).items():
        values = msgspec.json.decode(given[name]) if name in given else None
        if values is None:
            continue
        known_inside = inside.__struct_fields__
        if inside is StructuredFields:
            Item(values, name).only(known_inside)
        unknown += [
            f"{name}.{key}"
            for key, value in values.items()
            if key not in known_inside and value is not None
        ]
    if unknown:
        shown = ", ".join(name[:40] for name in unknown[:10])
        request.warnings.append(f"ignored unknown fields: {shown}")


@cache
def _known(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset((*kind.__struct_fields__, *QUIET))


@cache
def _inner_structs(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields that are structs themselves."""
    return {
        field.name: choice
        for field in msgspec.structs.fields(kind)
        for choice in get_args(field.type)
        if isinstance(choice, type) and issubclass(choice, msgspec.Struct)
    }


def _short(error: BaseException) -> str:
    return str(error)[:200]
