"""OpenAI's own Python client against /v1/chat/completions: parameters, counts, streams."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.e2e.harness import Served

HELLO: list[Any] = [{"role": "user", "content": "the quick brown fox"}]


def chat(client: OpenAI, **fields: Any) -> ChatCompletion:
    """As many tokens as are asked for: without a bias the end token is drawn now and then only."""
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 8, **fields}
    if "logit_bias" not in fields:
        given["extra_body"] = {"ignore_eos": True} | fields.get("extra_body", {})
    return client.chat.completions.create(**given)


def chunks(client: OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    return list(chat(client, stream=True, **fields))  # type: ignore[call-overload]


def text_of(streamed: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [c for chunk in streamed for c in chunk.choices if c.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


# ------------------------------------------------------------ shapes and counts


def test_an_answer_has_openai_s_shape_and_true_counts(client: OpenAI, served: Served) -> None:
    """Red when a field the client's types require is gone, or usage does not count tokens."""
    answer = chat(client, extra_body={"return_token_ids": True})
    ChatCompletion.model_validate(answer.model_dump())
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    status, told = served.post("/tokenize", {"messages": HELLO})
    assert status == 200 and answer.prompt_token_ids == told["tokens"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == told["count"]
    assert answer.usage.completion_tokens == len(choice.token_ids) == 8
    assert answer.usage.total_tokens == told["count"] + 8
    assert choice.finish_reason == "length"


def test_a_repeated_prompt_is_counted_as_cached(client: OpenAI) -> None:
    """Red when usage does not tell of the prefix cache, or tells of pages that were not there."""
    messages = [{"role": "user", "content": "a prompt that nobody else sends " * 6}]
    first, second = (chat(client, messages=messages, max_tokens=1) for _ in range(2))
    assert first.usage and second.usage
    before, after = first.usage.prompt_tokens_details, second.usage.prompt_tokens_details
    assert before is not None and after is not None
    assert before.cached_tokens == 0
    assert after.cached_tokens is not None
    assert second.usage.prompt_tokens - 32 < after.cached_tokens < second.usage.prompt_tokens


def test_a_salt_keeps_cached_prefixes_apart(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "salted and seasoned and cured " * 6}]

    def cached(salt: str) -> int | None:
        answer = chat(client, messages=messages, max_tokens=1, extra_body={"cache_salt": salt})
        assert answer.usage and answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("a") == 0
    assert cached("b") == 0
    assert (cached("a") or 0) > 0


def test_max_completion_tokens_wins_over_max_tokens(client: OpenAI) -> None:
    answer = chat(client, max_tokens=9, max_completion_tokens=3)
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_without_a_limit_the_answer_goes_to_the_end_of_the_context(client: OpenAI) -> None:
    """Nobody sends max_tokens by default; red when OpenAI's other endpoint's 16 applies here."""
    answer = chat(client, max_tokens=None, logit_bias={"1": 100}, extra_body={"min_tokens": 40})
    assert answer.usage is not None and answer.usage.completion_tokens == 41


# ------------------------------------------------------------ how it ends


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    whole = chat(client, max_tokens=40, seed=5).choices[0].message.content or ""
    middle = len(whole) // 2
    stop = next(whole[i : i + 2] for i in range(middle, len(whole)) if "�" not in whole[i : i + 2])
    choice = chat(client, max_tokens=40, seed=5, stop=[stop, "never-there"]).choices[0]
    assert choice.finish_reason == "stop" and choice.stop_reason == stop
    assert choice.message.content == whole[: whole.index(stop)]
    body = {"include_stop_str_in_output": True}
    shown = chat(client, max_tokens=40, seed=5, stop=stop, extra_body=body).choices[0]
    assert shown.message.content == whole[: whole.index(stop)] + stop


def test_eos_min_tokens_and_ignore_eos(client: OpenAI) -> None:
    """The end token is made certain by a bias; what may hold it back is told apart."""
    bias = {"1": 100}
    ended = chat(client, logit_bias=bias)
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].stop_reason is None
    assert ended.choices[0].message.content == "" and ended.usage
    assert ended.usage.completion_tokens == 1
    later = chat(client, logit_bias=bias, extra_body={"min_tokens": 3})
    assert later.usage and later.usage.completion_tokens == 4
    never = chat(client, logit_bias=bias, extra_body={"ignore_eos": True})
    assert never.choices[0].finish_reason == "length"


def test_a_stop_token_is_named(client: OpenAI) -> None:
    body = {"stop_token_ids": [67], "allowed_token_ids": [67, 68], "return_token_ids": True}
    choice = chat(client, max_tokens=60, extra_body=body).choices[0]
    assert choice.finish_reason == "stop" and choice.stop_reason == 67
    assert set(choice.message.content or "b") == {"b"}
    assert choice.token_ids[-1] == 67


# ------------------------------------------------------------ sampling


def test_a_seed_repeats_its_answer_alone_and_in_a_crowd(client: OpenAI) -> None:
    """Red when a draw depends on who else is in the batch."""
    alone = [chat(client, seed=s, max_tokens=24, temperature=1.3) for s in range(3)]
    with ThreadPoolExecutor(12) as pool:
        crowd = [
            pool.submit(chat, client, seed=s % 3, max_tokens=24, temperature=1.3) for s in range(9)
        ]
        others = [pool.submit(chat, client, max_tokens=24) for _ in range(6)]
        found = [one.result().choices[0].message.content for one in crowd]
        assert len({one.result().choices[0].message.content for one in others}) > 1
    assert found == [one.choices[0].message.content for one in alone] * 3
    assert len(set(found)) == 3


def test_logit_bias_decides(client: OpenAI) -> None:
    body = {"logit_bias": {"67": 100}}
    assert chat(client, extra_body=body).choices[0].message.content == "a" * 8


def test_extra_body_reaches_the_sampler(client: OpenAI) -> None:
    """top_k=1 and min_p=1 both leave only the most likely token, at any temperature."""
    greedy = chat(client, temperature=0).choices[0].message.content
    for body in ({"top_k": 1}, {"min_p": 1.0}):
        assert chat(client, temperature=2.0, extra_body=body).choices[0].message.content == greedy
    assert chat(client, temperature=2.0, top_p=1e-6).choices[0].message.content == greedy


def test_bad_words_are_not_said(client: OpenAI) -> None:
    body = {"allowed_token_ids": [67, 68, 69], "bad_words": ["b"]}
    said = chat(client, max_tokens=40, temperature=2.0, extra_body=body).choices[0].message.content
    assert said and set(said) == {"a", "c"}


def test_penalties_change_a_greedy_answer(client: OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
    body = {"allowed_token_ids": list(range(67, 73))}
    plain = chat(client, extra_body=body, **fields).choices[0].message.content
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert (
            chat(client, extra_body=body, **fields, **penalty).choices[0].message.content != plain
        )


# ------------------------------------------------------------ logprobs


def test_logprobs_have_openai_s_shape(client: OpenAI) -> None:
    """Red when an entry is not a token with its own bytes, or the most likely are out of order."""
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=12, seed=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    spelled = b""
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0 and entry.bytes is not None
        spelled += bytes(entry.bytes)
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert len({bytes(top.bytes or []) for top in entry.top_logprobs}) == 3
        if entry.logprob >= values[-1]:
            assert entry.token in [top.token for top in entry.top_logprobs]
    assert spelled.decode(errors="replace") == choice.message.content


def test_streamed_logprobs_are_those_of_the_whole(client: OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "max_tokens": 20, "seed": 4}
    whole = chat(client, **fields).choices[0].logprobs
    streamed = [
        entry.token
        for chunk in chunks(client, **fields)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert whole is not None and whole.content is not None
    assert streamed == [entry.token for entry in whole.content]


def test_prompt_logprobs(client: OpenAI) -> None:
    body = {"prompt_logprobs": 2, "return_token_ids": True}
    answer = chat(client, max_tokens=1, extra_body=body)
    first, *rest = answer.prompt_logprobs
    assert first is None and len(rest) == len(answer.prompt_token_ids) - 1
    for token, record in zip(answer.prompt_token_ids[1:], rest, strict=True):
        assert 2 <= len(record) <= 3 and record[str(token)]["logprob"] <= 0
    with pytest.raises(openai.BadRequestError) as caught:
        chunks(client, extra_body=body)
    assert caught.value.param == "prompt_logprobs"


# ------------------------------------------------------------ several answers, streams


def test_n_answers(client: OpenAI) -> None:
    answer = chat(client, n=3, seed=1, max_tokens=10)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 30
    first = chat(client, seed=1, max_tokens=10).choices[0].message.content
    assert answer.choices[0].message.content == first


def test_a_stream_begins_with_the_role_and_ends_with_usage(client: OpenAI) -> None:
    streamed = chunks(client, stream_options={"include_usage": True})
    assert streamed[0].choices[0].delta.role == "assistant"
    assert [c.usage for c in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].choices == [] and streamed[-1].usage is not None
    assert streamed[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in streamed}) == 1
    assert {chunk.object for chunk in streamed} == {"chat.completion.chunk"}


def test_without_being_asked_no_usage_is_streamed(client: OpenAI) -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in chunks(client))


def test_continuous_usage_counts_what_was_sent(client: OpenAI) -> None:
    """Red when a chunk counts tokens that are generated but not in it or before it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"return_token_ids": True}
    streamed = chunks(client, max_tokens=30, stream_options=options, extra_body=body)
    num_sent = 0
    for chunk in streamed[1:]:
        num_sent += sum(len(choice.token_ids) for choice in chunk.choices)
        assert chunk.usage is not None and chunk.usage.completion_tokens == num_sent
    assert num_sent == 30


def test_the_streaming_helper_understands_the_stream(client: OpenAI) -> None:
    """The client's own accumulator, which is stricter than a loop over chunks."""
    body = {"structured_outputs": {"regex": "[a-z]{12}"}}
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, seed=3, logprobs=True, extra_body=body
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    whole = chat(client, seed=3, max_tokens=None, extra_body=body).choices[0].message.content
    assert final.choices[0].message.content == whole and len(whole or "") == 12
    assert kinds.count("content.done") == 1 and "content.delta" in kinds


async def _ask_together(url: str, count: int) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

        async def one(seed: int) -> str:
            answer = await client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=10, seed=seed
            )
            stream = await client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=10, seed=seed, stream=True
            )
            joined = "".join([c.choices[0].delta.content or "" async for c in stream])
            assert joined == answer.choices[0].message.content
            return joined

        return await asyncio.gather(*(one(seed) for seed in range(count)))


def test_the_async_client(served: Served) -> None:
    assert len(set(asyncio.run(_ask_together(served.url, 6)))) == 6


def test_a_stream_closed_early_frees_the_engine(client: OpenAI, served: Served) -> None:
    body = {"ignore_eos": True}
    with chat(client, stream=True, max_tokens=4000, extra_body=body) as stream:  # type: ignore[attr-defined]
        next(iter(stream))
    served.wait_idle(5)


# ------------------------------------------------------------ prompts


def test_continue_final_message_goes_on_where_it_stopped(client: OpenAI, served: Served) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "jumps over"}]
    body = {"continue_final_message": True, "return_token_ids": True}
    answer = chat(client, messages=messages, extra_body=body)
    _, told = served.post("/detokenize", {"tokens": answer.prompt_token_ids})
    assert told["prompt"].endswith("assistant: jumps over")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=messages, extra_body={**body, "add_generation_prompt": True})
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "values", [{"messages": []}, {"tools": []}, {f"v{i}": i for i in range(17)}]
)
def test_template_values_may_not_replace_the_template_s_own(
    client: OpenAI, values: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={"chat_template_kwargs": values})
    assert caught.value.param == "chat_template_kwargs"


def test_content_parts_and_every_role(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "brown fox"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": parts, "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert chat(client, messages=messages).choices[0].message.content is not None


def test_priority_is_taken(client: OpenAI) -> None:
    assert chat(client, extra_body={"priority": -3}).choices[0].finish_reason == "length"
