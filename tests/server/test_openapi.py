"""GET /openapi.json: complete, true to the server, and good enough to make requests from."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from quire.server.app import ADMIN, PUBLIC, Route
from quire.server.routes import routes
from tests.server.fakes import Bench

KEY = "secret"
BENCH = Bench(api_keys=(KEY,))
HEADERS = {"authorization": f"Bearer {KEY}"}
# Streams without end, and verbs that need an engine that acts.
LEFT_OUT = ("/inside", "/admin/flush_cache", "/admin/pause", "/admin/resume", "/admin/profile")


async def fetch(method: str, path: str, **options: Any) -> Any:
    async with BENCH.client() as client:
        return await client.request(method, path, headers=HEADERS, **options)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    served = asyncio.run(fetch("GET", "/openapi.json"))
    assert served.status_code == 200
    return dict(served.json())


def resolver(document: dict[str, Any], name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema.Draft202012Validator(schema)


def test_it_is_openapi(document: dict[str, Any]) -> None:
    """Red when the document breaks the specification, or points at a schema that is not there."""
    schemathesis.openapi.from_dict(document).validate()
    for name in document["components"]["schemas"]:
        jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"][name])
        list(resolver(document, name).iter_errors({}))  # follows references, or raises


def test_every_route_is_there(document: dict[str, Any]) -> None:
    """Red when a route arrives without its body or its access being told."""
    table = routes(BENCH.settings)
    for route in table:
        told = document["paths"][route.path.replace("{}", "{name}")][route.method.lower()]
        assert (told.get("security") == []) == (route.access == PUBLIC)
        assert ("403" in told["responses"]) == (route.access == ADMIN)
        assert "422" not in told["responses"]
        if route.spools:
            assert "multipart/form-data" in told["requestBody"]["content"]
        elif route.method == "POST" and route.access != ADMIN and not route.path.endswith("{}"):
            body = told["requestBody"]["content"]["application/json"]["schema"]
            assert "$ref" in body, f"{route.path} is not in BODIES"
            assert {"400", "401", "404", "413", "429", "500", "503"} <= set(told["responses"])
        error = told["responses"]["400"]["content"]["application/json"]["schema"]
        if route.style != "openai":
            wanted = {"anthropic": "AnthropicError", "ollama": "OllamaError"}[route.style]
            assert error["$ref"].endswith(f"/{wanted}")
    told_ids = [op["operationId"] for path in document["paths"].values() for op in path.values()]
    assert len(told_ids) == len(set(told_ids)) == len(table)


MINIMAL = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", MINIMAL)
def test_the_server_keeps_its_bounds(document: dict[str, Any], path: str) -> None:
    """Red when a bound is told that the server does not enforce."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    struct = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    tried = 0
    for name, schema in struct["properties"].items():
        for one in schema.get("anyOf", [schema]):
            wrong = []
            if "minimum" in one:
                wrong.append(one["minimum"] - 1)
            if "exclusiveMinimum" in one:
                wrong.append(one["exclusiveMinimum"])
            if one.get("maximum", 2**63 - 1) < 2**63 - 1:
                wrong.append(one["maximum"] + 1)
            for value in wrong:
                sent = {**MINIMAL[path], name: value}
                reply = asyncio.run(fetch("POST", path, json=sent))
                assert reply.status_code == 400, (sent, reply.text)
                tried += 1
    assert tried > 5


CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "blue"}
USE = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
USED = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "blue"}]}


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/responses", "ResponsesFields", {"input": "hi", "tools": None, "text": None}),
        (
            "/v1/responses",
            "ResponsesFields",
            {"input": [{"role": "user", "content": "hi"}, CALL, RESULT], "stop": ["x"]},
        ),
        (
            "/v1/messages",
            "MessagesFields",
            {
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [USED]},
                ],
                "tools": [{"name": "look", "input_schema": {"type": "object"}}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
        ),
        (
            "/v1/chat/completions",
            "ChatFields",
            {
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "x"}]},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"id": "c", "function": {"name": "look", "arguments": "{}"}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": "blue"},
                ],
                "tools": [{"type": "function", "function": {"name": "look"}}],
            },
        ),
        ("/api/chat", "OllamaChatFields", {"model": "tiny:latest", "messages": []}),
        (
            "/api/chat",
            "OllamaChatFields",
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]},
                    {"role": "tool", "content": "blue"},
                ],
                "tools": [{"function": {"name": "look"}}],
                "options": {"num_predict": -1, "mirostat": 1},
            },
        ),
        ("/api/generate", "OllamaGenerateFields", {"prompt": "x", "format": {}, "think": "low"}),
    ],
)
def test_what_works_is_allowed(
    document: dict[str, Any], path: str, name: str, body: dict[str, Any]
) -> None:
    """Red when the schema forbids a request that the server answers."""
    assert [error.message for error in resolver(document, name).iter_errors(body)] == []
    reply = asyncio.run(fetch("POST", path, json=body))
    assert reply.status_code == 200, reply.text


ROUTES = [route for route in routes(BENCH.settings) if route.path not in LEFT_OUT]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_made_up_requests_get_told_answers(document: dict[str, Any], route: Route) -> None:
    """Red when a request made from the schemas gets a 5xx, a status that is not told, or an error
    in another shape."""
    path = route.path.replace("{}", "{name}")
    told = document["paths"][path][route.method.lower()]["responses"]
    operation = schemathesis.openapi.from_dict(document)[path][route.method]

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        sent = case.as_transport_kwargs(base_url="http://test")
        options = {key: sent[key] for key in ("json", "params") if key in sent}
        reply = asyncio.run(fetch(sent["method"], sent["url"], **options))
        assert str(reply.status_code) in told and reply.status_code < 500, reply.text
        media = told[str(reply.status_code)]["content"]
        kind = reply.headers["content-type"].split(";")[0]
        assert kind in media
        if kind == "application/json":
            schema = {**media[kind]["schema"], "components": document["components"]}
            jsonschema.Draft202012Validator(schema).validate(reply.json())

    run()


def test_strangers_do_not_see_it() -> None:
    assert BENCH.get("/openapi.json").status_code == 401
