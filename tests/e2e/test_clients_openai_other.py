"""OpenAI's own Python client against completions, embeddings, models and responses."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.completion import Completion
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.harness import Served

FOX = "the quick brown 日本 fox"


def complete(client: OpenAI, prompt: Any = FOX, **fields: Any) -> Completion:
    return client.completions.create(
        **{"model": "tiny", "prompt": prompt, "max_tokens": 6, **fields}
    )


def streamed(client: OpenAI, prompt: Any = FOX, **fields: Any) -> list[Completion]:
    return list(complete(client, prompt, stream=True, **fields))  # type: ignore[call-overload]


# ------------------------------------------------------------ completions


def test_texts_and_ids_in_every_arrangement(client: OpenAI, served: Served) -> None:
    """A text, texts, ids, lists of ids: red when one of them is read as another."""
    _, told = served.post("/tokenize", {"prompt": FOX})
    ids = told["tokens"]
    fields: dict[str, Any] = {"temperature": 0, "extra_body": {"return_token_ids": True}}
    whole = complete(client, **fields)
    assert complete(client, ids, **fields).choices[0].text == whole.choices[0].text
    for several in ([FOX, "a"], [ids, ids[:2]]):
        answer = complete(client, several, **fields)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].text == whole.choices[0].text
        assert answer.choices[0].prompt_token_ids == ids
        assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_the_default_is_sixteen_tokens(client: OpenAI) -> None:
    answer = complete(client, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_special_tokens_may_be_left_off(client: OpenAI, served: Served) -> None:
    _, told = served.post("/tokenize", {"prompt": FOX, "add_special_tokens": False})
    body = {"add_special_tokens": False, "return_token_ids": True}
    assert complete(client, extra_body=body).choices[0].prompt_token_ids == told["tokens"]


def check_logprobs(choice: Any, num_top: int) -> None:
    found = choice.logprobs
    sizes = {len(found.tokens), len(found.token_logprobs), len(found.text_offset)}
    assert sizes == {len(found.top_logprobs)}
    offsets = found.text_offset
    assert offsets == sorted(offsets) and offsets[0] == 0
    for token, value, tops, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, offsets, strict=True
    ):
        if value is None:
            assert tops is None and offset == 0
            continue
        assert tops[token] == value <= 0 and num_top <= len(tops) <= num_top + 1
        if not token.startswith("bytes:"):
            # Where the offset points, the token stands, behind characters that never came to be.
            rest = choice.text[offset:]
            assert rest.startswith(token) or rest.lstrip("\ufffd").startswith(token)


@pytest.mark.parametrize("prompt", [FOX, "naïve café😀"])
def test_logprobs_and_echo(client: OpenAI, prompt: str) -> None:
    plain = complete(client, prompt, logprobs=2, seed=1, max_tokens=9).choices[0]
    check_logprobs(plain, 2)
    echoed = complete(client, prompt, logprobs=2, seed=1, max_tokens=9, echo=True).choices[0]
    assert echoed.text == prompt + plain.text
    check_logprobs(echoed, 2)
    assert echoed.logprobs and plain.logprobs and echoed.logprobs.tokens
    assert echoed.logprobs.tokens[0] == "<s>"
    assert echoed.logprobs.tokens[-9:] == plain.logprobs.tokens


def test_echo_alone_scores_the_prompt(client: OpenAI) -> None:
    """max_tokens=0 with echo is how evaluation harnesses ask for the prompt's own logprobs."""
    answer = complete(client, echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == FOX and answer.usage is not None
    assert answer.usage.completion_tokens == 0
    longer = complete(client, echo=True, logprobs=1, max_tokens=4, temperature=0).choices[0]
    scored = answer.choices[0].logprobs
    assert scored and scored.token_logprobs and longer.logprobs and longer.logprobs.token_logprobs
    assert scored.token_logprobs == longer.logprobs.token_logprobs[:-4]
    assert [c.choices[0].text for c in streamed(client, echo=True, max_tokens=0)] == [FOX, ""]


def test_a_stream_is_the_whole_in_pieces(client: OpenAI) -> None:
    """Text, echo, logprobs, offsets and indices of two prompts with two answers each."""
    fields: dict[str, Any] = {"n": 2, "echo": True, "logprobs": 1, "seed": 3, "max_tokens": 12}
    whole = complete(client, [FOX, "a"], **fields)
    options = {"include_usage": True}
    pieces = streamed(client, [FOX, "a"], **fields, stream_options=options)
    assert pieces[-1].usage == whole.usage and not pieces[-1].choices
    for choice in whole.choices:
        mine = [c for p in pieces for c in p.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [x for c in mine if c.logprobs for x in getattr(c.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]


def test_prompt_logprobs_of_a_completion(client: OpenAI) -> None:
    body = {"prompt_logprobs": 0, "return_token_ids": True}
    choice = complete(client, extra_body=body).choices[0]
    first, *rest = choice.prompt_logprobs
    assert first is None
    assert [list(record) for record in rest] == [[str(i)] for i in choice.prompt_token_ids[1:]]


# ------------------------------------------------------------ embeddings


def test_embeddings_come_as_base64_by_default(client: OpenAI) -> None:
    """The client asks for base64 unless told otherwise; both must be the same vector."""
    packed = client.embeddings.create(model="tiny", input=["one", "two words"])
    plain = client.embeddings.create(
        model="tiny", input=["one", "two words"], encoding_format="float"
    )
    assert [item.index for item in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 2


def test_embeddings_of_ids_dimensions_and_pooling(client: OpenAI, served: Served) -> None:
    _, told = served.post("/tokenize", {"prompt": "one"})
    create = client.embeddings.create
    by_text = create(model="tiny", input="one").data[0].embedding
    assert create(model="tiny", input=[told["tokens"]]).data[0].embedding == by_text
    assert create(model="tiny", input=told["tokens"]).data[0].embedding == by_text
    short = create(model="tiny", input="one", dimensions=7).data[0].embedding
    assert len(short) == 7 and math.hypot(*short) == pytest.approx(1, abs=1e-5)
    last = create(model="tiny", input="one", extra_body={"pooling": "last"}).data[0].embedding
    assert last != by_text
    for bad in ({"dimensions": 9999}, {"encoding_format": "hex"}, {"input": []}):
        with pytest.raises(openai.BadRequestError) as caught:
            create(**{"model": "tiny", "input": "one", **bad})  # type: ignore[arg-type]
        assert caught.value.param == next(iter(bad))


# ------------------------------------------------------------ models


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert model.object == "model" and model.max_model_len == 4096
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-99")
    assert caught.value.code == "model_not_found"


# ------------------------------------------------------------ responses


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    operation: Literal["add", "subtract"]
    left: int = Field(ge=0, le=99)
    right: int = Field(ge=0, le=99)


def test_responses_create(client: OpenAI) -> None:
    answer = client.responses.create(
        model="tiny", input="hello", instructions="be brief", max_output_tokens=7
    )
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 7
    assert answer.output_text == answer.output[0].content[0].text  # type: ignore[union-attr]


def test_responses_stream_is_the_whole(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 12}
    body = {"seed": 5}
    whole = client.responses.create(**fields, extra_body=body)
    events = list(client.responses.create(**fields, stream=True, extra_body=body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    joined = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert joined == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text


def test_responses_parse(client: OpenAI) -> None:
    answer = client.responses.parse(model="tiny", input="1 + 1", text_format=Sum)
    assert isinstance(answer.output_parsed, Sum) and answer.status == "completed"


def test_responses_tools(client: OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Sum, name="compute")["function"] | {
        "type": "function"
    }
    answer = client.responses.create(
        model="tiny", input="1 + 1", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "compute"
    Sum.model_validate_json(call.arguments)


def test_responses_async_stream_helper(served: Served) -> None:
    async def ask() -> str:
        fields: Any = {"model": "tiny", "input": "1 + 1", "text_format": Sum}
        async with (
            openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client,
            client.responses.stream(**fields) as stream,
        ):
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert isinstance(final.output_parsed, Sum)
        return final.output_text

    assert json.loads(asyncio.run(ask()))["operation"] in ("add", "subtract")
