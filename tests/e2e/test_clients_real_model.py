"""A few requests to the default model, where what is said matters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.e2e.harness import Served

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]


class Capital(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Berlin", "Paris", "Rome"]
    country: Literal["France"]


@pytest.fixture(scope="module")
def real(served_real: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served_real.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_it_answers_and_stops_by_itself(real: OpenAI) -> None:
    answer = real.chat.completions.create(
        model="tiny", messages=CAPITAL, temperature=0, max_tokens=60
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_structured_output_is_what_the_model_means(real: OpenAI) -> None:
    """Red when the grammar's mask hides the tokens the model wants, not only those it may not."""
    answer = real.chat.completions.parse(
        model="tiny", messages=CAPITAL, temperature=0, response_format=Capital, max_tokens=60
    )
    assert answer.choices[0].message.parsed == Capital(city="Paris", country="France")


def test_a_stop_string_in_real_text(real: OpenAI) -> None:
    answer = real.completions.create(
        model="tiny", prompt="one, two, three, four,", temperature=0, max_tokens=30, stop=["eight"]
    )
    assert answer.choices[0].text.startswith(" five, six")
    assert answer.choices[0].finish_reason == "stop"
