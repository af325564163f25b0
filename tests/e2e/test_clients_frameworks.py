"""Frameworks that sit on OpenAI's API: LangChain and Instructor, as their users would use them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.harness import Served


class Ticket(BaseModel):
    """What somebody wants."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["bug", "wish", "question"]
    urgency: int = Field(ge=1, le=5)
    tags: list[Literal["ui", "api"]] = Field(min_length=1, max_length=2)


@tool
def look_up(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"{city}: sunny for {days} days"


@pytest.fixture
def lang(served: Served, no_blanks: dict[str, int]) -> ChatOpenAI:
    bias = {int(token): bias for token, bias in no_blanks.items()}
    return ChatOpenAI(
        base_url=f"{served.url}/v1",
        api_key="any",
        model="tiny",
        max_tokens=1_000,
        max_retries=0,
        logit_bias=bias,
    )


# ------------------------------------------------------------ LangChain


def test_langchain_invoke_and_stream_agree(lang: ChatOpenAI) -> None:
    model = lang.bind(seed=7, max_tokens=20)
    said = model.invoke("hello")
    pieces = list(model.stream("hello"))
    assert said.content == "".join(str(piece.content) for piece in pieces)
    assert said.usage_metadata is not None and said.usage_metadata["output_tokens"] == 20
    assert said.response_metadata["finish_reason"] == "length"
    (batched,) = model.batch([[HumanMessage("hello")]])
    assert batched.content == said.content


def test_langchain_ainvoke(lang: ChatOpenAI) -> None:
    said = asyncio.run(lang.bind(max_tokens=4).ainvoke("hello"))
    assert isinstance(said, AIMessage)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(lang: ChatOpenAI, method: Any) -> None:
    assert isinstance(lang.with_structured_output(Ticket, method=method).invoke("help"), Ticket)


def test_langchain_tools_there_and_back(lang: ChatOpenAI) -> None:
    bound = lang.bind_tools([look_up], tool_choice="any", parallel_tool_calls=False)
    said = bound.invoke("weather?")
    (call,) = said.tool_calls
    result: ToolMessage = look_up.invoke(call)
    assert "sunny" in str(result.content)
    after = lang.bind_tools([look_up]).bind(max_tokens=3)
    assert after.invoke([HumanMessage("weather?"), said, result]).usage_metadata
    streamed = list(bound.stream("weather?"))
    whole = streamed[0]
    for piece in streamed[1:]:
        whole = whole + piece
    assert whole.tool_calls[0]["name"] == "look_up" and len(streamed) > 5


def test_langchain_embeddings(served: Served) -> None:
    """Its client sends lists of token ids unless told not to; the server's are not OpenAI's."""
    model = OpenAIEmbeddings(
        base_url=f"{served.url}/v1", api_key="any", model="tiny", check_embedding_ctx_length=False
    )
    one, other = model.embed_documents(["one", "another"])
    assert one == model.embed_query("one") != other


def test_langchain_completions(served: Served) -> None:
    model = OpenAI(base_url=f"{served.url}/v1", api_key="any", model="tiny", max_tokens=5)
    assert isinstance(model.invoke("once upon"), str)
    assert len(model.generate(["a", "b"]).generations) == 2


# ------------------------------------------------------------ Instructor


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(served: Served, no_blanks: dict[str, int], mode: instructor.Mode) -> None:
    plain = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    client = instructor.from_openai(plain, mode=mode)
    ticket = client.chat.completions.create(
        model="tiny",
        response_model=Ticket,
        messages=[{"role": "user", "content": "it is broken"}],
        max_tokens=1_000,
        max_retries=0,
        logit_bias=no_blanks,
    )
    assert isinstance(ticket, Ticket) and 1 <= ticket.urgency <= 5


def test_instructor_streams_partials(served: Served, no_blanks: dict[str, int]) -> None:
    plain = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    partials = list(
        client.chat.completions.create_partial(
            model="tiny",
            response_model=Ticket,
            messages=[{"role": "user", "content": "it is broken"}],
            max_tokens=1_000,
            logit_bias=no_blanks,
        )
    )
    assert len(partials) > 3 and partials[-1].kind in ("bug", "wish", "question")
