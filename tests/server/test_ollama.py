"""/api/generate and /api/chat: Ollama's own client accepts them, streams and whole answers agree,
nothing is a 5xx."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from hypothesis import given, settings

from quire.server.ollama_input import OllamaChatFields, OllamaGenerateFields
from quire.text.tokenizer import Tokenizer
from tests.server.asgi import Call
from tests.server.fakes import Bench
from tests.server.shapes import JSON, OUTPUTS, bodies
from tests.text.tiny_tokenizers import byte_level

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration")
COUNTS += ("eval_count", "eval_duration")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def client(bench: Bench) -> ollama.AsyncClient:
    transport = httpx.ASGITransport(app=bench.app)  # type: ignore[arg-type]
    return ollama.AsyncClient("http://test", transport=transport)


def whole(bench: Bench, path: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    reply = bench.post(path, {**asked, "stream": False, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def lines(bench: Bench, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    """A streamed answer, which is what a request gets that does not say."""
    asked = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    reply = bench.post(path, {**asked, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text[:-1].split("\n")]


# ------------------------------------------------------------ Ollama's client


def test_the_client_reads_a_whole_chat(bench: Bench) -> None:
    """Red when a field the client's types want is missing or has another type."""
    answer = asyncio.run(client(bench).chat("tiny", HI))
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello there.")
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, "stop")
    assert answer.prompt_eval_count == bench.link.submitted[-1].num_prompt
    assert answer.eval_count == 10
    assert all(isinstance(answer[name], int) for name in COUNTS)
    assert answer.eval_duration and answer.prompt_eval_duration  # clients divide by them
    assert answer.created_at is not None and answer.created_at.endswith("Z")


def test_the_client_reads_a_streamed_chat(bench: Bench) -> None:
    """Red when some line is not one of the client's, or a call comes in pieces."""
    bench.link.answer = f"<think>hm</think>I look.{CALL}"
    bench.link.is_slow = True  # so that there are signs of life too

    async def work() -> list[ollama.ChatResponse]:
        stream = await client(bench).chat("tiny", HI, tools=[TOOL], stream=True)
        return [part async for part in stream]

    parts = asyncio.run(work())
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert "".join(part.message.content or "" for part in parts) == "I look."
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("look", {"at": "sea"})
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == "stop" and parts[-1].eval_count


def test_the_client_reads_generate(bench: Bench) -> None:
    async def work() -> tuple[ollama.GenerateResponse, list[ollama.GenerateResponse]]:
        made = client(bench)
        stream = await made.generate("tiny:latest", "hi", stream=True)
        return await made.generate("tiny:latest", "hi"), [part async for part in stream]

    answer, parts = asyncio.run(work())
    assert answer.response == "Hello there." == "".join(part.response or "" for part in parts)
    assert answer.model == "tiny:latest" and answer.done_reason == "stop"
    assert parts[-1].context == answer.context and parts[0].context is None


def test_a_tool_conversation_goes_round(bench: Bench) -> None:
    """Red when what we answered cannot be sent back to us: the client keeps no ids of calls."""

    async def work() -> ollama.ChatResponse:
        made = client(bench)
        bench.link.answer = f"<think>hm</think>I look.{CALL}{CALL.replace('look', 'hear')}"
        first = await made.chat("tiny", HI, tools=[TOOL])
        bench.link.answer = "It is blue."
        results = [
            {"role": "tool", "tool_name": "hear", "content": "waves"},
            {"role": "tool", "content": "blue"},
        ]
        return await made.chat("tiny", [*HI, first.message, *results], tools=[TOOL])

    assert asyncio.run(work()).message.content == "It is blue."
    turns = bench.link.prompt().split("<s>")
    assert turns[3].startswith('assistant: I look. (thought hm)<tool_call>{"name": "look"')
    assert turns[4:6] == ["tool: waves for call00002|", "tool: blue for call00001|"]


def test_the_client_shows_errors(bench: Bench) -> None:
    """Red when an error is not the one sentence that Ollama's clients show."""
    with pytest.raises(ollama.ResponseError, match="model 'llama' not found") as unknown:
        asyncio.run(client(bench).chat("llama", HI))
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature") as bad:
        asyncio.run(client(bench).chat("tiny", HI, options={"temperature": -1}))
    assert bad.value.status_code == 400
    keyed = Bench(api_keys=("secret",))
    with pytest.raises(ollama.ResponseError, match="API key"):
        asyncio.run(client(keyed).chat("tiny", HI))


# ------------------------------------------------------------ streams


@settings(max_examples=100, deadline=None, derandomize=True)
@given(OUTPUTS)
def test_stream_and_whole_agree(text: str) -> None:
    """Red when a stream adds up to another message than the whole one."""
    bench = Bench()
    bench.link.answer = text
    body = {"tools": [TOOL], "options": {"num_predict": 60}}
    message, parts = whole(bench, **body), lines(bench, **body)
    joined: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        assert part["message"]["role"] == "assistant"
        for key in ("content", "thinking", "tool_calls"):
            if part["message"].get(key):
                joined[key] = joined.get(key, type(part["message"][key])()) + part["message"][key]
    for call in (*joined.get("tool_calls", ()), *message["message"].get("tool_calls", ())):
        del call["id"]
    assert joined == message["message"]
    assert parts[-1]["done_reason"] == message["done_reason"]
    assert parts[-1]["eval_count"] == message["eval_count"]


def test_an_engine_that_dies_is_a_last_line(bench: Bench) -> None:
    """Red when a stream just stops, or an error before the first token hides behind a 200."""
    bench.link.dies_after = 5
    parts = lines(bench)
    assert parts[-1] == {"error": "the engine stopped"} and not parts[-2]["done"]
    bench.link.dies_after = 0
    reply = bench.post(CHAT, {"messages": HI})
    assert (reply.status_code, reply.json()) == (503, {"error": "the engine stopped"})


def test_a_client_that_leaves_ends_its_request(bench: Bench) -> None:
    """Red when nobody tells the engine that nobody reads any more."""
    bench.link.answer = "word " * 5_000

    async def work() -> bytes:
        call = Call(bench.app, "POST", CHAT)
        call.send_body({"messages": HI})
        await call.until(b'"done":false')
        call.leave()
        return (await call.end()).body

    assert b'"done":true' not in asyncio.run(work())
    assert bench.link.num_open == 0 and bench.server.admission.num_open == 0


# ------------------------------------------------------------ answers


def test_done_reasons(bench: Bench) -> None:
    """Red when a client cannot tell why the answer ended."""
    assert whole(bench)["done_reason"] == "stop"
    assert whole(bench, options={"num_predict": 3})["done_reason"] == "length"
    stopped = whole(bench, options={"stop": ["the"]})
    assert (stopped["done_reason"], stopped["message"]["content"]) == ("stop", "Hello ")
    bench.link.answer = CALL
    assert whole(bench, tools=[TOOL])["done_reason"] == "stop"


def test_a_cut_call_is_not_handed_out(bench: Bench) -> None:
    """Red when a client gets half a call, which it would run."""
    bench.link.answer = CALL
    size = len(bench.link.tokenizer.encode(CALL[: CALL.index("sea") + 2], False))
    body = {"tools": [TOOL], "options": {"num_predict": size}}
    answer = whole(bench, **body)
    assert answer["message"] == {"role": "assistant", "content": ""}
    assert answer["done_reason"] == "length"
    assert all("tool_calls" not in part["message"] for part in lines(bench, **body))


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_an_empty_request_loads_the_model(bench: Bench, path: str) -> None:
    """Red when a client's way to load or unload a model is an error, or runs it."""
    body = {"messages": []} if path == CHAT else {"prompt": ""}
    loaded = bench.post(path, body)
    assert (loaded.json()["done"], loaded.json()["done_reason"]) == (True, "load")
    for zero in (0, "0", "0s"):
        unloaded = bench.post(path, {**body, "keep_alive": zero})
        assert unloaded.json()["done_reason"] == "unload"
        assert "stays loaded" in unloaded.headers["x-quire-warning"]
    assert bench.post(path, {**body, "keep_alive": "5m"}).json()["done_reason"] == "load"
    assert bench.link.submitted == []
    bench.link.hello = None
    assert bench.post(path, body).status_code == 503


# ------------------------------------------------------------ prompts


def test_generate_uses_the_template(bench: Bench) -> None:
    whole(bench, GENERATE, system="Be kind.", think=False)
    assert bench.link.prompt() == ("<s>system: Be kind.|<s>user: hi|<s>assistant: <think></think>")


def test_raw_does_not(bench: Bench) -> None:
    answer = whole(bench, GENERATE, raw=True)
    assert bench.link.prompt() == "hi" and "context" not in answer


def test_a_model_without_a_template_continues_texts(bench: Bench, tmp_path: Path) -> None:
    """Red when a base model cannot be asked at all."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    bench.server.tokenizer = Tokenizer.from_folder(tmp_path)
    whole(bench, GENERATE)
    assert bench.link.prompt() == "hi"
    refused = bench.post(GENERATE, {"prompt": "hi", "system": "x"})
    assert refused.status_code == 400 and "got system" in refused.json()["error"]


def test_context_goes_on(bench: Bench) -> None:
    """Red when the second question does not follow the first answer, or begins the text anew."""
    context = whole(bench, GENERATE)["context"]
    whole(bench, GENERATE, prompt="and?", context=context)
    before = "<s>user: hi|<s>assistant: Hello there.</s>"
    assert bench.link.prompt() == before + "user: and?|<s>assistant: "
    for bad in ([10**6], [-1], [2**40], [0] * 20_000):
        assert bench.post(GENERATE, {"prompt": "x", "context": bad}).status_code == 400


def test_the_answer_goes_on_from_a_prefill(bench: Bench) -> None:
    """Red when a last message of the assistant's is closed before the answer."""
    whole(bench, messages=[*HI, {"role": "assistant", "content": "I am"}])
    assert bench.link.prompt() == "<s>user: hi|<s>assistant: I am"


def test_thinking_can_be_switched(bench: Bench) -> None:
    whole(bench, think=False)
    assert bench.link.prompt().endswith("<think></think>")
    for think in (True, "high"):
        whole(bench, think=think)
        assert "<think>" not in bench.link.prompt()
    bench.link.answer = "<think>hm</think>Yes"
    assert whole(bench)["message"]["thinking"] == "hm"
    answer = whole(bench, GENERATE)
    assert (answer["thinking"], answer["response"]) == ("hm", "Yes")


# ------------------------------------------------------------ options


def test_options_arrive() -> None:
    bench = Bench(default_sampling={"temperature": 0.3, "top_p": 0.7})
    options = {"temperature": 0.5, "top_k": 7, "min_p": 0.1, "seed": 3, "num_predict": 9}
    options |= {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    whole(bench, options={**options, "stop": ["@"]})
    request = bench.link.submitted[-1]
    params = request.params
    assert (params.temperature, params.top_k, params.min_p) == (0.5, 7, 0.1)
    assert (params.top_p, params.repetition_penalty) == (0.7, 1.5)  # the server's own, ours
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert (params.stop_strings, request.max_tokens, request.seed) == (("@",), 9, 3)


@pytest.mark.parametrize("unlimited", [-2, -1, 0])
def test_no_limit_is_the_context(bench: Bench, unlimited: int) -> None:
    whole(bench, options={"num_predict": unlimited, "seed": -1})
    request = bench.link.submitted[-1]
    assert request.max_tokens == bench.server.max_model_len - request.num_prompt


@pytest.mark.parametrize(
    ("format", "kind"), [("json", "json_object"), ({"type": "object"}, "json"), ("", None)]
)
def test_formats(bench: Bench, format: Any, kind: str | None) -> None:
    """Red when a format does not become a grammar."""
    for path in (CHAT, GENERATE):
        for raw in ({}, {"raw": True}) if path == GENERATE else ({},):
            whole(bench, path, format=format, **raw)
            structured = bench.link.submitted[-1].params.structured_outputs
            assert (None if structured is None else structured.kind) == kind


def test_what_does_nothing_here_is_named(bench: Bench) -> None:
    """Red when a client is not told that an option was without effect, or is told too often."""

    def warning(**body: Any) -> str:
        reply = bench.post(CHAT, {"messages": HI, "stream": False, **body})
        assert reply.status_code == 200, reply.text
        return str(reply.headers.get("x-quire-warning", ""))

    assert warning(options={"num_ctx": 4096, "num_gpu": 1}, keep_alive=-1, truncate=True) == ""
    said = warning(options={"mirostat": 2, "typo": 1, "num_batch": 1})
    assert "mirostat" in said and "typo" in said and "num_batch" not in said
    assert "num_ctx=99999 is more than" in warning(options={"num_ctx": 99_999})


def user(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, user(images=["aGk="]), "messages[0].images"),
        (CHAT, user(role="poet"), "messages[0].role"),
        (CHAT, user(content=3), "messages[0].content"),
        (CHAT, user(role="assistant", thinking=3), "messages[0].thinking"),
        (CHAT, user(role="assistant", tool_calls=[{}]), "messages[0].tool_calls[0].function"),
        (CHAT, {"messages": HI, "tools": [{"type": "web"}]}, "tools[0].type"),
        (CHAT, {"messages": HI, "think": "a lot"}, "think"),
        (CHAT, {"messages": HI, "format": "xml"}, "format"),
        (CHAT, {"messages": HI, "options": {"top_p": 3}}, "top_p"),
        (CHAT, {"messages": HI, "options": {"top_k": "many"}}, "options.top_k"),
        (CHAT, {"messages": HI, "options": []}, "options"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "--trust-request-chat-template"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "got system with raw"),
        (GENERATE, {"prompt": "x", "raw": True, "context": [1]}, "got context with raw"),
        (GENERATE, {"prompt": "x" * 200_000}, "max_model_len"),
    ],
)
def test_what_is_refused(bench: Bench, path: str, body: dict[str, Any], said: str) -> None:
    """Red when something we cannot do is silently ignored, or the error does not say where."""
    reply = bench.post(path, body)
    assert reply.status_code == 400, reply.text
    assert said in reply.json()["error"]
    assert bench.link.submitted == []


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, OllamaChatFields), (GENERATE, OllamaGenerateFields)]
)
def test_everything_may_be_null(bench: Bench, path: str, fields: Any) -> None:
    """Red when a client that writes out its nulls is refused."""
    nulls = dict.fromkeys(fields.__struct_fields__)
    assert bench.post(path, nulls).json()["done_reason"] == "load"
    asked = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    assert bench.post(path, nulls | asked).status_code == 200


# ------------------------------------------------------------ fuzz

FUZZED = Bench()
OPTIONS = JSON.map(lambda value: {"messages": HI, "options": {"stop": value, "num_ctx": value}})
MESSAGES = JSON.map(
    lambda value: {
        "messages": [
            {"role": "assistant", "tool_calls": [value]},
            {"role": "tool", "content": "x", "tool_name": value},
            *HI,
        ]
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    bodies({"messages": HI}, OllamaChatFields.__struct_fields__)
    | bodies({"prompt": "hi"}, OllamaGenerateFields.__struct_fields__)
    | OPTIONS
    | MESSAGES
    | JSON
)
def test_no_body_breaks_the_server(body: Any) -> None:
    """Red when some JSON body is a 5xx, or leaves a generation open."""
    for path in (CHAT, GENERATE):
        reply = FUZZED.post(path, body)
        assert reply.status_code in (200, 400, 404), (body, reply.text)
    assert FUZZED.link.num_open == 0 and FUZZED.server.admission.num_open == 0
    FUZZED.link.submitted.clear()
