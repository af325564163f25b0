"""OpenAI's agents SDK, unmodified: tools, a conversation kept here, and a chain of responses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest

from tests.e2e.harness import Served

agents: Any = pytest.importorskip(
    "agents", reason="openai-agents is not installed (the extra test)"
)


@pytest.fixture(scope="module")
def real(served_real: Served) -> Iterator[Served]:
    agents.set_tracing_disabled(True)
    yield served_real


def agent_of(served: Served, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    settings = agents.ModelSettings(max_tokens=400, temperature=0.0, **fields.pop("settings", {}))
    return agents.Agent(
        name="helper",
        instructions="You are a helpful assistant.",
        model=agents.OpenAIResponsesModel("default", client),
        model_settings=settings,
        **fields,
    )


def test_an_agent_calls_its_tool(real: Served) -> None:
    """Red when the SDK's loop of call and result breaks anywhere."""
    asked: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"It is sunny in {city}."

    agent = agent_of(real, tools=[weather], settings={"tool_choice": "required"})
    done = asyncio.run(agents.Runner.run(agent, "What is the weather in Rome?", max_turns=4))
    assert asked and done.final_output
    kinds = [item.type for item in done.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert kinds[-1] == "message_output_item"


def test_a_session_kept_by_the_server(real: Served) -> None:
    async def work() -> None:
        agent = agent_of(real)
        client = openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="any", max_retries=0)
        session = agents.OpenAIConversationsSession(openai_client=client)
        await agents.Runner.run(agent, "My name is Ada. Say hello.", session=session)
        await agents.Runner.run(agent, "What is my name?", session=session)
        items = await session.get_items()
        assert [item.get("role") for item in items] == ["user", "assistant"] * 2
        await session.pop_item()
        assert len(await session.get_items()) == 3
        await session.clear_session()

    asyncio.run(work())


def test_a_chain_of_responses(real: Served) -> None:
    async def work() -> None:
        agent = agent_of(real)
        first = await agents.Runner.run(agent, "My name is Ada. Say hello.")
        second = await agents.Runner.run(
            agent, "What is my name?", previous_response_id=first.last_response_id
        )
        usage = second.raw_responses[-1].usage
        assert usage.input_tokens_details.cached_tokens > 0
        streamed = agents.Runner.run_streamed(
            agent, "Say yes.", previous_response_id=second.last_response_id
        )
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds and streamed.final_output

    asyncio.run(work())


def test_a_conversation_by_its_id(real: Served) -> None:
    async def work() -> None:
        client = openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="any", max_retries=0)
        talk = await client.conversations.create()
        agent = agent_of(real)
        for text in ("My name is Ada.", "What is my name?"):
            await agents.Runner.run(agent, text, conversation_id=talk.id)
        items = await client.conversations.items.list(talk.id)
        assert len(items.data) == 4

    asyncio.run(work())
