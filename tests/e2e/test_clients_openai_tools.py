"""OpenAI's own Python client with tools and structured output, whole and streamed.

The model is noise, so what these tests see is the grammar at work: whatever it says must parse.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel, ConfigDict, Field

ASK: list[Any] = [{"role": "user", "content": "what is the weather?"}]
MOST = 1_500  # tokens: enough for the longest blanks the grammar allows


class Unit(StrEnum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Weather(BaseModel):
    """Where to look."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)
    unit: Unit


TOOLS: list[Any] = [
    openai.pydantic_function_tool(Weather, name="get_weather"),
    {
        "type": "function",
        "function": {
            "name": "ring",
            "description": "Ring the bell.",
            "parameters": {
                "type": "object",
                "properties": {"loud": {"type": "boolean"}},
                "required": ["loud"],
                "additionalProperties": False,
            },
        },
    },
]


@pytest.fixture
def ask(no_blanks: dict[str, int]) -> dict[str, Any]:
    return {"model": "tiny", "messages": ASK, "max_tokens": MOST, "logit_bias": no_blanks}


# ------------------------------------------------------------ tools


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_fits_its_schema(client: OpenAI, ask: dict[str, Any], seed: int) -> None:
    answer = client.chat.completions.create(
        **ask, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.id
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        Weather.model_validate(arguments)
    else:
        assert call.function.name == "ring" and set(arguments) == {"loud"}


def test_a_named_tool_is_the_one_called(client: OpenAI, ask: dict[str, Any]) -> None:
    choice = {"type": "function", "function": {"name": "ring"}}
    answer = client.chat.completions.create(**ask, tools=TOOLS, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "ring"
    assert isinstance(json.loads(call.function.arguments)["loud"], bool)


def test_auto_leaves_it_to_the_model_and_none_shows_no_tools(
    client: OpenAI, ask: dict[str, Any]
) -> None:
    fields = {**ask, "max_tokens": 6}
    auto = client.chat.completions.create(**fields, tools=TOOLS)
    none = client.chat.completions.create(**fields, tools=TOOLS, tool_choice="none")
    plain = client.chat.completions.create(**fields)
    assert auto.choices[0].message.tool_calls is None
    assert auto.usage and none.usage and plain.usage
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens < auto.usage.prompt_tokens


def calls_of(streamed: list[ChatCompletionChunk]) -> list[dict[str, Any]]:
    """Calls put together the way clients do it: by index, arguments joined."""
    calls: list[dict[str, Any]] = []
    for chunk in streamed:
        for part in chunk.choices[0].delta.tool_calls or []:
            if part.index == len(calls):
                assert part.id and part.function and part.function.name
                calls.append({"id": part.id, "name": part.function.name, "pieces": []})
            assert part.function is not None
            calls[part.index]["pieces"].append(part.function.arguments or "")
    return calls


@pytest.mark.parametrize("seed", range(3))
def test_streamed_calls_arrive_in_pieces_and_parse(
    client: OpenAI, ask: dict[str, Any], seed: int
) -> None:
    """Red when arguments come only at the end, or joined are not the whole answer's."""
    fields = {**ask, "tools": TOOLS[:1], "tool_choice": "required", "seed": seed}
    fields["parallel_tool_calls"] = False
    streamed = list(client.chat.completions.create(**fields, stream=True))
    whole = client.chat.completions.create(**fields).choices[0]
    (call,) = calls_of(streamed)
    assert len(call["pieces"]) > 3
    joined = "".join(call["pieces"])
    Weather.model_validate_json(joined)
    (same,) = whole.message.tool_calls or []
    assert (same.function.name, same.function.arguments) == (call["name"], joined)
    finishes = [c.choices[0].finish_reason for c in streamed if c.choices[0].finish_reason]
    assert finishes == ["tool_calls"] == [whole.finish_reason]


def test_a_call_cut_short_says_length(client: OpenAI, ask: dict[str, Any]) -> None:
    answer = client.chat.completions.create(
        **{**ask, "max_tokens": 25}, tools=TOOLS, tool_choice="required"
    )
    assert answer.choices[0].finish_reason == "length"


def test_the_streaming_helper_parses_tool_calls(client: OpenAI, ask: dict[str, Any]) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(**ask, tools=TOOLS, tool_choice=choice) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert "tool_calls.function.arguments.delta" in kinds


def test_a_round_trip_with_a_tool_s_result(client: OpenAI, ask: dict[str, Any]) -> None:
    first = client.chat.completions.create(**ask, tools=TOOLS, tool_choice="required")
    said = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        for call in said.tool_calls or []
    ]
    messages = [*ASK, said, *results]
    fields = {**ask, "messages": messages, "max_tokens": 5}
    second = client.chat.completions.create(**fields, tools=TOOLS)
    assert second.usage and first.usage
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].function.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
    ],
)
def test_wrong_tools_are_named(
    client: OpenAI, ask: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask, **change)
    assert caught.value.param == param


# ------------------------------------------------------------ structured output


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada", "Alan", "Grace"]
    age: int = Field(ge=0, le=120)
    likes: list[Literal["tea", "math"]] = Field(min_length=1, max_length=2)


def test_parse_gives_the_pydantic_model(client: OpenAI, ask: dict[str, Any]) -> None:
    answer = client.chat.completions.parse(**ask, response_format=Person)
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and 0 <= person.age <= 120


def test_parse_streams(client: OpenAI, ask: dict[str, Any]) -> None:
    with client.chat.completions.stream(**ask, response_format=Person) as stream:
        final = stream.until_done().get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


def test_parse_with_several_answers(client: OpenAI, ask: dict[str, Any]) -> None:
    answer = client.chat.completions.parse(**ask, response_format=Person, n=3, seed=8)
    assert all(isinstance(choice.message.parsed, Person) for choice in answer.choices)


def test_json_object_is_an_object(client: OpenAI, ask: dict[str, Any]) -> None:
    """Objects of noise may be long; a bias towards closing brackets ends them."""
    bias = {**ask["logit_bias"], "95": 6, "4": 4}  # "}" and '"'
    answer = client.chat.completions.create(
        **{**ask, "logit_bias": bias}, response_format={"type": "json_object"}, seed=1
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}, "[a-f]{4}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]+ "y"'}}, "x[0-9]+y"),
        ({"structured_outputs": {"json": {"enum": [1, "b"]}}}, '1|"b"'),
        ({"guided_regex": "(foo|bar)baz"}, "(foo|bar)baz"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'start: "a" | "bb"'}, "a|bb"),
        ({"guided_json": '{"const": true}'}, "true"),
        ({"response_format": {"type": "regex", "regex": "z{3}"}}, "z{3}"),
    ],
)
def test_every_spelling_of_a_constraint_holds(
    client: OpenAI, ask: dict[str, Any], body: dict[str, Any], pattern: str
) -> None:
    answer = client.chat.completions.create(**{**ask, "max_tokens": 200}, extra_body=body)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, (choice.message.content or "").strip())


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "((("},
        {"guided_grammar": "start: ghost"},
        {"structured_outputs": {}, "response_format": {"type": "json_schema"}},
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "choice"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"choice": []}},
    ],
)
def test_a_constraint_that_cannot_hold_is_refused(
    client: OpenAI, ask: dict[str, Any], body: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask, extra_body=body)
    assert caught.value.param
