"""Adapters on CUDA: many in a batch, each as if it were alone, with graphs and without.

Oracles: the same request alone in its engine, an engine without adapters, and the model whose
weights have the adapter merged in.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tests.hf as hf
from quire.engine.build import Engine
from quire.ops.cuda_ops import CudaOps
from quire.quant.load_forms import load_form
from quire.quant.weight import Dense
from quire.request import Request
from tests.gpu import test_engine_gpu as base
from tests.lora.cases import ALL, Answers, ask, merged, run, write_adapter

NAMES = ("", "small", "large", "some")
RANKS = {"small": 3, "large": 40, "some": 16}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "int4": {"quantization": "rtn-int4-g32"},
    "windowed": {},
}
# Tokens of all prompts of all names are more than one block of rows.
LENGTHS = (1, 9, 70, 220)


def hf_model(kind: str) -> Any:
    window = 60 if kind == "windowed" else None
    sizes = {**base.SIZES, "sliding_window": window}
    family, known = "adapted", base.FAMILIES
    known[family] = lambda: hf._llama_like("Mistral", **sizes)
    try:
        return base.model_of(family)
    finally:
        del known[family]


def write_all(place: Path, model: Any) -> dict[str, str]:
    """Of several ranks and types, one for some modules only. Half as strong as the weights."""
    for seed, (name, rank) in enumerate(RANKS.items()):
        targets = ("v_proj", "down_proj") if name == "some" else ALL
        dtype = torch.float32 if name == "small" else torch.bfloat16
        alpha = rank**0.5 / 4
        write_adapter(place / name, model, targets, rank, seed, dtype, lora_alpha=alpha)
    return {name: str(place / name) for name in RANKS}


class Setup(NamedTuple):
    kind: str
    model: Any
    folders: dict[str, str]
    engine: Engine
    together: Answers  # of `everyone`, in one batch


def engine_of(kind: str, model: Any, **changes: Any) -> Engine:
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048, **KINDS[kind]}
    return base.engine_of(model, **{**options, **changes})


def everyone() -> list[Request]:
    """Every adapter and none with the same prompts, in turn."""
    draw = random.Random(11)
    prompts = [[draw.randrange(3, base.VOCAB) for _ in range(length)] for length in LENGTHS]
    asked = [(prompt, name) for prompt in prompts for name in NAMES]
    return [ask(i, *pair, max_tokens=12) for i, pair in enumerate(asked)]


@pytest.fixture(scope="module", params=KINDS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    model = hf_model(request.param)
    folders = write_all(tmp_path_factory.mktemp("adapters"), model)
    engine = engine_of(request.param, model, lora=folders)
    yield Setup(request.param, model, folders, engine, run(engine, everyone()))


def test_each_alone(made: Setup) -> None:
    """Red when a neighbour, a graph's padding or a tile reaches into an adapter's rows."""
    for request in everyone():
        assert run(made.engine, [request])[request.id] == made.together[request.id], request.id
    assert made.engine.runner.adapted_graphs is not None
    outputs = [tuple(made.together[i][0]) for i in range(12, 16)]
    assert len(set(outputs)) == len(NAMES)  # adapters do something


def test_graphs_and_eager(made: Setup) -> None:
    """Red when a captured graph keeps the mix that it was captured with."""
    eager = engine_of(made.kind, made.model, lora=made.folders, enforce_eager=True)
    assert eager.runner.adapted_graphs is None
    assert run(eager, everyone()) == made.together


def test_rows_without_an_adapter(made: Setup) -> None:
    """Red when an engine with adapters gives other bits to those who use none."""
    plain = engine_of(made.kind, made.model)
    own = [request for request in everyone() if not request.adapter_name]
    found = run(plain, own)
    assert found == {request.id: made.together[request.id] for request in own}


def test_few_in_memory_and_growing_ranks(made: Setup) -> None:
    """Red when a slot keeps the adapter before, or graphs one of a smaller rank."""
    engine = engine_of(made.kind, made.model, max_loras=1)
    assert engine.core.adapters is not None and engine.runner.adapted_graphs is not None
    for name, path in sorted(made.folders.items(), key=lambda pair: RANKS[pair[0]]):
        engine.core.adapters.load(name, path)
        asked = [request for request in everyone() if request.adapter_name in (name, "")]
        assert run(engine, asked) == {r.id: made.together[r.id] for r in asked}, name
    asked = [request for request in everyone() if request.adapter_name]
    assert run(engine, asked) == {r.id: made.together[r.id] for r in asked}


def test_copies_on_the_host(made: Setup, tmp_path: Path) -> None:
    """Red when an adapter that made room needs its folder, or comes back from half a copy."""
    engine = engine_of(made.kind, made.model, max_loras=1)
    bank, adapters = engine.runner.adapters, engine.core.adapters
    assert bank is not None and adapters is not None
    for name, path in made.folders.items():
        shutil.copytree(path, tmp_path / name)
        adapters.load(name, str(tmp_path / name))
        shutil.rmtree(tmp_path / name)
    asked = [request for request in everyone() if request.adapter_name]
    for _ in range(2):
        assert run(engine, asked) == {r.id: made.together[r.id] for r in asked}
        asked = [request for request in everyone() if request.adapter_name]
    held = [copy.held for copy in bank._copies.values()]
    assert len(held) == len(RANKS)
    assert all(one is not None and one.memory.is_pinned() for one in held)


@pytest.mark.parametrize("name", RANKS)
def test_near_merged_weights(made: Setup, name: str) -> None:
    """Red when a scale, a part or a gate is wrong in all of the tests above alike."""
    if made.kind == "int4":
        pytest.skip("merged weights would round to other codes")
    prompt = base.prompts(1, seed=4, low=200)[0]
    want = merged(made.model, Path(made.folders[name]))
    targets = torch.tensor(prompt[1:])[:, None]
    with torch.no_grad():
        exact, own = (
            each(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1].gather(1, targets)[:, 0]
            for each in (want, made.model)
        )
    request = ask(1, prompt, name, max_tokens=1, prompt_logprobs=1)
    made.engine.core.add(request)
    got: list[float] = []
    while made.engine.core.has_work:
        for event in made.engine.core.step():
            got += [record.logprob for record in event.prompt_logprobs]
    off = (torch.tensor(got) - exact).abs()
    effect = (own - exact).abs().mean()
    assert len(got) == len(prompt) - 1 and off.mean() < effect / 10, (off.mean(), effect)
    assert off.max() < 0.3, off.max()  # bf16 carries 8 bits through a few layers


@pytest.mark.parametrize("form", ["float", "rtn-int4-g32", "rtn-int4-g128", "fp8"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_sums(form: str, gate: str | None) -> None:
    """Sums have one order for any number of rows, and rounding them gives the product."""
    from quire.kernels.silu_mul import silu_mul

    device = torch.device("cuda")
    random = torch.Generator(device).manual_seed(3)
    n, k = 2048, 1024
    weights = [torch.randn(n, k, generator=random, device=device).bfloat16() / 32 for _ in range(2)]
    packed = [Dense(w) if form == "float" else load_form(form).of(w) for w in weights]
    kernel: Any = CudaOps(device, torch.bfloat16).linear(packed, None, gate)
    x = torch.randn(600, k, generator=random, device=device).bfloat16()
    sums = kernel.sums(x)
    for rows in (1, 2, 16, 31, 64, 100, 200, 300, 600):
        few = kernel.sums(x[:rows])
        assert torch.equal(few, sums[:rows]), rows
        rounded = few.bfloat16()
        if gate is not None:
            rounded = silu_mul(rounded, gate, interleaved=kernel.pairs)
        assert torch.equal(rounded, kernel(x[:rows])), rows
