"""MockServer: the server's side of the page's contract, on the standard library.

Serves the page's own files under the real Content-Security-Policy, streams chat chunks as a test
tells it to (`reply`), streams snapshots (`snapshot`), and remembers what it was asked and whether
a client went away in the middle of an answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "quire" / "server" / "page"
POLICY = "default-src 'self'; img-src 'self' data:; connect-src 'self'"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """How to answer one chat request."""

    pieces: tuple[str, ...] = ("Hello", " there", ".")
    reasoning: tuple[str, ...] = ()
    delay_s: float = 0.0
    is_endless: bool = False  # repeats the pieces until the client goes away
    status: int = 200
    error: str | None = None  # after the pieces, in the stream; or the body when status is not 200
    is_cut: bool = False  # the connection ends without finish_reason or [DONE]
    has_logprobs: bool = False
    route: str | None = None  # who answered, and why


@dataclass
class MockServer:
    key: str | None = None
    reply: Callable[[Json], Reply] = lambda body: Reply()
    snapshot: Callable[[], Json] = lambda: {"ready": False}
    bodies: list[Json] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)
    num_inside: int = 0
    generation: int = 0  # raising it ends every open snapshot stream
    is_inside_down: bool = False
    models: list[Json] = field(
        default_factory=lambda: [{"id": "mock-model", "object": "model", "max_model_len": 8192}]
    )
    batches: list[Json] = field(default_factory=list)
    cache: Json = field(default_factory=lambda: {"mode": "off", "entries": 0, "data": []})
    acts: list[tuple[str, str, Json]] = field(default_factory=list)  # method, path, body
    refusal: str | None = None  # of what an operator does

    def __post_init__(self) -> None:
        mock = self

        class Handler(_Handler):
            server_state = mock

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def drop_streams(self) -> None:
        self.generation += 1

    def close(self) -> None:
        self.drop_streams()
        self.http.shutdown()
        self.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_state: MockServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/":
            self.send_file("index.html")
        elif path.startswith("/page/"):
            self.send_file(path.removeprefix("/page/"))
        elif not self.is_allowed():
            self.send_json(401, {"error": {"message": "Wrong or missing API key"}})
        elif path == "/v1/models":
            self.send_json(200, {"object": "list", "data": self.server_state.models})
        elif path == "/v1/batches":
            self.send_json(200, {"object": "list", "data": self.server_state.batches})
        elif path == "/v1/answer_cache":
            self.send_json(200, {"object": "answer_cache", **self.server_state.cache})
        elif path == "/inside" and not self.server_state.is_inside_down:
            self.stream(self.snapshots())
        else:
            self.send_json(404, {"error": {"message": f"No such path: {path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_allowed():
            self.send_json(401, {"error": {"message": "Wrong or missing API key"}})
            return
        if not self.path.endswith("/completions"):
            self.act("POST", body)
            return
        self.server_state.bodies.append(body)
        reply = self.server_state.reply(body)
        if reply.status != 200:
            self.send_json(reply.status, {"error": {"message": reply.error}})
        else:
            self.stream(chunks(reply), reply.route)

    def do_DELETE(self) -> None:
        self.act("DELETE", {})

    def act(self, method: str, body: Json) -> None:
        state = self.server_state
        state.acts.append((method, self.path, body))
        if state.refusal is not None:
            self.send_json(403, {"error": {"message": state.refusal}})
            return
        self.send_json(200, {})

    def is_allowed(self) -> bool:
        key = self.server_state.key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def send_file(self, name: str) -> None:
        path = PAGE / name
        if "/" in name or not path.is_file():
            self.send_json(404, {"error": {"message": f"No such file: {name}"}})
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", f"{TYPES[path.suffix]}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(data)

    def send_json(self, status: int, value: Json) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "2")
        self.end_headers()
        self.wfile.write(data)

    def stream(self, events: Iterator[str], route: str | None = None) -> None:
        self.send_response(200)
        if route is not None:
            self.send_header("x-quire-route", route)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for event in events:
                self.wfile.write(event.encode())
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.server_state.disconnected.set()

    def snapshots(self) -> Iterator[str]:
        state = self.server_state
        state.num_inside += 1
        generation = state.generation
        while generation == state.generation:
            yield f"data: {json.dumps(state.snapshot())}\n\n"
            time.sleep(0.05)


def chunk_of(delta: Json, finish: str | None = None, logprobs: Json | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    if logprobs is not None:
        choice["logprobs"] = logprobs
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"


def logprobs_of(piece: str, index: int) -> Json:
    rivals = [{"token": piece, "logprob": -0.2}, {"token": " else", "logprob": -1.9}]
    return {
        "content": [{"token": piece, "logprob": -0.05 - index % 5 * 0.8, "top_logprobs": rivals}]
    }


def chunks(reply: Reply) -> Iterator[str]:
    """The events of one answer, split oddly on purpose: comments, CRLF, a role of its own."""
    yield ": ping\n\n"
    yield chunk_of({"role": "assistant"}).replace("\n\n", "\r\n\r\n")
    for piece in reply.reasoning:
        yield chunk_of({"reasoning_content": piece})
    is_first = True
    while is_first or reply.is_endless:
        for index, piece in enumerate(reply.pieces):
            logprobs = logprobs_of(piece, index) if reply.has_logprobs else None
            yield chunk_of({"content": piece}, logprobs=logprobs)
            time.sleep(reply.delay_s)
        is_first = False
    if reply.is_cut:
        return
    if reply.error is not None:
        yield f"data: {json.dumps({'error': {'message': reply.error, 'type': 'server_error'}})}\n\n"
        return
    yield chunk_of({}, finish="stop")
    usage = {
        "prompt_tokens": 90,
        "completion_tokens": len(reply.pieces),
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    timings = {
        "queue_ms": 1.5,
        "ttft_ms": 80.0,
        "prefill_ms": 78.5,
        "decode_ms": 400.0,
        "tokens_per_s": 43.2,
    }
    yield f"data: {json.dumps({'choices': [], 'usage': usage, 'timings': timings})}\n\n"
    yield "data: [DONE]\n\n"
