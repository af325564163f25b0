"""Help is instant and starts with something to copy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.cli.bench import KINDS
from quire.cli.main import VERBS
from tests.cli.conftest import ROOT, quire

ALL = [[verb] for verb in VERBS] + [["bench", kind] for kind in KINDS]


@pytest.mark.parametrize("words", [[], *ALL], ids=" ".join)
def test_examples_come_before_options(words, capsys):
    done = quire(*words, "--help")
    assert done.returncode == 0 and done.stderr == ""
    out = done.stdout
    assert not out.startswith("usage")
    assert out.splitlines()[2] == "examples:" or "\nexamples:\n" in out[: out.index("usage:")]
    assert out.index("examples:") < out.index("usage:") < out.index("options:")
    assert f"  quire {' '.join(words)}".rstrip() in out.partition("examples:")[2]


def test_no_help_imports_torch_or_takes_long():
    """CPU time, so that a busy machine does not fail it: import torch alone takes over a second."""
    code = f"""
import sys, time
from quire.cli.main import main
for words in {[[], *ALL]!r}:
    try:
        main([*words, "--help"])
    except SystemExit as stop:
        assert stop.code == 0
heavy = {{"torch", "numpy", "rich", "matplotlib", "tokenizers"}} & set(sys.modules)
assert not heavy, heavy
assert time.process_time() < 0.6, time.process_time()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_version():
    from quire import __version__

    assert quire("--version").stdout == f"quire {__version__}\n"
