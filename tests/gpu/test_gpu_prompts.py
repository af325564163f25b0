"""Graphs of short prompts: the tokens of the plain path, whatever is padded and replayed."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.test_engine_gpu import FAMILIES, engine_of, make, model_of, prompts, run

LENGTHS = (17, 31, 32, 33, 100, 130, 250, 300)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_with_and_without_graphs(family: str) -> None:
    """Red when a replay reads another prompt's upload, or padding reaches a page or a result."""
    model = model_of(family)
    asked = [(n, round) for round in range(3) for n in LENGTHS]
    results = []
    for eager in (True, False):
        engine = engine_of(model, enforce_eager=eager, enable_prefix_caching=False)
        outputs = []
        for id, (n, round) in enumerate(asked):  # one after the other: each alone in its step
            prompt = prompts(1, seed=100 * round + n, low=n, high=n)[0]
            outputs += run(engine, [make(id, prompt, 6)])
        results.append(outputs)
    graphs = engine.runner.prompt_graphs
    assert graphs is not None and len(graphs.graphs) >= 4
    assert results[0] == results[1]
