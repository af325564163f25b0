"""Steps as one native call: the same model as layer by layer, the same bits in any step.

That either equals transformers is `tests/model/test_parity.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.attn.native import NativeAttention
from quire.engine.build import Engine
from quire.engine.giving_way import open_urge
from quire.llm import LLM
from quire.models.tiny import tiny_model as tiny_folder
from quire.native.library import Library
from quire.request import BACKGROUND
from tests.hf import tiny_engine, tiny_model
from tests.model import test_deepseek, test_gpt_oss
from tests.model.test_parity import make, prompts, run
from tests.model.test_tiny import engine_of

RECORDED = (
    "llama-gqa",
    "llama-mha-bias",
    "qwen3",
    "granite",
    "gemma2",
    "gemma3",
    "mistral-window",
    "gpt2-16",
    "olmo2-16",
    "mixtral-16",
    "qwen2-moe-16",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "gpt-oss",
    "v2-native",
    "v3-native",
)
NOT_RECORDED = ("gpt2", "olmo2", "mixtral")  # heads of 12 and 8 numbers


def model_of(family: str) -> Any:
    if family in test_deepseek.FAMILIES:
        return test_deepseek.model_of(family)
    return test_gpt_oss.tiny_gpt_oss() if family == "gpt-oss" else tiny_model(family)


def logits_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Of three prompts read in chunks beside each other, then five tokens each."""
    seen: list[torch.Tensor] = []
    logits = engine.runner.model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    monkeypatch.setattr(engine.runner.model, "logits", watched)
    run(engine, [make(i, p, 5) for i, p in enumerate(prompts(3, seed=5))])
    return seen


@pytest.mark.parametrize("family", RECORDED)
def test_one_call_is_the_model_layer_by_layer(
    family: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an operation on a tape is not the one on tensors, or reads what is written over."""
    options = {"max_num_batched_tokens": 24, "max_chunk": 9}
    model = model_of(family)
    native = tiny_engine(model, **options)
    assert native.runner.tapes is not None
    plain = tiny_engine(model, enforce_eager=True, **options)
    assert plain.runner.tapes is None
    for got, want in zip(
        logits_of(native, monkeypatch), logits_of(plain, monkeypatch), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3"])
def test_packed_experts_and_latents(
    kind: str, library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Red when packed experts are expanded, or latents beside them are not kept in fp16."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    sizes |= (
        {"head_dim": 16} if kind == "Qwen3Moe" else {**test_deepseek.NATIVE, "kv_lora_rank": 32}
    )
    folder = tiny_folder(f"{kind}ForCausalLM", tmp_path, **sizes)
    words = {"quantization": "rtn-int4-g32", "dtype": "auto", "max_num_batched_tokens": 24}
    native, plain = engine_of(folder, **words), engine_of(folder, **words, enforce_eager=True)
    assert native.runner.tapes is not None and plain.runner.tapes is None
    assert native.runner.backend.cache_dtype == torch.float16
    assert {"4 bits", "8 bits"} <= {" ".join(form.split()[:2]) for form in _forms(native)}
    for got, want in zip(
        logits_of(native, monkeypatch), logits_of(plain, monkeypatch), strict=True
    ):
        assert torch.equal(got, want)


def _forms(engine: Engine) -> list[str]:
    (weights,) = [d.value for d in engine.decisions if d.what == "weights"]
    return weights.split(", ")


@pytest.mark.parametrize("family", NOT_RECORDED)
def test_what_has_no_operation_runs_layer_by_layer(family: str, library: Library) -> None:
    """Red when a layer that is not recorded is left out in silence."""
    engine = tiny_engine(tiny_model(family))
    assert engine.runner.tapes is None
    assert not isinstance(engine.runner.backend, NativeAttention)
    (steps,) = [d for d in engine.decisions if d.what == "steps"]
    assert steps.value == "layer by layer" and steps.why


@pytest.mark.parametrize(
    "family",
    ["qwen3", "gemma2", "mistral-window", "gpt2-16", "gpt-oss", "qwen2-moe-16", "v3-native"],
)
def test_every_instruction_set_and_thread_gives_the_same_bits(
    family: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a sum's order follows the width of a vector, or who computes it."""
    model = model_of(family)
    library.set_threads(1)
    want = logits_of(tiny_engine(model), monkeypatch)
    for isa, threads in ((library.isas[0], 3), *((isa, 1) for isa in library.isas[1:])):
        library.use_isa(isa)
        engine = tiny_engine(model)
        library.set_threads(threads)
        got = logits_of(engine, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (isa, threads)


def test_a_packed_file_stays_packed(library: Library, default_model_path: Path) -> None:
    """Red when a layer of the default file is expanded: its weights are 98 MB with all there is."""
    small = {"num_threads": 1, "kv_cache_memory": 64 << 20, "max_model_len": 512}
    llm = LLM(str(default_model_path), device="cpu", **small)
    said = {d.what: d for d in llm.decisions}
    assert said["weights"].value == "4 bits 63.28 MiB, 8 bits 28.69 MiB"
    assert said["steps"].value == "one call"
    assert said["cpu kernels"].value == f"{library.isas[0]}, 1 threads"
    # 30 layers of 3 kv heads of 64 numbers, keys and values, in two bytes each.
    pages = (64 << 20) // (16 * 30 * 3 * 64 * 2 * 2)
    told = f"{pages - 1} pages of 16 tokens, 63.98 MiB of float16, 23,040 bytes a token"
    assert said["kv cache"].value == told


def test_a_step_given_up_leaves_no_trace(library: Library) -> None:
    """A thread raises the urge at any moment; the tokens are those of an engine left in peace.

    Red when half a step is taken for a whole one, or when a second try has other bits."""
    want = _answers(tiny_engine(tiny_model("llama-gqa"), max_num_batched_tokens=24))
    engine = tiny_engine(tiny_model("llama-gqa"), max_num_batched_tokens=24)
    urge, stopped = open_urge(engine), threading.Event()
    assert engine.core.scheduler.leftover.can_stop

    def hurry() -> None:
        for _ in range(50):  # then the rest is done in peace
            urge.set()
            if stopped.wait(1e-4):
                return

    thread = threading.Thread(target=hurry)
    thread.start()
    try:
        urge.set()  # before the first operation of the first step
        got = _answers(engine, lambda: urge.clear())
    finally:
        stopped.set()
        thread.join()
    assert got == want
    assert engine.core.scheduler.counts.recomputed > 0
    assert engine.core.scheduler.kv.allocator.num_live == 0


def _answers(engine: Engine, each_step: Callable[[], None] = lambda: None) -> list[list[int]]:
    """Of lines of a batch, greedy and drawn, with and without a visitor beside them."""
    requests = [make(i, p, 8) for i, p in enumerate(prompts(6, seed=7))]
    for request in requests[:5]:
        request.priority = BACKGROUND
        request.params = request.params.with_(temperature=float(request.id % 2))
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
        each_step()
    return [request.output for request in requests]
