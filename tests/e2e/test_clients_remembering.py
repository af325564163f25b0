"""Stored responses through OpenAI's own client against a real server: cached prefixes, kills."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from tests.e2e.harness import Served, wait_until
from tests.tiny_folder import write_tiny_folder

FLAGS = ("--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "8")
STORY = "It was a dark and stormy night, and nobody was out but the cat. " * 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4_096)
    with Served(folder, *FLAGS, "--accept-any-model") as made:
        yield made


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)


def respond(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.responses.create(model="gpt-any", input=text, max_output_tokens=8, **fields)


def test_a_chain_hits_the_prefix_cache(client: openai.OpenAI) -> None:
    """Red when a conversation that goes on is read from its beginning again."""
    first = respond(client, STORY, instructions="Tell me more.")
    assert first.usage.input_tokens_details.cached_tokens == 0
    second = respond(
        client, "And then?", instructions="Tell me more.", previous_response_id=first.id
    )
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens - 16  # a page may be cut where the answer begins
    talk = client.conversations.create(items=[{"role": "user", "content": STORY[::-1]}])
    before = respond(client, "one", conversation=talk.id)
    after = respond(client, "two", conversation=talk.id)
    cached = after.usage.input_tokens_details.cached_tokens
    assert cached >= before.usage.input_tokens - 16
    assert len(client.conversations.items.list(talk.id, limit=50).data) == 5


def is_done(client: openai.OpenAI, id: str) -> bool:
    return client.responses.retrieve(id).status in ("completed", "incomplete")


def test_kills_do_not_end_what_runs_in_the_background(
    served: Served, client: openai.OpenAI
) -> None:
    """Red when the death of the API process and of the engine costs somebody a response."""
    asked: Any = {"model": "tiny", "input": "hi", "temperature": 0, "max_output_tokens": 400}
    plain = respond(client, "hello")
    made = [client.responses.create(**asked, background=True) for _ in range(2)]
    served.api.kill()
    served.engine.kill()
    wait_until(served.is_ready, 60, "ready again")
    for one in made:
        wait_until(partial(is_done, client, one.id), 60, "the response")
    texts = {client.responses.retrieve(one.id).output_text for one in made}
    assert len(texts) == 1
    assert client.responses.retrieve(plain.id).output_text == plain.output_text


def test_cancelling_frees_the_engine(served: Served, client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="tiny", input="hi", background=True, max_output_tokens=4_000
    )
    time.sleep(0.2)
    assert client.responses.cancel(made.id).status in ("cancelled", "completed", "incomplete")
    served.wait_idle()


def test_any_model_is_there(client: openai.OpenAI) -> None:
    assert client.models.retrieve("gpt-any").id == "gpt-any"
