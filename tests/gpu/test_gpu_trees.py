"""Trees of drafts on CUDA change nothing: tokens, texts, logprobs and reasons are those without.

Red when a draft's keys are read at a sibling's place or summed in another order than a chain's,
when a graph reads the paths of another step, when what was right is left in a slot that is not its
own, in whatever form the cache keeps it, or when a walk ends elsewhere than the host thinks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.llm import LLM
from quire.models.tiny import tiny_model
from quire.params import SamplingParams
from quire.request import Request
from tests.gpu import test_engine_gpu as engines
from tests.gpu.test_gpu_spec import CROWDS, SIZES, asked, opened
from tests.spec import heads
from tests.spec.cases import Told, answer

TREE = "[(0,), (1,), (0, 0), (1, 0), (2,), (0, 0, 0)]"
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int4": {"kv_cache_dtype": "int4"},
    "fp32": {"dtype": "float32"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[..., list[object]]:
    """Answers without speculation, by family and form of the cache."""
    found: dict[tuple[str, str], list[object]] = {}

    def of(family: str, form: str = "bf16") -> list[object]:
        if (family, form) not in found:
            found[family, form] = answer(opened(folder, family, **FORMS[form]), asked())
        return found[family, form]

    return of


def tree_replays(llm: LLM) -> list[int]:
    """Sizes of graphs, from now on, that were replayed for steps with trees."""
    graphs = llm._engine.runner.graphs
    assert graphs is not None
    replay, seen = graphs.replay, []

    def watched(rows: torch.Tensor, *more: Any) -> object:
        if more[-1] is not None:
            seen.append(len(rows))
        return replay(rows, *more)

    graphs.replay = watched  # type: ignore[method-assign]
    return seen


SOME = [
    *(("llama", crowd, "bf16") for crowd in CROWDS),
    *(("llama", "preempted", form) for form in FORMS if form != "bf16"),
    ("gemma3_text", "preempted", "bf16"),
    ("gemma3_text", "crowded", "int8"),
    ("deepseek_v3", "chunked", "bf16"),
    ("mixtral", "crowded", "bf16"),
]


@pytest.mark.parametrize(("family", "crowd", "form"), SOME)
def test_told_trees_change_nothing(
    family: str, crowd: str, form: str, folder: Path, plain: Callable[..., list[object]]
) -> None:
    """Trees of any shape, another each step."""
    want = plain(family, form)
    llm = opened(folder, family, **{**FORMS[form], **CROWDS[crowd]})
    assert llm._engine.core.lag == 1
    told = Told.of(llm, asked(), branching=0.4)
    seen = [] if crowd == "eager" else tree_replays(llm)
    assert answer(llm, asked()) == want
    assert answer(llm, asked()) == want
    assert told.num_accepted > 200 and told.num_refused > 100
    assert len(seen) > 10 or crowd == "eager"
    if crowd == "preempted":
        assert llm.stats().num_preempted > 0


HEADS = [
    ("eagle3", "llama", "preempted", "bf16"),
    ("eagle3", "llama", "crowded", "int8"),
    ("eagle3", "gemma3_text", "eager", "bf16"),
    ("suffix+eagle3", "llama", "chunked", "bf16"),
    ("medusa", "llama", "chunked", "bf16"),
    ("medusa", "llama", "preempted", "fp8"),
    ("mtp", "deepseek_v3", "crowded", "bf16"),
]


@pytest.mark.parametrize(("method", "family", "crowd", "form"), HEADS)
def test_trees_of_heads_change_nothing(
    method: str,
    family: str,
    crowd: str,
    form: str,
    folder: Path,
    plain: Callable[..., list[object]],
) -> None:
    want = plain(family, form)
    if method == "mtp" and not heads.has_mtp(folder / family):
        heads.add_mtp(folder / family)
    config = heads.head_for(method, folder, family)
    del config["num_speculative_tokens"]
    config["speculative_token_tree"] = TREE
    more = {**FORMS[form], **CROWDS[crowd]}
    llm = opened(folder, family, speculative_config=config, **more)
    seen = [] if crowd == "eager" else tree_replays(llm)
    assert answer(llm, asked()) == want
    assert answer(llm, asked()) == want  # with prefix hits
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    assert seen or crowd == "eager"
    if crowd == "preempted":
        assert stats.num_preempted > 0


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_tree_guesses_more_than_its_trunk(method: str, folder: Path) -> None:
    """Red when second guesses repeat the first, or walks never leave the trunk."""
    if not (folder / "llama").exists():
        tiny_model("llama", folder / "llama", seed=3, **SIZES["llama"])
    params = SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True, seed=3)
    texts = [f"{i} and {i + 1}" for i in range(24)]
    accepted = []
    for tree in ("[(0,), (0, 0)]", "[(0,), (0, 0), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]"):
        config = heads.head_for(method, folder, "llama")
        del config["num_speculative_tokens"]
        llm = opened(folder, "llama", speculative_config={**config, "speculative_token_tree": tree})
        llm.generate(texts, params, use_tqdm=False)
        accepted.append(llm.stats().num_accepted_tokens)
    assert accepted[1] > 1.5 * accepted[0]


@pytest.mark.parametrize("max_num_seqs", [1, 30])
def test_long_contexts(max_num_seqs: int) -> None:
    """Trees on both sides of the borders of tiles and splits."""
    model = engines.model_of("qwen3")  # heads of 64
    near = [prompt for n in (60, 125, 190, 508, 635) for prompt in engines.prompts(3, n, n, n)]

    def requests() -> list[Request]:
        return [engines.make(i, p, 24, 0.5 * (i % 2)) for i, p in enumerate(near)]

    engine = engines.engine_of(model, max_num_seqs=max_num_seqs)
    want = engines.run(engine, requests())
    told = engine.core.drafts = Told({}, Random(5), branching=0.4)
    assert engines.run(engine, requests()) == want  # learns them
    assert engines.run(engine, requests()) == want
    assert told.num_accepted > 100 and told.num_refused > 20


def test_a_prefix_that_many_share() -> None:
    """Its splits are read once for all, those in which drafts lie by each draft alone."""
    model = engines.model_of("qwen3")
    prefix = engines.prompts(1, 9, 640, 640)[0]
    near = [[*prefix, *own] for own in engines.prompts(24, 3, 1, 40)]

    def requests() -> list[Request]:
        return [engines.make(i, p, 16, 0.5 * (i % 2)) for i, p in enumerate(near)]

    engine = engines.engine_of(model)
    want = engines.run(engine, requests())
    shared: list[bool] = []
    told = engine.core.drafts = Told({}, Random(5), branching=0.4)
    execute = engine.runner.execute

    def watched(plan: Any) -> Any:
        shared.append(plan.shares_prefix and any(work.parents for work in plan.works))
        return execute(plan)

    engine.core.runner.execute = watched  # type: ignore[method-assign]
    for _ in range(2):
        assert engines.run(engine, requests()) == want
    assert told.num_accepted > 100 and any(shared)
