"""Trees of drafts on CUDA change nothing: tokens, texts, logprobs and reasons are those without.

Red when a draft's keys are read at a sibling's place or summed in another order than a chain's,
when a graph reads the paths of another step, when what was right is left in a slot that is not its
own, in whatever form the cache keeps it, or when a walk ends elsewhere than the host thinks. What
is plain comes first, so that the first failure names the part that is to blame.
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
from tests.gpu import test_gpu_spec as chains
from tests.spec import heads
from tests.spec.cases import Told, answer, difference, tokens_apart, undrafted

TREE = "[(0,), (1,), (0, 0), (1, 0), (2,), (0, 0, 0)]"
WIDE = "[(0,), (0, 0), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]"
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int4": {"kv_cache_dtype": "int4"},
    "fp32": {"dtype": "float32"},
}
# Drafts of heads give way before anybody is driven out: with more pages nobody ever is.
CROWDS = {**chains.CROWDS, "preempted": {"num_spare_pages": 2, "max_num_batched_tokens": 24}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[..., list[object]]:
    """Answers without speculation, by family and form of the cache."""
    found: dict[tuple[str, str], list[object]] = {}

    def of(family: str, form: str, llm: LLM | None = None) -> list[object]:
        """`llm`: one that has no drafts so far."""
        if (family, form) not in found:
            llm = llm or chains.opened(folder, family, **FORMS[form])
            found[family, form] = answer(undrafted(llm), chains.asked())
        return found[family, form]

    return of


def tree_replays(llm: LLM) -> list[int]:
    """Sizes of graphs, from now on, that were replayed for steps with trees."""
    graphs = llm._engine.runner.graphs
    seen: list[int] = []
    if graphs is None:
        return seen
    replay = graphs.replay

    def watched(rows: torch.Tensor, *more: Any) -> object:
        if more[-1] is not None:
            seen.append(len(rows))
        return replay(rows, *more)

    graphs.replay = watched  # type: ignore[method-assign]
    return seen


def check_twice(llm: LLM, want: list[object], *about: str) -> None:
    """The second time prefixes are cached."""
    for nth in ("first", "second"):
        apart = difference(chains.asked(), answer(llm, chains.asked()), want)
        assert not apart, f"{', '.join(about)}, the {nth} time: {apart}"


TOLD = [
    ("llama", "eager", "bf16"),
    ("llama", "crowded", "bf16"),
    ("llama", "alone", "bf16"),
    ("llama", "chunked", "bf16"),
    ("llama", "preempted", "bf16"),
    ("gemma3_text", "preempted", "bf16"),
    ("deepseek_v3", "chunked", "bf16"),
    ("mixtral", "crowded", "bf16"),
    ("llama", "preempted", "int8"),
    ("llama", "preempted", "int4"),
    ("llama", "crowded", "fp8"),
    ("llama", "crowded", "fp32"),
    ("gemma3_text", "crowded", "int8"),
    ("llama", "uncached", "bf16"),
]


@pytest.mark.parametrize(("family", "crowd", "form"), TOLD)
def test_told_trees_change_nothing(
    family: str, crowd: str, form: str, folder: Path, plain: Callable[..., list[object]]
) -> None:
    """Trees of any shape, another each step."""
    llm = chains.opened(folder, family, **{**FORMS[form], **CROWDS[crowd]})
    assert llm._engine.core.lag == 1
    want = plain(family, form, llm)
    told = llm._engine.core.drafts = Told({}, Random(5), branching=0.4)
    seen, num_preempted = tree_replays(llm), llm.stats().num_preempted
    answer(llm, chains.asked())  # learns them
    check_twice(llm, want, family, crowd, form)
    assert told.num_accepted > 200 and told.num_refused > 100, f"{told.num_accepted=}"
    assert len(seen) > 10 or crowd == "eager", f"{seen=}"
    assert llm.stats().num_preempted > num_preempted or crowd != "preempted", "nobody left"


HEADS = [
    ("medusa", "llama", "preempted", "fp8"),
    ("eagle3", "llama", "preempted", "bf16"),
    ("eagle3", "gemma3_text", "eager", "bf16"),
    ("suffix+eagle3", "llama", "chunked", "bf16"),
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
    llm = chains.opened(
        folder,
        family,
        speculative_config=_config(method, folder, family, TREE),
        **{**FORMS[form], **CROWDS[crowd]},
    )
    seen = tree_replays(llm)
    check_twice(llm, want, method, family, crowd, form)
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens, f"{stats=}"
    assert seen or crowd == "eager", "no graph for a step with trees"
    assert stats.num_preempted > 0 or crowd != "preempted", "nobody left"


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
    for nth in ("learning them", "told"):
        for at, got in enumerate(engines.run(engine, requests())):
            apart = tokens_apart(got, want[at])
            assert not apart, f"{max_num_seqs=}, {nth}, behind {len(near[at])} tokens: {apart}"
    assert told.num_accepted > 100 and told.num_refused > 20, f"{told.num_accepted=}"


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_tree_guesses_more_than_its_trunk(method: str, folder: Path) -> None:
    """Red when second guesses repeat the first, or walks never leave the trunk."""
    if not (folder / "llama").exists():
        tiny_model("llama", folder / "llama", seed=3, **chains.SIZES["llama"])
    params = SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True, seed=3)
    texts = [f"{i} and {i + 1}" for i in range(24)]
    accepted = []
    for tree in ("[(0,), (0, 0)]", WIDE):
        config = _config(method, folder, "llama", tree)
        llm = chains.opened(folder, "llama", speculative_config=config)
        llm.generate(texts, params, use_tqdm=False)
        accepted.append(llm.stats().num_accepted_tokens)
    assert accepted[1] > 1.5 * accepted[0], f"{method}: {accepted}"


def _config(method: str, folder: Path, family: str, tree: str) -> dict[str, Any]:
    config = heads.head_for(method, folder, family)
    del config["num_speculative_tokens"]
    return {**config, "speculative_token_tree": tree}
