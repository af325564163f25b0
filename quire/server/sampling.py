"""Request fields -> SamplingParams, within the server's limits.

`SamplingParams` checks ranges itself; here are only the bounds a shared server adds (how many
answers, logprobs, stops), aliases, and the several spellings of structured output.
"""

from __future__ import annotations

import math
from typing import Any

from quire.errors import BadRequest, shown
from quire.params import SamplingParams, StructuredOutputsParams
from quire.server.fields import SamplingFields, StructuredFields
from quire.server.items import Item
from quire.server.settings import Limits, ServeSettings

_PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "num_speculative_tokens",
)


def sampling_params(
    fields: SamplingFields,
    settings: ServeSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Raises BadRequest naming the field."""
    _check_bounds(fields, settings.limits, logprobs)
    values: dict[str, Any] = dict(settings.default_sampling)
    for name in _PASSED:
        if (value := getattr(fields, name)) is not None:
            values[name] = value
    if fields.repetition_penalty is None and fields.repeat_penalty is not None:
        values["repetition_penalty"] = fields.repeat_penalty
    if fields.vllm_xargs is not None:
        values["extra_args"] = fields.vllm_xargs
    if fields.logit_bias is not None:
        values["logit_bias"] = _biases(fields.logit_bias)
    return SamplingParams(
        **values, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=structured
    )


def _check_bounds(fields: SamplingFields, limits: Limits, logprobs: int | None) -> None:
    for name, value, least, most in (
        ("n", fields.n, 1, limits.max_n),
        ("logprobs", logprobs, 0, limits.max_logprobs),
        ("prompt_logprobs", fields.prompt_logprobs, 0, limits.max_logprobs),
    ):
        if value is not None and not least <= value <= most:
            want = f"a whole number from {least} to {most}"
            raise BadRequest(f"got {name}={value}, want {want}", param=name)
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > limits.max_stops or any(
        not 1 <= len(text) <= limits.max_stop_chars for text in stops
    ):
        raise BadRequest(
            f"got stop={shown(fields.stop)}, want up to {limits.max_stops} strings of 1 to"
            f" {limits.max_stop_chars} characters",
            param="stop",
        )
    for name, words in (
        ("bad_words", fields.bad_words),
        ("stop_token_ids", fields.stop_token_ids),
    ):
        if words is not None and len(words) > limits.max_bad_words:
            raise BadRequest(
                f"got {len(words)} {name}, want at most {limits.max_bad_words}", param=name
            )
    if fields.timeout is not None and not (0 < fields.timeout < math.inf):
        raise BadRequest(f"got timeout={fields.timeout}, want seconds above 0", param="timeout")


def _biases(biases: dict[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise BadRequest(
                f"got logit_bias for {token[:40]!r}, want token ids as keys", param="logit_bias"
            )
        found[int(token)] = bias
    return found


# ------------------------------------------------------------ structured output


def structured_outputs(fields: SamplingFields) -> StructuredOutputsParams | None:
    """OpenAI's response_format, vLLM's structured_outputs or the older guided_* fields."""
    asked: dict[str, StructuredOutputsParams] = {}
    if fields.response_format is not None:
        made = _response_format(fields.response_format)
        if made is not None:
            asked["response_format"] = made
    if (own := fields.structured_outputs) is not None:
        given = {
            name: value
            for name in StructuredFields.__struct_fields__
            if (value := getattr(own, name)) is not None
        }
        asked["structured_outputs"] = StructuredOutputsParams(**given)
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{name}")
        if value is not None:
            asked[f"guided_{name}"] = StructuredOutputsParams(**{name: value})
    if len(asked) > 1:
        raise BadRequest(f"got {' and '.join(asked)}, want only one of them", param=list(asked)[1])
    return next(iter(asked.values()), None)


_SCHEMA_KEYS = ("name", "description", "schema", "strict")
_FORMAT_KEYS: dict[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type", "schema"),  # with a schema, as llama.cpp and others have it
    "json_schema": ("type", "json_schema", *_SCHEMA_KEYS),  # nested or, as in Responses, flat
    "regex": ("type", "regex", "value"),
    "choice": ("type", "choice", "value"),
    "grammar": ("type", "grammar", "value"),
    "ebnf": ("type", "ebnf", "value"),
}


def _response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise BadRequest(
            f"got response_format.type={str(kind)[:40]!r},"
            " want text, json_object, json_schema, regex, choice or grammar",
            param="response_format.type",
        )
    Item(given, "response_format").only(_FORMAT_KEYS[kind])
    if kind == "text":
        return None
    if kind == "json_schema" or given.get("schema") is not None:
        return StructuredOutputsParams(json=_format_schema(given))
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    value = given.get(kind, given.get("value"))
    if value is None:
        raise BadRequest(
            f"response_format of type {kind} needs {kind}", param=f"response_format.{kind}"
        )
    wanted: dict[str, Any] = {"grammar" if kind == "ebnf" else kind: value}
    return StructuredOutputsParams(**wanted)


def _format_schema(given: dict[str, Any]) -> dict[str, Any]:
    schema, holder = given.get("schema"), given.get("json_schema")
    if isinstance(holder, dict):
        # OpenAI lets the schema be absent: any JSON.
        schema = Item(holder, "response_format.json_schema").only(_SCHEMA_KEYS).get("schema")
        schema = {} if schema is None else schema
    if not isinstance(schema, dict):
        raise BadRequest(
            f"response_format of type {given['type']} needs a schema, an object",
            param="response_format",
        )
    return schema
