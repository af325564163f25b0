"""The container files, read as instructions: who runs, what is written to, what is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.cli import serve
from quire.env import VARIABLES
from quire.errors import BadRequest
from tests.rules.source import ROOT

IMAGES = ("deploy/Dockerfile.cpu", "deploy/Dockerfile.cuda")
Instruction = tuple[str, str]


def instructions(path: str) -> list[Instruction]:
    """(word, rest) of each instruction; lines that go on are joined, comments are left out."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in found]


def last_stage(path: str) -> list[Instruction]:
    found = instructions(path)
    begins = max(at for at, (word, _) in enumerate(found) if word == "FROM")
    return found[begins:]


def value(path: str, word: str) -> str:
    """Of an instruction that the image that runs has once."""
    (only,) = (rest for name, rest in last_stage(path) if name == word)
    return only


def environment(path: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in value(path, "ENV").split())


@pytest.mark.parametrize("path", IMAGES)
def test_it_runs_as_an_ordinary_user(path: str) -> None:
    """Red when a container is root, or writes to a place that is neither /cache nor /tmp."""
    user = value(path, "USER").split(":")[0]
    assert user.isdigit() and int(user) >= 1_000  # a number: runAsNonRoot cannot read names
    names = [name for name, _ in last_stage(path)]
    assert "RUN" not in names[names.index("USER") :]
    assert value(path, "VOLUME") == "/cache"
    given = environment(path)
    assert given["QUIRE_CACHE"] == "/cache" and given["HOME"] == "/tmp"
    assert given["PYTHONDONTWRITEBYTECODE"] == "1"
    assert {name for name in given if name.startswith("QUIRE_")} <= {v.name for v in VARIABLES}


@pytest.mark.parametrize("path", IMAGES)
def test_what_is_started_and_asked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the image listens to everybody without a key, or is asked at the wrong place."""
    assert json.loads(value(path, "ENTRYPOINT")) == ["quire"]
    verb, *words = json.loads(value(path, "CMD"))
    assert verb == "serve"
    args = serve.build_parser().parse_args(words)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    with pytest.raises(BadRequest, match="without an API key"):
        serve.settings_of(args)
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert serve.settings_of(args).host == "0.0.0.0"
    assert value(path, "EXPOSE") == str(args.port)
    command = json.loads(value(path, "HEALTHCHECK").partition("CMD ")[2])
    assert f"http://127.0.0.1:{args.port}/ready" in command[-1]
    compile(command[-1], "the health check", "exec")
    assert value(path, "STOPSIGNAL") == "SIGTERM"


@pytest.mark.parametrize("path", IMAGES)
def test_what_is_copied_is_there(path: str) -> None:
    """Red when a file is moved, or left out of what a builder gets to see."""
    seen = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for word, rest in instructions(path):
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in seen, source
    assert seen[0] == "*"


@pytest.mark.parametrize("path", IMAGES)
def test_it_is_made_of_what_is_pinned(path: str) -> None:
    """Red when an install ignores the constraints, or keeps what only building needs."""
    runs = [rest for word, rest in instructions(path) if word == "RUN"]
    for run in runs:
        for install in re.findall(r"pip install [^&]*", run):
            assert "--constraint constraints.txt" in install
        if "apt-get install" in run:
            assert "--no-install-recommends" in run and "rm -rf /var/lib/apt/lists/*" in run
    assert any("quire.native.build --ship" in run for run in runs)
    bases = {rest.split()[0] for word, rest in instructions(path) if word == "FROM"}
    assert bases == {"${BASE}"}  # Python of the one is Python of the other


def test_the_folder_has_no_other_images() -> None:
    found = {p.relative_to(ROOT).as_posix() for p in Path(ROOT / "deploy").glob("*ockerfile*")}
    assert found == set(IMAGES)
