"""Speculation on CUDA changes nothing: tokens, texts, logprobs and reasons are those without it.

The requests, drafts and heads are those of the suites for CPUs (`tests/spec`). Red when a draft's
row has other bits than the decode it stands for, when attention reads keys that the same step is
about to write, when a graph returns another step's states, or when the host drafts on tokens that
it does not know yet.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.bench.shapes import SHAPES, shrunk, write_shape
from quire.llm import LLM
from quire.models.tiny import tiny_model
from quire.params import SamplingParams
from quire.request import Request
from quire.runner.drafter import ModelDrafter
from quire.runner.runner import ModelRunner
from quire.spec.speculation import Speculation
from tests.gpu import test_engine_gpu as engines
from tests.spec import heads
from tests.spec.cases import Told, answer, everyone, open_tiny, undrafted

Asked = list[tuple[str, SamplingParams]]

# Sizes that the kernels for Hopper take, where there are any for the kind of attention.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 512},
    "gemma3_text": {"hidden_size": 128, "head_dim": 32},
    "deepseek_v3": {
        "hidden_size": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "q_lora_rank": 64,
        "moe_intermediate_size": 64,
    },
    "mixtral": {"hidden_size": 128, "intermediate_size": 128},
}
CROWDS: dict[str, dict[str, Any]] = {
    "crowded": {},
    "alone": {"max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 24},
    "preempted": {"num_spare_pages": 10, "max_num_batched_tokens": 24},
    "eager": {"enforce_eager": True},
    "uncached": {"enable_prefix_caching": False},
}
HAS_GRAMMARS = all(map(find_spec, ("llguidance", "jsonschema")))


def asked() -> Asked:
    return [(t, p) for t, p in everyone() if HAS_GRAMMARS or p.structured_outputs is None]


def opened(folder: Path, family: str, **changes: Any) -> LLM:
    if not (folder / family).exists():
        tiny_model(family, folder / family, seed=3, **SIZES[family])
    device = {"device": "cuda", "dtype": "bfloat16", "page_size": 16, "kv_cache_memory": 1 << 24}
    return open_tiny(folder, family, **{**device, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str], list[object]]:
    """Answers without speculation, by family."""
    found: dict[str, list[object]] = {}

    def of(family: str) -> list[object]:
        if family not in found:
            found[family] = answer(undrafted(opened(folder, family)), asked())
        return found[family]

    return of


def verifying_replays(runner: ModelRunner) -> list[int]:
    """Sizes of graphs, from now on, that were replayed for several tokens of one row."""
    assert runner.graphs is not None
    replay, spare, seen = runner.graphs.replay, runner.rows.max_rows, []

    def watched(rows: torch.Tensor, *more: Any) -> object:
        real = [row for row in rows.tolist() if row != spare]
        if len(set(real)) < len(real):
            seen.append(len(rows))
        return replay(rows, *more)

    runner.graphs.replay = watched
    return seen


SOME = [
    *(("llama", crowd) for crowd in CROWDS),
    ("gemma3_text", "preempted"),
    ("deepseek_v3", "chunked"),
    ("mixtral", "crowded"),
]


@pytest.mark.parametrize(("family", "crowd"), SOME)
def test_told_drafts_change_nothing(
    family: str, crowd: str, folder: Path, plain: Callable[[str], list[object]]
) -> None:
    llm = opened(folder, family, **CROWDS[crowd])
    assert llm._engine.core.lag == 1
    told = Told.of(llm, asked())
    runner = llm._engine.runner
    seen = [] if runner.graphs is None else verifying_replays(runner)
    assert answer(llm, asked()) == plain(family)
    assert told.num_accepted > 200 and told.num_refused > 100
    assert len(seen) > 10 or crowd == "eager"
    if crowd == "preempted":
        assert llm.stats().num_preempted > 0


@pytest.mark.skipif(not HAS_GRAMMARS, reason="needs llguidance and jsonschema")
def test_what_grammars_force_changes_nothing(
    folder: Path, plain: Callable[[str], list[object]]
) -> None:
    """Red when drafts behind a token in flight are judged by another mask than its own step's."""
    llm = opened(folder, "llama")
    assert answer(llm, asked()) == plain("llama")
    stats = llm.stats()
    assert stats.num_drafted_tokens > 0 < stats.num_accepted_tokens


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("llama", {"method": "ngram", "prompt_lookup_min": 1}),
    "suffix": ("mixtral", {"method": "suffix"}),
    "itself": ("llama", {"method": "draft_model", "model": "llama"}),
    "itself, windowed": ("gemma3_text", {"method": "draft_model", "model": "llama"}),
    "another": ("llama", {"method": "draft_model", "model": "other"}),
    "early exit": ("gemma3_text", {"method": "early_exit"}),
    "early exit of latents": ("deepseek_v3", {"method": "early_exit"}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_methods_change_nothing(
    name: str, folder: Path, plain: Callable[[str], list[object]]
) -> None:
    family, config = CONFIGS[name]
    want = plain(family)
    config = {**config, "adaptive": False, "num_speculative_tokens": 3}
    if config.get("model") == "other" and not (folder / "other").exists():
        tiny_model("llama", folder / "other", seed=9, **SIZES["llama"])
    if "model" in config:
        plain("llama")  # makes the folder
        config["model"] = str(folder / config["model"])
    llm = opened(folder, family, speculative_config=config)
    drafter = llm._engine.runner.drafter
    drafts = verifying_replays(drafter.runner) if isinstance(drafter, ModelDrafter) else None
    assert answer(llm, asked()) == want
    assert answer(llm, asked()) == want  # with prefix hits
    stats = llm.stats()
    assert stats.num_accepted_tokens > (30 if name in ("ngram", "suffix", "itself") else 0)
    if name == "itself":
        assert stats.num_accepted_tokens > 0.7 * stats.num_drafted_tokens
        assert drafts, "no graph for a drafter that lags behind"


HEADS = [
    ("eagle3", "llama", "preempted"),
    ("eagle3", "gemma3_text", "eager"),
    ("suffix+eagle3", "llama", "crowded"),
    ("medusa", "llama", "chunked"),
    ("mtp", "deepseek_v3", "crowded"),
]


@pytest.mark.parametrize(("method", "family", "crowd"), HEADS)
def test_heads_change_nothing(
    method: str, family: str, crowd: str, folder: Path, plain: Callable[[str], list[object]]
) -> None:
    want = plain(family)
    if method == "mtp" and not heads.has_mtp(folder / family):
        heads.add_mtp(folder / family)
    config = heads.head_for(method, folder, family)
    llm = opened(folder, family, speculative_config=config, **CROWDS[crowd])
    graphs = llm._engine.runner.graphs
    seen = [] if graphs is None else verifying_replays(llm._engine.runner)
    assert answer(llm, asked()) == want
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    assert seen or graphs is None


def test_graphs_give_heads_the_states_of_eager_steps(folder: Path) -> None:
    """Red when a head reads what another step left: it would guess otherwise."""
    opened(folder, "llama")
    counts = []
    for is_eager in (True, False):
        config = heads.head_for("eagle3", folder, "llama")
        llm = opened(folder, "llama", speculative_config=config, enforce_eager=is_eager)
        answer(llm, asked())
        stats = llm.stats()
        counts.append((stats.num_drafted_tokens, stats.num_accepted_tokens))
    assert counts[0] == counts[1]


def test_depth_by_cost(folder: Path, plain: Callable[[str], list[object]]) -> None:
    """Red when sizes that graphs are padded to were not measured, or nothing is ever drafted."""
    want = plain("llama")
    config = {"method": "suffix+draft_model", "model": str(folder / "llama")}
    llm = opened(folder, "llama", speculative_config=config)
    drafts = llm._engine.core.drafts
    assert isinstance(drafts, Speculation) and drafts.costs is not None
    costs = drafts.costs.step
    # Beside others fewer sizes are measured, and one time may be longer than another.
    assert costs.tokens[:4] == (1, 2, 3, 4) and costs.seconds(3) == costs.seconds(4)
    assert 0 <= drafts.costs.wait < 3 * costs.seconds(1)
    assert answer(llm, asked()) == want
    assert answer(llm, asked()) == want


@pytest.mark.parametrize("max_num_seqs", [1, 30])
def test_long_contexts(max_num_seqs: int) -> None:
    """Drafts on both sides of a tile's border, and contexts of several splits. Red when a copy that
    runs ahead takes the keys of the drafts before from what lay there earlier."""
    model = engines.model_of("qwen3")  # heads of 64
    near = [prompt for n in (60, 125, 190, 508, 635) for prompt in engines.prompts(3, n, n, n)]

    def requests() -> list[Request]:
        return [engines.make(i, p, 24, 0.5 * (i % 2)) for i, p in enumerate(near)]

    engine = engines.engine_of(model, max_num_seqs=max_num_seqs)
    want = engines.run(engine, requests())
    told = engine.core.drafts = Told({}, Random(5))
    assert engines.run(engine, requests()) == want  # learns them
    assert engines.run(engine, requests()) == want
    assert told.num_accepted > 100 and told.num_refused > 20


def test_packed_weights(tmp_path: Path) -> None:
    """Products of few rows with weights of four bits, and of the drafter's."""
    folder = write_shape(shrunk(SHAPES["8b"]), tmp_path)
    prompts = [[7 * i % 97 + 3 for i in range(length)] for length in (1, 5, 40, 300)]
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.8, "n": 2, "logprobs": 2})
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=7, **kind) for kind in kinds]

    def tokens(**changes: Any) -> list[list[tuple[list[int], object]]]:
        words = {"load_format": "dummy", "quantization": "rtn-int4-g32", "device": "cuda"}
        sizes = {"skip_tokenizer_init": True, "kv_cache_memory": 64 << 20}
        llm = LLM(folder, **{**words, **sizes, **changes})
        found = [out for p in params for out in llm.generate(prompts, p, use_tqdm=False)]
        if changes:
            assert llm.stats().num_drafted_tokens > 0
        return [[(list(o.token_ids), o.logprobs) for o in out.outputs] for out in found]

    want = tokens()
    for method in ("ngram", "early_exit"):
        config = {"method": method, "adaptive": False, "num_speculative_tokens": 4}
        assert tokens(speculative_config=config) == want, method
