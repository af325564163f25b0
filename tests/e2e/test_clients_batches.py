"""Batches through OpenAI's own client, unmodified: upload, run, download, cancel, kills."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.harness import Served, wait_until
from tests.tiny_folder import write_tiny_folder

FLAGS = ("--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "8")
KEYS = ("--api-key", "alice", "--api-key", "bob")


def line(number: int, url: str, body: dict[str, Any]) -> str:
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": url, "body": body})


def completions(count: int, **fields: Any) -> bytes:
    body = {"max_tokens": 4, "temperature": 0, **fields}
    lines = [line(i, "/v1/completions", {"prompt": f"number {i}", **body}) for i in range(count)]
    return "\n".join(lines).encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4_096)
    with Served(folder, *FLAGS, *KEYS) as made:
        yield made


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="alice", max_retries=0)


def submit(client: openai.OpenAI, data: bytes, endpoint: Any = "/v1/completions") -> Any:
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


def ended(client: openai.OpenAI, batch: Any, seconds: float = 60.0) -> Any:
    done = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch.id).status in done, seconds, "the batch")
    return client.batches.retrieve(batch.id)


def output(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in client.files.content(file_id).text.strip().split("\n")]


def test_every_endpoint_answers_as_it_does_alone(client: openai.OpenAI) -> None:
    """Red when a line's answer differs from that of the same request sent by hand."""
    asked: dict[Any, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hello", "max_tokens": 5, "temperature": 0},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 5,
            "temperature": 0,
        },
        "/v1/responses": {"input": "hello", "max_output_tokens": 5, "temperature": 0},
        "/v1/embeddings": {"input": "hello"},
    }
    for endpoint, body in asked.items():
        batch = submit(client, line(0, endpoint, body).encode(), endpoint)
        done = ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 1), endpoint
        (found,) = output(client, done.output_file_id)
        assert found["custom_id"] == "n0" and found["error"] is None
        alone = client.post(endpoint.removeprefix("/v1"), body=body, cast_to=object)
        for key in ("choices", "data"):
            if key in found["response"]["body"]:
                assert found["response"]["body"][key] == alone[key]  # type: ignore[index]
        assert found["response"]["status_code"] == 200


def test_bad_lines_and_bad_requests(client: openai.OpenAI) -> None:
    data = completions(2) + b"\n" + completions(1) + b"\n{nonsense"
    done = ended(client, submit(client, data))
    assert done.status == "failed"
    codes = {error.code: error.line for error in done.errors.data}
    assert codes == {"duplicate_custom_id": 3, "invalid_json_line": 4}

    good = line(0, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    bad = line(1, "/v1/completions", {"prompt": "x", "temperature": -1})
    other = line(2, "/v1/completions", {"prompt": "x", "model": "another"})
    done = ended(client, submit(client, f"{good}\n\n{bad}\r\n{other}\n".encode()))
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 1, 2)
    statuses = [
        (x["custom_id"], x["response"]["status_code"]) for x in output(client, done.error_file_id)
    ]
    assert statuses == [("n1", 400), ("n2", 404)]
    assert [x["custom_id"] for x in output(client, done.output_file_id)] == ["n0"]


def test_a_cancelled_batch_keeps_what_it_has(served: Served, client: openai.OpenAI) -> None:
    batch = submit(client, completions(400, max_tokens=200, ignore_eos=True))
    wait_until(
        lambda: client.batches.retrieve(batch.id).request_counts.completed > 2, 60, "some lines"
    )
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch)
    assert done.status == "cancelled" and done.request_counts.completed < 400
    found = output(client, done.output_file_id)
    assert len(found) == done.request_counts.completed
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(ended(client, submit(client, completions(1))).id)
    served.wait_idle()


def test_others_see_nothing(served: Served, client: openai.OpenAI) -> None:
    """Red when a key reaches files or batches of another."""
    done = ended(client, submit(client, completions(1)))
    bob = openai.OpenAI(base_url=f"{served.url}/v1", api_key="bob", max_retries=0)
    for look in (
        lambda: bob.batches.retrieve(done.id),
        lambda: bob.batches.cancel(done.id),
        lambda: bob.files.retrieve(done.output_file_id),
        lambda: bob.files.content(done.output_file_id),
        lambda: bob.files.delete(done.output_file_id),
        lambda: bob.batches.create(
            input_file_id=done.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            look()
    assert bob.files.list().data == [] and bob.batches.list().data == []
    mine = [batch.id for batch in client.batches.list(limit=2)]
    assert mine[0] == done.id and len(set(mine)) == len(mine) > 2  # walks from page to page
    assert client.files.delete(done.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(done.output_file_id)


def test_kills_lose_no_line_and_double_none(served: Served, client: openai.OpenAI) -> None:
    """Red when the death of the engine or of the API process costs a line or answers one twice."""
    count = 300
    batch = submit(client, completions(count, max_tokens=32, ignore_eos=True))
    for victim in ("engine", "api", "engine"):
        now = client.batches.retrieve(batch.id).request_counts.completed
        getattr(served, victim).send_signal(signal.SIGKILL)
        wait_until(partial(_has_gone_on, served, now), 60, f"lines after the {victim}'s death")
    done = ended(client, batch, 120)
    assert (done.status, done.request_counts.failed) == ("completed", 0)
    found = [entry["custom_id"] for entry in output(client, done.output_file_id)]
    assert found == [f"n{i}" for i in range(count)]


def _has_gone_on(served: Served, before: int) -> bool:
    try:
        status, body = served.get("/v1/batches?limit=1", {"authorization": "Bearer alice"})
    except OSError:
        return False
    return status == 200 and body["data"][0]["request_counts"]["completed"] > before


def test_interactive_requests_go_first(served: Served, client: openai.OpenAI) -> None:
    """Red when a batch takes all the places: it must give way at once."""
    batch = submit(client, completions(200, max_tokens=400, ignore_eos=True))
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", 30, "begun")
    time.sleep(0.3)
    for _ in range(5):
        client.completions.create(model="tiny", prompt="me first", max_tokens=2)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    ended(client, batch)


def test_a_restart_goes_on(tmp_path: Path) -> None:
    """Red when a batch does not survive the whole server."""
    folder = write_tiny_folder(tmp_path / "tiny", max_position_embeddings=4_096)
    store = ("--store", str(tmp_path / "store"))
    with Served(folder, *FLAGS, *store) as first:
        client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="-", max_retries=0)
        batch = submit(client, completions(150, max_tokens=64, ignore_eos=True))
        wait_until(
            lambda: client.batches.retrieve(batch.id).request_counts.completed > 5, 60, "lines"
        )
        first.process.kill()
    with Served(folder, *FLAGS, *store) as second:
        client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="-", max_retries=0)
        done = ended(client, batch, 120)
        assert done.status == "completed"
        found = [entry["custom_id"] for entry in output(client, done.output_file_id)]
        assert found == [f"n{i}" for i in range(150)]
