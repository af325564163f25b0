"""quire batch run: answers in order, also when the first run was killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import main
from tests.e2e.harness import wait_until
from tests.tiny_folder import write_tiny_folder

COUNT = 200


def command(folder: Path, source: Path) -> list[str]:
    flags = ["--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "8", "--threads", "1"]
    return [sys.executable, "-m", "quire", "batch", "run", str(source), "-m", str(folder), *flags]


def num_answered(store: Path) -> int:
    if not (store / "quire.sqlite").is_file():
        return 0
    try:
        with sqlite3.connect(store / "quire.sqlite") as db:
            return int(db.execute("SELECT coalesce(sum(completed), 0) FROM batches").fetchone()[0])
    except sqlite3.Error:  # its tables are being made
        return 0


def test_it_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Red when a second run begins anew, loses a line, or leaves its store behind."""
    folder = write_tiny_folder(tmp_path / "tiny", max_position_embeddings=4_096)
    source = tmp_path / "lines.jsonl"
    body = {"prompt": "hello", "max_tokens": 64, "ignore_eos": True}
    entry = {"method": "POST", "url": "/v1/completions", "body": body}
    source.write_text("\n".join(json.dumps({"custom_id": str(i), **entry}) for i in range(COUNT)))
    store = tmp_path / ".lines.output.jsonl.batch"
    first = subprocess.Popen(command(folder, source), start_new_session=True)
    try:
        wait_until(lambda: num_answered(store) > 5, 90, "some lines")
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    before = num_answered(store)
    assert 5 < before < COUNT
    second = subprocess.run(command(folder, source), capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert f"{COUNT} of {COUNT} lines" in second.stderr
    answers = (tmp_path / "lines.output.jsonl").read_text().strip().split("\n")
    assert [json.loads(line)["custom_id"] for line in answers] == [str(i) for i in range(COUNT)]
    assert not store.exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "line 1"), ("{}\n", "line 1"), ('{"url": "/x", "custom_id": ""}', "method")],
)
def test_a_bad_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    source = tmp_path / "lines.jsonl"
    source.write_text(text)
    assert main(["batch", "run", str(source)]) == 2
    told = capsys.readouterr().err
    assert "lines.jsonl" in told and why in told
    assert main(["batch", "run", str(tmp_path / "none")]) == 2
