"""Torch's import in a thread: it is whole afterwards, and its libraries are where they are looked
for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.load.torch_import import LIBRARIES

CODE = """
import sys, threading
from quire.load.torch_import import begin_import
begin_import()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
assert "torch" in sys.modules, "not imported"
import torch
assert torch.ones(3).sum() == 3
"""


def test_the_thread_imports_it() -> None:
    """Red when the thread fails, which nobody else would notice."""
    subprocess.run([sys.executable, "-c", CODE], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are opened ahead on Linux alone")
def test_its_libraries_have_these_names() -> None:
    """Red when a new torch calls them otherwise: nothing would be opened ahead."""
    folder = Path(torch.__file__).parent / "lib"
    assert [name for name, _ in LIBRARIES if not (folder / name).is_file()] == []
