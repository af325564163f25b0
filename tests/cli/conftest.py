from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.tiny_folder import write_tiny_folder

ROOT = Path(__file__).parents[2]
ENGINE = ["--load-format", "dummy", "--threads", "1", "--kv-cache-memory", "8MiB"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def mute(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a tokenizer."""
    return str(write_tiny_folder(tmp_path_factory.mktemp("mute"), tokenizer=False))


def quire(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "quire", *words],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )


Records = list[dict[str, Any]]


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., Records]:
    """The command in this process: every line of its stdout must be JSON."""

    def run(*words: str) -> Records:
        assert main([*words, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run
