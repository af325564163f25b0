"""Schemathesis over the server's own OpenAPI document: right data, wrong data, no 5xx ever.

The whole tool runs, as an operator would run it, with its own checks: no server error, only
statuses and types the document knows, and bodies (those of errors above all) as it describes them.
QUIRE_TEST_EXAMPLES raises how many random requests each operation gets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Served

NUM_EXAMPLES = os.environ.get("QUIRE_TEST_EXAMPLES", "2")
# Endless by design, or it stops the server from answering the others, or refuses without reading.
LEFT_OUT = r"^/(inside|admin/(pause|profile)|api/(pull|push|create|copy|delete))$"
CHECKS = (
    *("not_a_server_error", "status_code_conformance"),
    *("content_type_conformance", "response_schema_conformance"),
)
# Narrower than the server's own bounds, so that requests are short and no deadline passes.
SHORT = {"minimum": 1, "maximum": 4}
NARROWED = {"max_tokens": SHORT, "max_completion_tokens": SHORT, "max_output_tokens": SHORT}
PATIENT = {"minimum": 60}


@pytest.fixture(scope="module")
def brief(long_folder: Path) -> Iterator[Served]:
    """A short context, so that requests without a limit end soon too."""
    with Served(long_folder, "--device", "cpu", "--max-model-len", "32") as server:
        yield server
        server.wait_idle()


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    for struct in document["components"]["schemas"].values():
        for name, found in struct.get("properties", {}).items():
            bounds = PATIENT if name == "timeout" else NARROWED.get(name, {})
            for one in found.get("anyOf", [found]):
                if one.get("type") in ("integer", "number"):
                    one.update(bounds)
    for path in document["paths"].values():
        for operation in path.values():
            # The tool holds every single event against the schema, not the stream.
            operation["responses"]["200"]["content"].get("text/event-stream", {}).clear()
    return document


def run(folder: Path, document: dict[str, Any], url: str) -> tuple[int, str]:
    (folder / "openapi.json").write_text(json.dumps(document))
    words = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", url]
    words += ["--exclude-path-regex", LEFT_OUT, "--checks", ",".join(CHECKS)]
    words += ["--phases", "coverage,fuzzing", "--mode", "all", "--max-examples", NUM_EXAMPLES]
    words += ["--generation-deterministic", "--generation-allow-x00", "true", "--workers", "1"]
    words += ["--continue-on-failure", "--request-timeout", "60", "--warnings", "off", "--no-color"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def test_no_request_breaks_the_server(brief: Served, tmp_path: Path) -> None:
    """Red on any 5xx, an undocumented status or type, or an error body clients cannot read."""
    status, document = brief.get("/openapi.json")
    assert status == 200
    code, said = run(tmp_path, narrowed(document), brief.url)
    assert code == 0, said[-6_000:]
    assert "No issues found" in said
    brief.wait_idle()
