"""A long batch under fifty deaths: of the engine, of the API process, of the whole server."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import openai
import pytest

from tests.e2e.harness import Served, wait_until
from tests.e2e.test_clients_batches import FLAGS, completions, ended, output, submit
from tests.tiny_folder import write_tiny_folder

COUNT, KILLS = 10_000, 50
VICTIMS = ("engine", "api", "engine", "api", "server")


@pytest.mark.skipif(not os.environ.get("QUIRE_LONG_TESTS"), reason="set QUIRE_LONG_TESTS=1")
def test_fifty_deaths_lose_no_line_and_double_none(tmp_path: Path) -> None:
    """Red when a death at any moment costs a line, answers one twice, or changes an answer."""
    folder = write_tiny_folder(tmp_path / "tiny", max_position_embeddings=4_096)
    flags = (*FLAGS, "--store", str(tmp_path / "store"))
    served = Served(folder, *flags)
    try:
        served.__enter__()
        batch = submit(_client(served), completions(COUNT, max_tokens=8, ignore_eos=True))
        for number, victim in enumerate(itertools.islice(itertools.cycle(VICTIMS), KILLS), 1):
            _wait(served, number * COUNT // (KILLS + 1))
            if victim == "server":
                served.process.kill()
                served.process.wait()
                served = Served(folder, *flags)
                served.__enter__()
            else:
                getattr(served, victim).send_signal(signal.SIGKILL)
        _wait(served, COUNT)
        client = _client(served)
        done = ended(client, batch, 300)
        assert (done.status, done.request_counts.failed) == ("completed", 0)
        found = output(client, done.output_file_id)
        assert [entry["custom_id"] for entry in found] == [f"n{i}" for i in range(COUNT)]
        for at in range(0, COUNT, max(1, COUNT // 20)):
            asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
            status, body = served.complete(f"number {at}", **asked)
            text = found[at]["response"]["body"]["choices"][0]["text"]
            assert status == 200 and body["choices"][0]["text"] == text
    finally:
        served.stop()


def _client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=5)


def _wait(served: Served, lines: int) -> None:
    """Until so many lines have an answer, through the deaths of others."""

    def is_there() -> bool:
        try:
            status, body = served.get("/v1/batches?limit=1")
        except OSError:
            return False
        return status == 200 and body["data"][0]["request_counts"]["completed"] >= lines

    wait_until(is_there, 180, f"{lines} lines")
