"""CL-05: HTTP as nobody should speak it. The answer is a 4xx or a closed connection within the
limits, or a right answer where the standard allows one; and the next client is served."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tests.e2e.harness import Served
from tests.e2e.raw import dial, exchange, read_answer, request_bytes
from tests.tiny_folder import write_tiny_folder

FLAGS = ("--device", "cpu", "--load-format", "dummy")
BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
CLOSED = 0


@pytest.fixture(scope="module", params=["granian", "uvicorn"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"))
    with Served(folder, *FLAGS, "--http-server", request.param) as made:
        yield made


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"GET {path} HTTP/{version}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def chunks(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


NASTY: dict[str, tuple[bytes, set[int]]] = {
    "64 MB header": (get("/health", "Host: a", "X: " + "a" * (64 << 20)), {400, 431}),
    "100 KB header": (get("/health", "Host: a", "X: " + "a" * 100_000), {400, 431}),
    "10,000 headers": (get("/health", "Host: a", *["X: a"] * 10_000), {400, 431}),
    "101 headers": (get("/health", "Host: a", *["X: a"] * 101), {400, 431}),
    "long line": (get("/" + "a" * 200_000, "Host: a"), {400, 414, 431}),
    "gzip body": (
        request_bytes("/v1/completions", b"\x1f\x8b" + BODY, headers={"Content-Encoding": "gzip"}),
        {415},
    ),
    "one-byte chunks": (CHUNKED + b"\r\n" + chunks(BODY, 1), {200}),
    "no chunk size": (CHUNKED + b"\r\nzz\r\n" + BODY, {400, CLOSED}),
    "huge chunk size": (CHUNKED + b"\r\n" + b"f" * 30 + b"\r\n" + BODY, {400, CLOSED}),
    "two lengths": (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
        b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
        {400},
    ),
    "negative length": (request_bytes("/v1/completions", headers={"Content-Length": "-1"}), {400}),
    "huge length": (
        request_bytes("/v1/completions", headers={"Content-Length": "1" + "0" * 30}),
        {400, 413},
    ),
    "odd digits": (request_bytes("/v1/completions", headers={"Content-Length": "\xb2"}), {400}),
    "other coding": (
        CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n" + chunks(BODY, 10),
        {400, 501},
    ),
    "bare LF": (b"GET /health HTTP/1.1\nHost: a\n\n", {200, 400}),
    "no host": (get("/v1/models"), {400}),
    "HTTP/1.0": (get("/health", version="1.0"), {200}),
    "HTTP/9.9": (get("/health", "Host: a", version="9.9"), {200, 400, 505, CLOSED}),
    "NUL in a header": (get("/health", "Host: a", "X: a\x00b"), {400}),
    "NUL in the path": (get("/\x00", "Host: a"), {400}),
    "raw bytes in the path": (get("/\xff", "Host: a"), {400}),
    "odd percents": (get("/%ff%fe%ed%a0%80%00%zz", "Host: a"), {400, 404}),
    "many fields": (get("/health?" + "a=1&" * 100, "Host: a"), {400}),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", {400, 404, 405}),
    "TRACE": (b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", {405}),
    "odd method": (b"F\xc3\xb6 / HTTP/1.1\r\nHost: a\r\n\r\n", {400}),
    "TLS": (bytes.fromhex("16030100a5010000a1") + b"a" * 200, {400, CLOSED}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404, CLOSED}),
    "11 MB body": (request_bytes("/v1/completions", b"a" * (11 << 20)), {413}),
    "9 MB in chunks": (CHUNKED + b"\r\n" + chunks(b"a" * (9 << 20), 1 << 16), {413}),
}


@pytest.mark.parametrize("name", NASTY)
def test_nasty_requests(served: Served, name: str) -> None:
    """Red when one of these is a 5xx, hangs, costs memory, or hurts the next client."""
    data, wanted = NASTY[name]
    before = served.api.memory_info().rss
    begun = time.monotonic()
    status, answer = exchange(served.port, data)
    assert status in wanted, answer[:300]
    assert time.monotonic() - begun < 5.0
    assert served.api.memory_info().rss - before < 48 << 20
    assert served.get("/health")[0] == 200


def test_length_and_chunks_together_cannot_smuggle(served: Served) -> None:
    """Red when what one reading takes for a body, another takes for a second request."""
    inner = get("/v1/models", "Host: a")
    outer = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % (5 + len(inner))
    data = outer + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner
    with dial(served.port, 12) as connection:
        connection.sendall(data)
        got = b""
        while part := connection.recv(65_536):
            got += part
    assert got.count(b"HTTP/1.1 ") == 1 and b"max_model_len" not in got


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    with dial(served.port) as connection:
        connection.sendall(get("/health", "Host: a") + get("/version", "Host: a") * 2)
        got = b""
        while got.count(b'"version"') < 2:
            got += connection.recv(65_536)
    assert got.index(b'"status"') < got.index(b'"version"')
    assert got.count(b"HTTP/1.1 200") == 3


def test_expect_100_continue(served: Served) -> None:
    head = {"Expect": "100-continue"}
    with dial(served.port) as connection:
        connection.sendall(request_bytes("/v1/completions", BODY, headers=head)[: -len(BODY)])
        assert connection.recv(1_000).startswith(b"HTTP/1.1 100")
        connection.sendall(BODY)
        assert read_answer(connection)[0] == 200


def test_a_stream_over_http_1_0_ends_by_closing(served: Served) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 2, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    status, answer = exchange(served.port, head + body)
    assert status == 200 and b"data: [DONE]" in answer
    assert b"transfer-encoding" not in answer.lower()


def test_slow_headers_and_bodies_are_cut_off_and_nobody_waits_for_them(served: Served) -> None:
    """CL-04. Red when half a request holds a connection for ever, or slows down others."""
    slow = {
        "header": b"GET /health HTTP/1.1\r\nHost:",
        "body": request_bytes("/v1/completions", BODY)[:-5],
        "nothing": b"",
    }
    held = [dial(served.port, 20) for _ in range(60)]
    begun = time.monotonic()
    for number, connection in enumerate(held):
        connection.sendall(list(slow.values())[number % 3])
    worst = 0.0
    for _ in range(50):
        asked = time.monotonic()
        assert served.get("/health")[0] == 200
        worst = max(worst, time.monotonic() - asked)
    assert worst < 1.0
    seconds = _seconds_until_closed(held, begun)
    assert max(seconds[1::3]) < 14.0, "bodies"
    assert max(seconds[0::3]) < 14.0, "headers"


def _seconds_until_closed(connections: list, begun: float) -> list[float]:  # type: ignore[type-arg]
    """When each was answered or closed; 99 for those that were not in twenty seconds."""
    found = [99.0] * len(connections)

    def wait(index: int) -> None:
        try:
            while connections[index].recv(65_536):
                found[index] = time.monotonic() - begun
            found[index] = time.monotonic() - begun
        except TimeoutError:
            pass
        except OSError:
            found[index] = time.monotonic() - begun
        connections[index].close()

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(connections))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    return found


def test_no_bug_was_logged(served: Served) -> None:
    """The last of each server."""
    lines = [json.loads(line) for line in served.log.read_text().splitlines()]
    assert not [line for line in lines if line["event"] in ("bug", "loop_error")]
