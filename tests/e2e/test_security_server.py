"""From outside, with keys: what strangers, users and the operator can do, see and find in logs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.server.app import PUBLIC
from quire.server.routes import routes
from quire.server.settings import ServeSettings
from tests.e2e.harness import Served, free_port
from tests.e2e.raw import exchange, request_bytes
from tests.tiny_folder import write_tiny_folder

FLAGS = ("--device", "cpu", "--load-format", "dummy", "--page-size", "8")
KEYS = ("--api-key", "alice-key-1", "--api-key", "bob-key-22", "--admin-api-key", "boss-key-333")
ALICE = {"authorization": "Bearer alice-key-1"}
BOB = {"x-api-key": "bob-key-22"}
BOSS = {"authorization": "Bearer boss-key-333"}
SECRET = "the password of the vault is swordfish and nobody shall know it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1_024)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, *FLAGS, *KEYS, "--public-metrics") as made:
        yield made


def complete(served: Served, prompt: str, who: dict[str, str], **more: Any) -> tuple[int, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **more}
    return served.post("/v1/completions", body, who)


def cached(answer: tuple[int, Any]) -> int:
    assert answer[0] == 200, answer
    return int(answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_strangers_get_401_on_every_route_and_wrong_keys_too(served: Served) -> None:
    """CL-06. Red when a route forgets to ask."""
    table = routes(ServeSettings(public_metrics=True))
    private = [r for r in table if r.access != PUBLIC]
    assert len(private) > 15
    for route in private:
        path = route.path.replace("{}", "tiny")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}):
            status, body = served.call(route.method, path, b"{}", headers)
            assert status == 401, (path, headers, body)


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1/../v1/models",
        "/health/../v1/models",
        "/health/..%2fv1/models",
        "/v1%2fmodels",
        "/v1/models%00",
        "/v1/models/",
        "/v1/models;a=b",
        "/health;/../v1/models",
        "/v1/models?x=/health",
        "/%76%31/models",
        "http://127.0.0.1/v1/models",
        "http://x/health/../v1/models",
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "x/health?", "localhost#/health"])
def test_no_path_or_host_goes_round_the_key(served: Served, target: str, host: str) -> None:
    data = f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    status, answer = exchange(served.port, data)
    assert status in (400, 401), answer
    assert b"max_model_len" not in answer


def test_keys_are_read_leniently_and_compared_strictly(served: Served) -> None:
    for value, wanted in (
        ("Bearer alice-key-1", 200),
        ("bearer alice-key-1", 200),
        ("Bearer  alice-key-1 ", 200),
        ("Bearer alice-key-2", 401),
        ("Bearer ALICE-KEY-1", 401),
        ("Bearer alice-key-1x", 401),
        ("Basic alice-key-1", 401),
        ("alice-key-1", 401),
        ("Bearer alice\xffkey-1", 401),
        ("Bearer \xc3\xa4", 401),
    ):
        raw = request_bytes("/v1/models", method="GET", headers={"Authorization": value})
        assert exchange(served.port, raw)[0] == wanted, value


def test_admin_verbs_are_for_the_admin(served: Served) -> None:
    for verb in ("flush_cache", "pause", "resume", "abort", "profile"):
        assert served.post(f"/admin/{verb}", {}, ALICE)[0] == 403
        assert served.post(f"/admin/{verb}", {})[0] == 401
    assert served.post("/admin/flush_cache", {}, BOSS)[0] == 200


def test_keys_do_not_share_cached_prefixes(served: Served) -> None:
    """CO-05. Red when one caller can find out what another has asked."""
    assert cached(complete(served, SECRET, ALICE)) == 0
    assert cached(complete(served, SECRET, ALICE)) > 0
    assert cached(complete(served, SECRET, BOB)) == 0
    assert cached(complete(served, SECRET, BOB)) > 0
    assert cached(complete(served, SECRET, ALICE, cache_salt="other")) == 0


def test_unless_they_are_told_to(folder: Path) -> None:
    with Served(folder, *FLAGS, *KEYS, "--share-prefix-cache") as shared:
        assert cached(complete(shared, SECRET, ALICE)) == 0
        assert cached(complete(shared, SECRET, BOB)) > 0
        assert cached(complete(shared, SECRET, BOB, cache_salt="mine")) == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"guided_json": {"properties": {f"p{i}": {} for i in range(9_999)}}}, None),
        ({"guided_regex": "a" * 5_000}, None),
        ({"guided_grammar": "start: " + '"a" ' * 30_000}, None),
        ({"guided_json": {"$ref": "http://127.0.0.1/x"}}, None),
    ],
)
def test_one_request_cannot_ask_for_too_much(
    served: Served, fields: dict[str, Any], param: str | None
) -> None:
    status, body = complete(served, "x", ALICE, **fields)
    assert status == 400, body
    if param is not None:
        assert body["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x"}] * 2_001},
        {"chat_template": "{{ messages }}"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}
            ]
        },
    ],
)
def test_chat_requests_are_bounded_too(served: Served, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields
    status, answer = served.post("/v1/chat/completions", body, ALICE)
    assert status == 400, answer


def test_cors_is_off(served: Served) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    raw = request_bytes("/v1/completions", method="OPTIONS", headers=headers)
    status, answer = exchange(served.port, raw)
    assert status == 403 and b"access-control" not in answer.lower()


def test_only_the_api_port_listens(served: Served) -> None:
    """SEC-02. Red when a debugger, a store or a metrics thread opens a port of its own."""
    parent = psutil.Process(served.process.pid)
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in [parent, *parent.children(recursive=True)]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", served.port)}


def test_the_engine_socket_is_private(served: Served) -> None:
    sockets = [
        Path(c.laddr) for c in served.engine.net_connections(kind="unix") if "quire-" in c.laddr
    ]
    assert sockets
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in sockets)
    assert all(path.parent.stat().st_mode & 0o777 == 0o700 for path in sockets)


def test_logs_hold_no_text_and_no_key(served: Served) -> None:
    """FZ-11, after the rest. Red when a prompt, a key or a line of the client's own is logged."""
    nasty = 'forged\r\n{"event": "forged"}\x1b[2J'
    body = {"prompt": SECRET, "max_tokens": 1, "user": nasty, "model": nasty, nasty[:20]: SECRET}
    served.post("/v1/completions", body, ALICE | {"user-agent": SECRET})
    served.get("/" + "swordfish" * 3, ALICE)
    text = served.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["event"] for line in lines} <= {"access", "engine_ready"}
    for word in ("swordfish", "alice-key", "bob-key", "boss-key", "forged", "\x1b"):
        assert word not in text


# ------------------------------------------------------------ mistakes at the start


def refused(*words: str) -> str:
    """What `quire serve` says on its way out with 2; one line."""
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and done.stdout == ""
    return line


def test_a_taken_port_is_one_line(folder: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert port in refused(str(folder), *FLAGS, "--port", port)


def test_a_public_address_needs_a_key(folder: Path) -> None:
    line = refused(str(folder), *FLAGS, "--host", "0.0.0.0", "--port", str(free_port()))
    assert "--api-key" in line


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    assert "nothing-here" in refused(str(tmp_path / "nothing-here"), "--port", str(free_port()))


def test_a_damaged_model_is_one_line(tmp_path: Path) -> None:
    """The engine process finds out, and the whole server ends with what it said."""
    folder = write_tiny_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    line = refused(str(folder), "--device", "cpu", "--port", str(free_port()))
    assert "safetensors" in line
