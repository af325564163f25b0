"""A whole engine whose products and adapters are a GPU's, in the interpreter.

Oracle: the engine that adds adapters as CPUs do. Red when a slot, a tail, a mix of adapters or an
eviction goes wrong between the engine and the kernels. Graphs are replaced by what they capture.
"""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.build import Engine
from quire.lora.on_gpu import GpuAdapters
from quire.native import library
from quire.ops.cuda_ops import CudaOps
from quire.request import Request
from quire.runner.adapted_graphs import AdaptedGraphs
from quire.runner.captured import decoded
from quire.runner.graphs import Decoded, DecodeStep
from tests.hf import VOCAB, tiny_engine, tiny_model
from tests.lora.cases import ALL, Answers, ask, run, write_adapter

NAMES = ("", "a", "b", "c")

LONG = os.environ.get("QUIRE_LONG_TESTS") == "1"


def everyone() -> list[Request]:
    draw = random.Random(5)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in (1, 19)]
    asked = [(prompt, name) for prompt in prompts for name in NAMES]
    return [ask(i, *pair, max_tokens=3) for i, pair in enumerate(asked)]


class UncapturedGraphs:
    """`GraphCache` without CUDA: pads to multiples of four, and computes what would be captured."""

    memory = None

    def __init__(self, step: DecodeStep, max_batch: int, max_context: int, spare_row: int) -> None:
        self.step, self.sizes, self.num_replays = step, [max_batch], 0
        self.max_context, self.spare_row = max_context, spare_row

    def covers(self, num_seqs: int, longest: int) -> bool:
        return True

    def batch_bucket(self, num_seqs: int) -> int:
        return -(-num_seqs // 4) * 4

    def replay(
        self, rows: Tensor, positions: Tensor, longest: int, shares_prefix: bool, nodes: None = None
    ) -> Decoded:
        self.num_replays += 1
        return self.step(rows, positions, longest, shares_prefix, nodes)


def engine(folders: dict[str, str], **changes: object) -> Engine:
    made = tiny_engine(tiny_model("llama-packable"), enforce_eager=True, **changes)
    bank, adapters = made.runner.adapters, made.core.adapters
    assert bank is not None and adapters is not None
    if isinstance(made.runner.model.ops, CudaOps):
        bank.on_gpu = GpuAdapters(made.runner.model, 32)
    for name, path in folders.items():
        adapters.load(name, path)
    return made


def put_graphs(made: Engine) -> tuple[Any, AdaptedGraphs]:
    """(those of steps without adapters, the others)"""
    runner = made.runner
    step = partial(decoded, runner)
    plain: Any = UncapturedGraphs(step, runner.rows.max_rows, 256, 8)
    assert runner.adapters is not None
    runner.graphs = plain
    runner.adapted_graphs = AdaptedGraphs(step, runner.adapters, runner.rows, plain)
    return plain, runner.adapted_graphs


@pytest.mark.skipif(not LONG, reason="20 s of the interpreter: QUIRE_LONG_TESTS=1")
def test_answers_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama-packable")
    folders = {
        name: str(write_adapter(tmp_path / name, model, targets, rank, seed=rank))
        for name, targets, rank in (("a", ALL, 4), ("b", ALL, 20), ("c", ("v_proj", "up_proj"), 3))
    }
    monkeypatch.setattr("quire.engine.cpu_path.find_library", lambda: library.Found(None, "none"))
    wanted = run(engine(folders), everyone())
    ops = CudaOps(torch.device("cpu"), torch.float32)
    monkeypatch.setattr("quire.engine.load_model.ops_of", lambda *_: ops)
    monkeypatch.setattr("quire.runner.adapted_graphs.GraphCache", UncapturedGraphs)
    made = engine(folders, max_num_batched_tokens=16, max_loras=2)
    plain, adapted = put_graphs(made)
    for path in folders.values():  # a slot is too few: copies come back
        shutil.rmtree(path)
    near(run(made, everyone()), wanted)
    count = adapted._graphs.num_replays
    assert count > 0
    before = plain.num_replays
    run(made, [request for request in everyone() if not request.adapter_name])
    assert adapted._graphs.num_replays == count and plain.num_replays > before


def near(found: Answers, wanted: Answers) -> None:
    for id, (tokens, logprobs) in found.items():
        assert tokens == wanted[id][0]
        got, want = ([one.logprob for one in each] for each in (logprobs, wanted[id][1]))
        assert got == pytest.approx(want, abs=2e-3)
