"""Kernels of long contexts are compiled before the first request, on a machine that has none yet.

In a process of its own, with a folder of compiled kernels of its own. Red when the first long
prompt waits for the compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.rules.source import ROOT

CHILD = """
import json
from quire.kernels.compiles import tell_compiles
from tests.gpu.test_engine_gpu import engine_of, make, model_of, run

engine, late = engine_of(model_of("llama")), []
tell_compiles(late.append)
for number, length in enumerate((40, 600, 1000)):
    run(engine, [make(number, [3 + (7 * i + number) % 500 for i in range(length)], 4)])
print("late", json.dumps(late))
"""


def test_a_first_long_prompt_waits_for_no_kernel_of_its_context(tmp_path: Path) -> None:
    surroundings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-c", CHILD]
    done = subprocess.run(words, cwd=ROOT, env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith("late "))
    late = json.loads(said.removeprefix("late "))
    assert not [name for name in late if "merge" in name or "split" in name], late
