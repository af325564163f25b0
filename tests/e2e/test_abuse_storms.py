"""Storms against one server: malformed requests, clients that leave, clients that do not read.
After each of them nothing is held, and after all of them no memory or file is gone."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.harness import Served, wait_until
from tests.e2e.malformed import cases
from tests.e2e.raw import StreamClient, dial, request_bytes
from tests.tiny_folder import write_tiny_folder

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
NUM_MALFORMED = 3_000 if IS_LONG else 400
NUM_CLIENTS = 200
NUM_STORMS = 20 if IS_LONG else 2
FLAGS = ("--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "16")
LONG = {"prompt": "once upon a time", "max_tokens": 3_000, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4_096)
    with Served(folder, *FLAGS) as made:
        yield made


class Usage:
    """What the two processes hold now."""

    def __init__(self, served: Served) -> None:
        pair = (served.api, served.engine)
        self.pids = [process.pid for process in pair]
        self.files = [process.num_fds() for process in pair]
        self.megabytes = [process.memory_info().rss / 2**20 for process in pair]

    def assert_not_grown(self, before: Usage, megabytes: float) -> None:
        assert self.pids == before.pids, "a process was restarted"
        for now, then in zip(self.files, before.files, strict=True):
            assert now <= then + 5
        for size, past in zip(self.megabytes, before.megabytes, strict=True):
            assert size <= past + megabytes, (self.megabytes, before.megabytes)


def settle(served: Served, before: Usage) -> None:
    """Idle, and the server has closed what clients left."""
    served.wait_idle()
    wait_until(lambda: served.api.num_fds() <= before.files[0] + 5, 15, "connections closed")


class Asker:
    """A decent client with one connection it keeps, to ask between two bad requests."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", path, body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()


def test_malformed_requests_with_a_good_one_between_each(served: Served) -> None:
    """Red when a bad request gets a 5xx, kills anything, or disturbs the good one after it."""
    good, bad = Asker(served.port), Asker(served.port)
    fields = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    wanted = json.loads(good.post("/v1/completions", json.dumps(fields).encode())[1])
    before, count = Usage(served), 0
    for case in cases(NUM_MALFORMED):
        status, body = bad.post(case.path, case.body)
        assert status < 500, f"{case.name}: {status} {body[:300]!r}"
        assert b"Traceback" not in body and b".py" not in body, case.name
        if status >= 400:
            assert not body or "error" in json.loads(body), case.name
        status, body = good.post("/v1/completions", json.dumps(fields).encode())
        assert status == 200, f"after {case.name}: {body[:300]!r}"
        assert json.loads(body)["choices"] == wanted["choices"], case.name
        count += 1
    assert count == NUM_MALFORMED
    served.wait_idle()
    Usage(served).assert_not_grown(before, megabytes=150)
    assert '"event": "bug"' not in served.log.read_text()


def test_two_hundred_clients_leave_in_mid_stream(served: Served) -> None:
    """CL-01. Red when a request goes on without its client, or keeps a page, a file, memory."""
    before = Usage(served)

    async def storm() -> None:
        clients = [StreamClient(served.port, "/v1/completions", LONG) for _ in range(NUM_CLIENTS)]
        tasks = [asyncio.ensure_future(client.run()) for client in clients]
        while sum(client.seen.num_events > 0 for client in clients) < 16:
            await asyncio.sleep(0.02)
        for client, task in zip(clients, tasks, strict=True):
            client.hang_up()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    for _ in range(NUM_STORMS):
        asyncio.run(storm())
        gone = time.monotonic()
        settle(served, before)
        assert time.monotonic() - gone < 10
    assert served.complete()[0] == 200
    Usage(served).assert_not_grown(before, megabytes=100)
    assert '"event": "bug"' not in served.log.read_text()


HALF = json.dumps(LONG).encode()
PHASES: dict[str, bytes] = {
    "nothing": b"",
    "half a line": b"POST /v1/compl",
    "half the headers": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-",
    "headers": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n",
    "half a body": request_bytes("/v1/completions", HALF)[:-20],
    "a body, whole": request_bytes("/v1/completions", LONG),
    "a body, streamed": request_bytes("/v1/completions", LONG | {"stream": True}),
    "chat": request_bytes(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x" * 2_000}], "max_tokens": 2_000},
    ),
    "grammar": request_bytes("/v1/completions", LONG | {"guided_json": SCHEMA, "stream": True}),
    "n": request_bytes("/v1/completions", LONG | {"n": 4}),
    "prompts": request_bytes("/v1/completions", LONG | {"prompt": ["a", "b"], "stream": True}),
    "responses": request_bytes("/v1/responses", {"input": "x", "stream": True}),
    "messages": request_bytes(
        "/v1/messages",
        {"model": "tiny", "max_tokens": 2_000, "messages": [{"role": "user", "content": "x"}]},
    ),
    "inside": request_bytes("/inside?hz=10", method="GET"),
}


@pytest.mark.parametrize("ends", ["at once", "in decode"])
def test_clients_leave_in_every_phase(served: Served, ends: str) -> None:
    """CL-02. Red when some phase, or whole answers, do not notice that nobody is there."""
    before = Usage(served)
    connections = []
    for data in PHASES.values():
        connection = dial(served.port)
        connection.sendall(data)
        connections.append(connection)
    if ends == "in decode":
        wait_until(lambda: served.num_live_pages() > 0, 10, "work under way")
        time.sleep(0.3)
    for number, connection in enumerate(connections):
        if number % 2:  # a reset instead of a goodbye
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
    settle(served, before)
    assert served.complete()[0] == 200
    assert Usage(served).pids == before.pids
    assert '"event": "bug"' not in served.log.read_text()


def test_slow_readers_do_not_hold_the_engine(served: Served) -> None:
    """CL-03. Red when a client that does not read slows down those who do."""
    slow, before = [], served.num_prompt_tokens()
    for _ in range(8):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect(("127.0.0.1", served.port))
        body = LONG | {"stream": True, "logprobs": 20, "max_tokens": 500}
        connection.sendall(request_bytes("/v1/completions", body))
        slow.append(connection)
    # By what only grows: a quick engine may be done with all eight between two looks at its pages.
    wait_until(lambda: served.num_prompt_tokens() > before, 30, "slow ones under way")
    assert served.complete(max_tokens=20)[0] == 200
    served.wait_idle(30)  # the engine is done with all of them though nobody read anything
    for connection in slow:
        connection.close()
    served.wait_idle()


@pytest.mark.skipif(not IS_LONG, reason="takes 40 s; set QUIRE_LONG_TESTS=1")
def test_readers_that_never_read_are_hung_up_on(served: Served) -> None:
    """CL-03. Red when a full buffer keeps its connection, its file and its memory for ever."""
    before = Usage(served)
    slow = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect(("127.0.0.1", served.port))
        body = LONG | {"stream": True, "logprobs": 20, "n": 2}
        connection.sendall(request_bytes("/v1/completions", body))
        slow.append(connection)
    wait_until(lambda: served.log.read_text().count("slow reader") == 4, 60, "all dropped")
    wait_until(lambda: served.api.num_fds() <= before.files[0], 5, "their files closed")
    for connection in slow:
        with pytest.raises(ConnectionResetError):
            while connection.recv(65_536):
                pass
        connection.close()
    served.wait_idle()


def test_files_run_out_and_come_back(served: Served) -> None:
    """Red when a server that was out of file descriptors for a moment stays deaf."""
    api = served.api
    before = api.rlimit(psutil.RLIMIT_NOFILE)
    api.rlimit(psutil.RLIMIT_NOFILE, (api.num_fds() + 20, before[1]))
    try:
        held = [dial(served.port, 5) for _ in range(60)]
        time.sleep(0.5)
    finally:
        api.rlimit(psutil.RLIMIT_NOFILE, before)
    for connection in held:
        connection.close()
    wait_until(lambda: _answers(served), 15, "answers again")
    assert served.complete()[0] == 200


def _answers(served: Served) -> bool:
    try:
        return bool(served.get("/health")[0] == 200)
    except OSError:
        return False


def test_the_log_is_one_json_object_a_line(served: Served) -> None:
    """FZ-11, after everything above. Red when any of it could write a line of its own."""
    lines = [json.loads(line) for line in served.log.read_text().splitlines()]
    assert len(lines) > NUM_MALFORMED
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    text = served.log.read_text()
    assert "once upon a time" not in text and "meta-data" not in text
