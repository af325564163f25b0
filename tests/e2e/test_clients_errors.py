"""What clients see when something is wrong: the exception each SDK maps it to, and its details."""

from __future__ import annotations

import threading
from typing import Any

import anthropic
import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import ADMIN_KEY, OTHER_KEY, USER_KEY
from tests.e2e.harness import Served

ASK: list[Any] = [{"role": "user", "content": "hi"}]


def with_key(server: Served, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


# ------------------------------------------------------------ 400 and 404


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 99}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"timeout": -1}}, "timeout"),
        ({"extra_body": {"priority": 2**40}}, "priority"),
        ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 3}, "min_tokens"),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words"),
    ],
)
def test_a_bad_request_names_the_field(client: OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": ASK, **change})
    error = caught.value
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert isinstance(error.body, dict) and set(error.body) == {"message", "type", "param", "code"}


def test_too_long_has_the_code_clients_look_for(client: OpenAI) -> None:
    long = "x " * 4096
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": long}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=long)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input=long)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-99", messages=ASK)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_stream_that_cannot_begin_is_an_ordinary_error(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=ASK, stream=True, top_p=7)


# ------------------------------------------------------------ deadlines


def test_a_deadline_is_504_whole_and_an_error_event_streamed(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 4000}
    body = {"timeout": 0.3, "ignore_eos": True}
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**fields, extra_body=body)
    assert caught.value.status_code == 504 and caught.value.code == "deadline_exceeded"
    pieces = []
    with pytest.raises(openai.APIError, match="deadline"):
        for chunk in client.completions.create(**fields, extra_body=body, stream=True):
            pieces.append(chunk.choices[0].text)
    assert "".join(pieces)


# ------------------------------------------------------------ keys


@pytest.mark.parametrize("key", ["wrong", "user-ke", "USER-KEY"])
def test_a_wrong_key_is_an_authentication_error(guarded: Served, key: str) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        with_key(guarded, key).models.list()
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=guarded.url, api_key=key, max_retries=0).messages.create(
            model="tiny", max_tokens=3, messages=ASK
        )


def test_both_ways_of_presenting_a_key_work(guarded: Served) -> None:
    assert [m.id for m in with_key(guarded, USER_KEY).models.list()] == ["tiny"]
    assert guarded.get("/v1/models", {"x-api-key": USER_KEY})[0] == 200
    assert guarded.get("/v1/models", {"x-api-key": "nope"})[0] == 401
    assert guarded.get("/v1/models")[0] == 401


def test_admin_verbs_need_an_admin_key(guarded: Served) -> None:
    def flush(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return guarded.post("/admin/flush_cache", {}, headers)[0]

    assert flush(USER_KEY) == 403
    assert flush(ADMIN_KEY) == 200


def test_keys_do_not_share_cached_prefixes(guarded: Served) -> None:
    """Red when one tenant can see from cached_tokens what another has asked."""

    def cached(key: str) -> int:
        answer = with_key(guarded, key).completions.create(
            model="tiny", prompt="a secret that only one of us knows " * 4, max_tokens=1
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(USER_KEY) == 0
    assert cached(OTHER_KEY) == 0
    assert cached(USER_KEY) > 0


def test_too_many_open_requests_are_rate_limited(guarded: Served) -> None:
    """Red when the third request of a key waits, or a full key shuts out another."""
    client = with_key(guarded, USER_KEY)
    body = {"ignore_eos": True}
    fields: dict[str, Any] = {"model": "tiny", "prompt": "x"}
    open_streams = [
        client.completions.create(**fields, max_tokens=4000, stream=True, extra_body=body)
        for _ in range(2)
    ]
    try:
        for stream in open_streams:
            next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**fields, max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.type == "rate_limit_error"
        other = with_key(guarded, OTHER_KEY).completions.create(**fields, max_tokens=1)
        assert other.usage is not None and other.usage.completion_tokens == 1
    finally:
        for stream in open_streams:
            stream.close()


def test_the_client_s_own_retries_get_through(guarded: Served) -> None:
    """A 429 with Retry-After is what the SDK waits on; red when the header misleads it."""
    client = OpenAI(base_url=f"{guarded.url}/v1", api_key=OTHER_KEY, max_retries=6)
    answers: list[int] = []

    def ask() -> None:
        body = {"ignore_eos": True}
        answer = client.completions.create(
            model="tiny", prompt="x", max_tokens=120, extra_body=body
        )
        assert answer.usage is not None
        answers.append(answer.usage.completion_tokens)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [120] * 4


# ------------------------------------------------------------ headers


def test_request_ids_come_back(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7" and raw.parse().id.endswith("mine-7")
    own = client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1)
    assert own.headers["x-request-id"].startswith("req-")
    bad = client.completions.with_raw_response.create(
        model="tiny", prompt="x", max_tokens=1, extra_headers={"x-request-id": "a b\tc"}
    )
    assert bad.headers["x-request-id"].startswith("req-")


def test_unknown_fields_are_ignored_and_said_to_be(client: OpenAI) -> None:
    """Red when a field that would change the answer is dropped without a word, or refused."""
    body = {"frobnicate": 1, "use_beam_search": True, "metadata": {"a": "b"}, "user": "me"}
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="x", max_tokens=1, extra_body=body
    )
    warning = raw.headers["x-quire-warning"]
    assert "frobnicate" in warning and "use_beam_search" in warning
    assert "metadata" not in warning and "user" not in warning


def test_nulls_stand_for_defaults(served: Served) -> None:
    names = ["temperature", "top_p", "n", "seed", "stop", "max_completion_tokens", "stream"]
    names += ["stream_options", "tools", "tool_choice", "response_format", "logit_bias", "user"]
    nulls = dict.fromkeys([*names, "logprobs", "top_logprobs"])
    body = {"model": None, "messages": ASK, "max_tokens": 2, **nulls}
    assert served.post("/v1/chat/completions", body)[0] == 200


def test_a_grammar_that_other_wishes_forbid_is_the_callers_mistake(client: openai.OpenAI) -> None:
    """Red when contradicting parameters look like a fault of the server."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="tiny",
            prompt="hello",
            max_tokens=40,
            extra_body={"structured_outputs": {"choice": ["ab"]}, "min_tokens": 20},
        )
    assert caught.value.param == "structured_outputs"
