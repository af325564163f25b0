"""curl, the client everybody has: HTTP as it is on the wire."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Served

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

JSON = ("-H", "content-type: application/json")
BODY = json.dumps({"prompt": "hello", "max_tokens": 5})


def curl(*words: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--max-time", "30", *words],
        input=None if text is None else text.encode(),
        capture_output=True,
        check=True,
    )
    return done.stdout.decode()


def headed(answer: str) -> tuple[str, dict[str, str], str]:
    """Status line, headers by lower-case name, body of the last answer in `curl -i`."""
    head, _, body = answer.replace("\r\n", "\n").partition("\n\n")
    while " 100 " in head.split("\n", 1)[0]:
        head, _, body = body.partition("\n\n")
    status, *lines = head.split("\n")
    pairs = (line.split(": ", 1) for line in lines)
    return status, {name.lower(): value for name, value in pairs}, body


def test_a_plain_post(served: Served) -> None:
    status, headers, body = headed(curl("-i", *JSON, "-d", BODY, f"{served.url}/v1/completions"))
    assert status == "HTTP/1.1 200 OK" and headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body.encode())
    assert json.loads(body)["usage"]["completion_tokens"] == 5


def test_a_stream_ends_with_done(served: Served) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 5, "stream": True})
    answer = curl("-i", "-N", *JSON, "-d", body, f"{served.url}/v1/completions")
    status, headers, text = headed(answer)
    assert status == "HTTP/1.1 200 OK"
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["x-accel-buffering"] == "no" and "content-length" not in headers
    assert text.endswith("data: [DONE]\n\n")


def test_one_connection_serves_many_requests(served: Served) -> None:
    """Keep-alive, also after an error and a stream: curl counts the connections it opened."""
    url = f"{served.url}/v1/completions"
    stream = json.dumps({"prompt": "hello", "max_tokens": 3, "stream": True})
    words: list[str] = []
    for body in (BODY, "not json", stream, BODY):
        shown = ["-o", "/dev/null", "-w", "%{http_code} %{num_connects}\n"]
        words += [*(["--next"] if words else []), *JSON, "-d", body, *shown, url]
    assert curl(*words).split("\n")[:4] == ["200 1", "400 0", "200 0", "200 0"]


def test_http_1_0_is_answered(served: Served) -> None:
    assert json.loads(curl("--http1.0", f"{served.url}/health")) == {"status": "ok"}


def test_compressed_is_an_offer_not_a_need(served: Served) -> None:
    answer = curl("--compressed", *JSON, "-d", BODY, f"{served.url}/v1/completions")
    assert json.loads(answer)["object"] == "text_completion"


def test_a_compressed_body_is_refused(served: Served) -> None:
    words = ["-H", "content-encoding: gzip", "-d", BODY, f"{served.url}/v1/completions"]
    status, _, body = headed(curl("-i", *JSON, *words))
    assert " 415" in status and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_expect_100_continue(served: Served) -> None:
    """curl asks first when a body is large; red when nobody says to go on."""
    big = json.dumps({"prompt": "x", "max_tokens": 2, "metadata": {"pad": "y" * 2_000_000}})
    words = ["-H", "Expect: 100-continue", "--expect100-timeout", "20", "--data-binary", "@-"]
    answer = curl("-i", *JSON, *words, f"{served.url}/v1/completions", text=big)
    assert headed(answer)[0] == "HTTP/1.1 200 OK"


def test_a_chunked_body(served: Served) -> None:
    words = ["-H", "transfer-encoding: chunked", "--data-binary", "@-"]
    answer = curl(*JSON, *words, f"{served.url}/v1/completions", text=BODY)
    assert json.loads(answer)["usage"]["completion_tokens"] == 5


def test_a_body_without_a_content_type_is_read(served: Served) -> None:
    """`curl -d` says it is a form; refusing that would only teach people a header."""
    assert json.loads(curl("-d", BODY, f"{served.url}/v1/completions"))["choices"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/openapi.json", "/"])
def test_head_is_get_without_a_body(served: Served, path: str) -> None:
    status, headers, body = headed(curl("-I", f"{served.url}{path}"))
    assert " 200" in status and body.strip() == "" and "x-request-id" in headers


def test_options_and_origins(served: Served) -> None:
    """Without allowed origins no page of another site may use this server from a browser."""
    origin = ["-H", "origin: https://evil.example", "-H", "access-control-request-method: POST"]
    status, headers, _ = headed(
        curl("-i", "-X", "OPTIONS", *origin, f"{served.url}/v1/chat/completions")
    )
    assert " 403" in status and "access-control-allow-origin" not in headers


API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"
EXAMPLES = re.findall(r"```bash\n(curl .*?)```", API_PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_documentation_s_examples_work(served: Served, example: str) -> None:
    """Red when docs/api.md shows a request the server does not take, or takes with a warning."""
    words = shlex.split(example.replace("http://127.0.0.1:8000", served.url))
    status, headers, body = headed(curl("-i", *words[1:]))
    assert " 200" in status and "x-quire-warning" not in headers, body


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-X", "PUT", "-d", "{}", "/v1/completions"], 405),
        (["/v1/completions"], 405),
        (["-d", "{}", "/v1/models"], 405),
        (["/v1/nothing"], 404),
        (["/v1/models/no/such/model"], 404),
        (["/v1/models/"], 404),
        (["--path-as-is", "/page/../../etc/passwd"], 404),
        (["/page/%2e%2e%2fserver.py"], 404),
        (["-d", "", "/v1/completions"], 400),
        (["-d", "[1, 2]", "/v1/completions"], 400),
        (["-d", '{"prompt": "a"', "/v1/completions"], 400),
        (["-d", '{"prompt": "\\ud800"}', "/v1/completions"], 400),
        (["-d", "\x00", "/tokenize"], 400),
    ],
)
def test_mistakes_have_the_right_status_and_body(
    served: Served, words: list[str], code: int
) -> None:
    *given, path = words
    text = None
    if "\x00" in given:  # which no argument can hold
        given, text = ["--data-binary", "@-"], "\x00"
    answer = curl("-i", *JSON, *given, f"{served.url}{path}", text=text)
    status, _, body = headed(answer)
    assert f" {code}" in status
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
