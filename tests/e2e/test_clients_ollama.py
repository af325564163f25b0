"""Ollama's own Python client against /api."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.e2e.conftest import CONTEXT
from tests.e2e.harness import Served

ASK: list[Any] = [{"role": "user", "content": "what is the weather?"}]
FEW = {"num_predict": 12, "seed": 3}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """
    Look out of the window.

    Args:
      city: Where the window is.
    """
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def llama(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.url) as made:
        yield made


def test_a_desktop_tool_s_first_minute(llama: ollama.Client) -> None:
    """Red when a listed model cannot be shown or asked, or is told to be what it is not."""
    (listed,) = llama.list().models
    assert listed.model == "tiny:latest" and listed.size and len(listed.digest or "") == 64
    assert listed.details is not None and listed.details.family == "llama"
    assert (listed.details.format, listed.details.quantization_level) == ("safetensors", "F32")
    shown = llama.show(listed.model)
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == CONTEXT
    assert shown.modelinfo["general.parameter_count"] > 0
    (running,) = llama.ps().models
    assert (running.name, running.digest) == (listed.model, listed.digest)
    assert llama.generate(listed.model).done_reason == "load"


def test_a_stream_is_the_whole(llama: ollama.Client) -> None:
    whole = llama.chat("tiny", ASK, options=FEW)
    parts = list(llama.chat("tiny", ASK, options=FEW, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert whole.eval_count == parts[-1].eval_count == 12
    assert whole.done_reason == parts[-1].done_reason == "length"
    assert whole.total_duration and whole.eval_duration and whole.prompt_eval_duration
    assert whole.total_duration >= whole.eval_duration


def test_generate_goes_on_from_its_context(llama: ollama.Client) -> None:
    """Red when the ids given out are not those that were read and written."""
    first = llama.generate("tiny", "hello", options=FEW)
    assert first.context is not None
    assert len(first.context) == (first.prompt_eval_count or 0) + 12
    alone = llama.generate("tiny", "and?", options=FEW).prompt_eval_count or 0
    second = llama.generate("tiny", "and?", context=first.context, options=FEW)
    longer = (second.prompt_eval_count or 0) - len(first.context)
    assert 0 < longer <= alone


def test_tools_reach_the_prompt(llama: ollama.Client) -> None:
    """Red when a function given as a tool, its call or its result is refused or forgotten."""
    plain = llama.chat("tiny", ASK, options=FEW).prompt_eval_count or 0
    told = llama.chat("tiny", ASK, tools=[get_weather], options=FEW).prompt_eval_count or 0
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": get_weather("Rome")},
    ]
    after = llama.chat("tiny", turns, tools=[get_weather], options=FEW).prompt_eval_count or 0
    assert plain < told < after


def test_a_format_binds_the_answer(llama: ollama.Client) -> None:
    options = {"num_predict": 1_500}
    said = llama.chat("tiny", ASK, format=SCHEMA, options=options).message.content
    assert json.loads(said or "")["city"] in ("Paris", "Rome")


def test_embeddings(llama: ollama.Client) -> None:
    found = llama.embed("tiny", ["a cat", "a cat", "b " * CONTEXT])
    first, again, long = found.embeddings
    assert first == again != long
    assert sum(x * x for x in long) == pytest.approx(1.0)
    legacy = llama.embeddings("tiny", "a cat").embedding
    length = sum(x * x for x in legacy) ** 0.5
    assert [x / length for x in legacy] == pytest.approx(list(first))


def test_errors(llama: ollama.Client, guarded: Served) -> None:
    """Red when the client shows something else than the sentence we wrote."""
    with pytest.raises(ollama.ResponseError, match=r"^model 'other' not found") as unknown:
        llama.chat("other", ASK)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="got top_p=3") as bad:
        next(iter(llama.chat("tiny", ASK, options={"top_p": 3.0}, stream=True)))
    assert bad.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="quire pull"):
        llama.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="quire serve"):
        llama.delete("tiny")
    with (
        ollama.Client(guarded.url) as stranger,
        pytest.raises(ollama.ResponseError, match="API key"),
    ):
        stranger.list()
