"""The app around the handlers: deny by default, say little, and write one line about it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from quire.obs.log import configure_logging
from quire.server.app import ADMIN, PUBLIC, App, Route
from quire.server.http import EventStream, HttpRequest, Reply
from quire.server.routes import routes
from quire.server.server import Server, model_name
from tests.server.asgi import Call, call
from tests.server.fakes import Bench

KEYS: dict[str, Any] = {"api_keys": ("user-key",), "admin_keys": ("admin-key",)}
USER = {"authorization": "Bearer user-key"}
BOSS = {"authorization": "Bearer admin-key"}


def ask(bench: Bench, method: str, path: str, body: Any = b"", **headers: str) -> Call:
    async def work() -> Call:
        return await call(bench.app, method, path, body, **headers)

    return asyncio.run(work())


# ------------------------------------------------------------ who may do what


def test_every_route_needs_a_key_except_the_public_ones() -> None:
    """Red when a route is added that strangers can reach; the list of public ones is closed."""
    bench = Bench(**KEYS)
    table = routes(bench.settings)
    open_to_all = {(r.method, r.path) for r in table if r.access == PUBLIC}
    assert open_to_all == {
        ("GET", "/health"),
        ("GET", "/live"),
        ("GET", "/ready"),
        ("GET", "/"),
        ("GET", "/page/{}"),
    }
    for route in table:
        answer = ask(bench, route.method, route.path.replace("{}", "x"), b"{}")
        if route.access == PUBLIC:
            assert answer.status != 401, route.path
        else:
            assert answer.status == 401, route.path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "API key" in str(answer.json()["error"])


def test_admin_verbs_need_the_admin_key() -> None:
    bench = Bench(**KEYS)
    verbs = [r for r in routes(bench.settings) if r.access == ADMIN]
    assert len(verbs) >= 5
    for route in verbs:
        assert ask(bench, route.method, route.path, b"{}", **USER).status == 403
    assert ask(bench, "POST", "/admin/abort", {"all": True}, **BOSS).status == 200


def test_without_an_admin_key_there_is_no_admin() -> None:
    bench = Bench(api_keys=("user-key",))
    assert ask(bench, "POST", "/admin/abort", {"all": True}, **USER).status == 403


def test_strangers_do_not_run_an_open_server() -> None:
    """Red when --allow-unauthenticated on a public address gives everyone the admin verbs."""
    local, public = Bench(), Bench(host="0.0.0.0")
    assert ask(local, "POST", "/admin/abort", {"all": True}).status == 200
    assert ask(public, "POST", "/admin/abort", {"all": True}).status == 403
    assert ask(public, "GET", "/v1/models").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1//models",
        "/health/../v1/models",
        "/v1/../v1/models",
        "/v1/models/",
        "/v1/models;/health",
        "/health;/v1/models",
        "/v1/models/tiny",
        "/V1/models",
        "/page",
        "/health/",
        "http://x/health",
        "",
        "*",
        "/v1/models\x00/health",
    ],
)
def test_no_spelling_of_a_path_goes_round_the_key(path: str) -> None:
    """Red when routing and authentication read a path differently."""
    bench = Bench(**KEYS)
    answer = ask(bench, "GET", path)
    assert answer.status == 401, answer.body
    assert b"tiny" not in answer.body


@pytest.mark.parametrize("host", ["x/health?", "127.0.0.1:8000/health", "\xff", "a" * 1_000])
def test_the_host_header_decides_nothing(host: str) -> None:
    assert ask(Bench(**KEYS), "GET", "/v1/models", host=host).status == 401


def test_page_files_are_picked_from_a_list() -> None:
    bench = Bench()
    for name in ("../app.py", "..%2fapp.py", "/etc/passwd", "app.py", "index.html/../chat.js"):
        assert ask(bench, "GET", f"/page/{name}").status == 404
    policy = ask(bench, "GET", "/").headers["content-security-policy"]
    assert "default-src 'self'" in policy


def test_wrong_methods() -> None:
    bench = Bench()
    assert ask(bench, "GET", "/v1/completions").status == 405
    assert ask(bench, "DELETE", "/v1/models").status == 405
    head = ask(bench, "HEAD", "/health")
    assert (head.status, head.body) == (200, b"")
    assert ask(bench, "HEAD", "/inside").body == b""


@pytest.mark.parametrize(
    "method, path, status, kind",
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages/batches/x/cancel", 404, "not_found_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/", 404, "not_found_error"),
    ],
)
def test_anthropics_clients_read_errors_of_paths_that_are_not(
    method: str, path: str, status: int, kind: str
) -> None:
    """Red when what no route answers below /v1/messages has OpenAI's body."""
    answer = ask(Bench(), method, path)
    assert answer.status == status
    said = answer.json()
    assert (said["type"], said["error"]["type"]) == ("error", kind)
    stranger = ask(Bench(**KEYS), method, path).json()
    assert stranger["error"]["type"] == "authentication_error" and stranger["type"] == "error"
    near = ask(Bench(), method, path.replace("/v1/messages", "/v1/messagesx")).json()
    assert near.keys() == {"error"}, "a path beside it is not below it"


# ------------------------------------------------------------ models by name


@pytest.mark.parametrize("name", ["dummy", "default", "", "model", "local-model"])
def test_placeholders_for_a_model_are_answered_with_a_warning(name: str) -> None:
    """Red when a client that was never told a model's name cannot talk to the only one."""
    bench = Bench(served_model_names=("tiny", "also-tiny"))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", chat),
        ("/tokenize", {"prompt": "hi"}),
    ):
        for stream in (False, True) if "max_tokens" in body else (False,):
            extra = {"stream": True} if stream else {}
            answer = ask(bench, "POST", path, {**body, **extra, "model": name})
            assert answer.status == 200, answer.body
            assert repr(name) in answer.headers["x-quire-warning"]
            assert "tiny answers" in answer.headers["x-quire-warning"]
    said = ask(bench, "POST", "/v1/chat/completions", {**chat, "model": name}).json()
    assert said["model"] == "tiny"


@pytest.mark.parametrize("name", ["gpt-3.5-turbo", "Dummy2", "tiny2", "defaults", " "])
def test_any_other_wrong_model_is_not_found(name: str) -> None:
    answer = ask(Bench(), "POST", "/v1/completions", {"prompt": "hi", "model": name})
    assert answer.status == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_a_served_name_that_looks_like_a_placeholder_is_a_name() -> None:
    bench = Bench(served_model_names=("tiny", "default"))
    answer = ask(bench, "POST", "/v1/completions", {"prompt": "hi", "model": "default"})
    assert answer.json()["model"] == "default" and "x-quire-warning" not in answer.headers


def test_paths_are_served_by_their_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when clients must send ./my-model, or learn where a model lies on the server's disk."""
    folder = tmp_path / "my-model"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    names = {
        "./my-model": "my-model",
        "./my-model/": "my-model",
        "my-model/": "my-model",
        "my-model": "my-model",
        str(folder): "my-model",
        f"{folder}/": "my-model",
        "./my-model/sub/..": "my-model",
        "../x/y": "y",
        "~/models/z": "z",
        "a/b/c": "c",
        "m.gguf": "m",
        "./some/m.q4_0.gguf": "m.q4_0",
        "/m.gguf": "m",
        "/": "model",
        "default": "default",
        "org/name": "org/name",
        "org/name@main": "org/name@main",
    }
    assert {path: model_name(path) for path in names} == names
    monkeypatch.chdir(folder)
    assert [model_name(path) for path in (".", "./", "..")] == ["my-model"] * 2 + [tmp_path.name]


# ------------------------------------------------------------ browsers


def test_cors_is_off_unless_listed() -> None:
    origin = "https://app.example"
    bench = Bench()
    assert ask(bench, "OPTIONS", "/v1/models", origin=origin).status == 403
    listed = Bench(cors_origins=(origin,))
    answer = ask(listed, "GET", "/v1/models", origin=origin)
    assert answer.headers["access-control-allow-origin"] == origin
    assert ask(listed, "OPTIONS", "/v1/models", origin=origin).status == 204
    other = ask(listed, "OPTIONS", "/v1/models", origin="https://evil.example")
    assert other.status == 403 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://evil.example:8000", "host": "evil.example:8000"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "same-origin", "host": "evil.example:8000"},
    ],
)
def test_other_sites_cannot_drive_an_open_server(headers: dict[str, str]) -> None:
    """Red when a page somewhere can make a visitor's browser pause the engine on their machine."""
    bench = Bench()
    assert ask(bench, "POST", "/admin/abort", {"all": True}, **headers).status == 403
    assert ask(bench, "GET", "/v1/models", **headers).status == 403


def test_our_own_page_and_plain_clients_may() -> None:
    bench = Bench()
    for headers in (
        {},
        {"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"},
        {"origin": "http://localhost:8000", "host": "localhost:8000", "sec_fetch_site": "none"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
        {"sec_fetch_site": "same-origin", "host": "192.168.0.5"},
        {"host": "my-machine.lan"},
    ):
        assert ask(bench, "GET", "/v1/models", **headers).status == 200, headers
    followed = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert ask(bench, "GET", "/", **followed).status == 200
    keyed = Bench(**KEYS)
    assert ask(keyed, "GET", "/v1/models", origin="https://any.example", **USER).status == 200


# ------------------------------------------------------------ what is said


async def raises_a_secret(request: HttpRequest, server: Server) -> Reply:
    raise KeyError("/home/someone/secret/path")


async def raises_midway(request: HttpRequest, server: Server) -> EventStream:
    async def chunks():  # type: ignore[no-untyped-def]
        yield b"data: 1\n\n"
        raise RuntimeError("libsecret says no")

    return EventStream(chunks(), lambda problem: b"data: " + problem.body() + b"\n\n")


def test_a_bug_tells_the_client_nothing_but_where_to_look() -> None:
    """Red when a library's words or a path of ours reach a client."""
    bench = Bench()
    bench.app = App(bench.server, [Route("GET", "/bug", raises_a_secret, PUBLIC)])
    answer = ask(bench, "GET", "/bug")
    assert answer.status == 500
    assert b"secret" not in answer.body and b"Traceback" not in answer.body
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]


def test_a_bug_in_the_midst_of_a_stream_is_an_event() -> None:
    bench = Bench()
    bench.app = App(bench.server, [Route("GET", "/bug", raises_midway, PUBLIC)])
    answer = ask(bench, "GET", "/bug")
    assert answer.status == 200 and answer.is_over
    assert b"internal error" in answer.body and b"libsecret" not in answer.body


def test_headers_we_send_hold_no_line_breaks() -> None:
    """Red when the name of an unknown field can add a header of its own."""
    body = {"prompt": "x", "max_tokens": 1, "a\r\nset-cookie: x=1\x1b[2J": 1, "日本": 2}
    answer = ask(Bench(), "POST", "/v1/completions", body)
    assert answer.status == 200
    assert answer.headers["x-quire-warning"].isprintable()
    assert answer.headers["x-quire-warning"].isascii()


@pytest.mark.parametrize("given", ["ok-1:2.3_x", "a" * 128])
def test_request_ids_are_echoed(given: str) -> None:
    assert ask(Bench(), "GET", "/health", x_request_id=given).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["a b", "a\r\nb: c", "é", "a" * 129, "", "{}", "../x"])
def test_other_request_ids_are_replaced(given: str) -> None:
    made = ask(Bench(), "GET", "/health", x_request_id=given).headers["x-request-id"]
    assert made != given and made.startswith("req-")


def test_refusals_are_counted_by_reason() -> None:
    bench = Bench(**KEYS)
    ask(bench, "GET", "/v1/models")
    ask(bench, "POST", "/v1/completions", b"{", **USER)
    counts = bench.server.metrics.summary()["requests"]["rejected"]
    assert counts["unauthorized"] == 1
    assert sum(counts.values()) == 2


# ------------------------------------------------------------ what is written


@pytest.fixture
def log() -> Any:
    """What is logged, restored afterwards."""
    stream = io.StringIO()
    logger = logging.getLogger("quire")
    before = (list(logger.handlers), logger.level, logger.propagate)
    configure_logging("json", "info", ["user-key", "admin-key"], stream)
    yield stream
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def written(log: io.StringIO) -> list[dict[str, Any]]:
    first, *rest = [json.loads(line) for line in log.getvalue().splitlines()]
    assert first["event"] == "engine_ready"
    return rest


def test_one_line_an_exchange_and_no_text_or_key_in_it(log: io.StringIO) -> None:
    """Red when a prompt, an answer or a key is logged, or a client can start a line of its own."""
    bench = Bench(**KEYS)
    nasty = 'two\r\nlines \x1b[31m {"event": "forged"} SECRETPROMPT'
    body = {"prompt": nasty, "max_tokens": 2, "user": nasty, "model": "tiny", nasty[:30]: 1}
    assert ask(bench, "POST", "/v1/completions", body, user_agent=nasty, **USER).status == 200
    assert ask(bench, "POST", "/v1/completions", body | {"model": nasty}, **USER).status == 404
    assert ask(bench, "GET", f"/{nasty}", **USER).status == 404
    ask(bench, "GET", "/v1/models", x_request_id="user-key", authorization="Bearer user-key")
    text = log.getvalue()
    lines = written(log)
    assert [line["event"] for line in lines] == ["access"] * 4
    assert "SECRETPROMPT" not in text and "user-key" not in text and "\x1b" not in text
    assert lines[0]["prompt_tokens"] > 0 and lines[0]["output_tokens"] == 2


def test_a_bug_is_one_line_too(log: io.StringIO) -> None:
    bench = Bench()
    bench.app = App(bench.server, [Route("GET", "/bug", raises_a_secret, PUBLIC)])
    ask(bench, "GET", "/bug")
    lines = written(log)
    assert [line["event"] for line in lines] == ["bug", "access"]
    assert "KeyError" in lines[0]["traceback"]


def test_a_path_beside_ollamas_has_ollamas_error_body() -> None:
    """Red when an unknown path under /api answers in a form that Ollama's clients cannot read."""
    reply = Bench().post("/api/nothing", {})
    assert reply.status_code == 404
    assert isinstance(reply.json()["error"], str)
