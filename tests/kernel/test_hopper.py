"""Kernels in Gluon are asked for where they run, and nobody else needs Gluon."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import triton

from quire.kernels.hopper import GLUON_VERSIONS, has_hopper_kernels

KNOWN = f"{GLUON_VERSIONS[0]}9"


@pytest.mark.parametrize(
    ("device", "chip", "version", "expected"),
    [
        ("cuda", 9, KNOWN, True),
        ("cuda", 8, KNOWN, False),
        ("cuda", 10, KNOWN, False),
        ("cuda", 9, "99.0", False),
        ("cpu", 9, KNOWN, False),
    ],
)
def test_where_they_run(
    device: str, chip: int, version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (chip, 0))
    monkeypatch.setattr(triton, "__version__", version)
    assert has_hopper_kernels.__wrapped__(torch.device(device)) is expected


def test_without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "__version__", KNOWN)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    assert not has_hopper_kernels.__wrapped__(torch.device("cuda"))


def test_products_and_attention_import_without_gluon() -> None:
    """Red when a module that every device needs imports one that is written in Gluon."""
    script = (
        "import sys; sys.modules['triton.experimental.gluon'] = None;"
        "import quire.kernels.matmul, quire.attn.triton, quire.ops.matmul_linear"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
