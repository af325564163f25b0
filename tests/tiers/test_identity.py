"""Pages of another version of Quire are not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.engine import tier_identity


@pytest.mark.parametrize(
    "name", ["attn/balance.py", "engine/cache_form.py", "lora/folder.py", "native/src/store.c"]
)
def test_every_source_that_has_a_say_is_in_the_fingerprint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when pages that other code made are taken for ours."""
    source = tier_identity.PACKAGE / name
    monkeypatch.setattr(tier_identity, "PACKAGE", tmp_path)
    (tmp_path / name).parent.mkdir(parents=True)
    shutil.copyfile(source, tmp_path / name)
    before = tier_identity._sources()
    (tmp_path / name).write_bytes(source.read_bytes() + b"\n")
    assert tier_identity._sources() != before
