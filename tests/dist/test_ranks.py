"""Ranks give the bits of one, side by side or in stages: tokens, log-probabilities of all kinds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire import LLM, SamplingParams
from quire.engine.rank_group import RankGroup
from quire.lora.request import LoRARequest
from quire.models.tiny import tiny_model
from tests.dist.group import PARAMS, PROMPTS, alone, answers, model_on, said
from tests.lora.cases import write_adapter

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))

# family, what differs from its tiny member, arguments of the engine
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"dtype": "float32"}),
    "one key head": ("llama", {"num_key_value_heads": 1}, {}),
    "uneven": ("qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3}, {}),
    "tied": ("gemma", {}, {}),
    "windows": ("gemma3_text", {}, {}),
    "norms over all heads": ("olmo2", {}, {}),
    "fused in the file": ("phi3", {}, {}),
    "norms before products": ("bitnet", {}, {}),
    "transposed in the file": ("gpt2", {}, {}),
    "experts": ("qwen2_moe", {}, {}),
    "sinks": ("gpt_oss", {}, {}),
    "latents": ("deepseek_v3", {}, {}),
    "latents, whole queries": ("deepseek_v2", {}, {}),
    "int4": ("llama", {"hidden_size": 64}, {"quantization": "rtn-int4-g32"}),
    "int8": ("qwen3_moe", {"hidden_size": 64}, {"quantization": "int8"}),
    "fp8": ("llama", {"hidden_size": 64}, {"quantization": "fp8"}),
    "nf4": ("mixtral", {"hidden_size": 64}, {"quantization": "nf4"}),
    "coded cache": ("qwen3", {"head_dim": 32}, {"kv_cache_dtype": "int8"}),
    "four bits of one key head": (
        "qwen3",
        {"head_dim": 32, "num_key_value_heads": 1},
        {"kv_cache_dtype": "int4"},
    ),
}


QUICK_STAGES = ("windows", "norms over all heads", "sinks", "latents", "int8", "coded cache")
QUICK = (
    *("llama", "one key head", "windows", "experts", "sinks", "latents", "int4", "coded cache"),
    "four bits of one key head",
)


def steps_of(llm: LLM) -> str:
    """Nothing where no library of ours is used (`QUIRE_CPU_ISA=torch`)."""
    return next((made.value for made in llm.decisions if made.what == "steps"), "")


@pytest.mark.parametrize("name", CASES if IS_LONG else QUICK)
def test_two_ranks_give_the_bits_of_one(name: str, group: RankGroup, tmp_path: Path) -> None:
    """Red when a sum is split over ranks, when a share of a weight is not the right one, or when
    an operation takes another way at a rank's width."""
    family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    one = alone(folder, **args)
    expected = answers(one)
    with model_on(group, folder, **args) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected  # from cached pages
        if steps_of(one) == "one call" and name != "norms over all heads":
            assert steps_of(llm).endswith(" calls")


@pytest.mark.parametrize("name", CASES if IS_LONG else QUICK_STAGES)
def test_two_stages_give_the_bits_of_one(name: str, group: RankGroup, tmp_path: Path) -> None:
    """Red when a stage begins with another stream than the one before ended with, keeps pages of
    the wrong layers, or when the first one reads other rows than the last one sends."""
    family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    one = alone(folder, **args)
    expected = answers(one)
    with model_on(group, folder, **args, pipeline_parallel_size=2) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected  # from cached pages
        assert steps_of(llm) == steps_of(one)
        kept = [its._engine.runner.pool.page_bytes for its in (llm, one)]
        assert kept[0] < kept[1] or len(one._engine.runner.pool.groups) > 1


def test_chunks_that_draw_nothing(group: RankGroup, tmp_path: Path) -> None:
    """Red when experts of several ranks cannot have no rows at all."""
    family, changes, args = CASES["int8"]
    folder = tiny_model(family, tmp_path, **changes)
    asked = [[2 + i * 7 % 90 for i in range(60)]], [SamplingParams(temperature=0.0, max_tokens=4)]
    expected = answers(alone(folder, **args), *asked)
    with model_on(group, folder, **args) as llm:
        assert answers(llm, *asked) == expected


@pytest.mark.skipif(not IS_LONG, reason="set QUIRE_LONG_TESTS=1")
@pytest.mark.parametrize("name", ["uneven", "int8", "latents"])
def test_ranks_over_sockets(name: str, tmp_path: Path) -> None:
    """Red as above, where memory cannot be shared."""
    family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    group = RankGroup(2, comm="gloo")
    try:
        with model_on(group, folder, **args) as llm:
            assert answers(llm) == answers(alone(folder, **args))
    finally:
        group.close()


GUIDED = ["once", "twice", [9, 8, 9, 8, 9, 8, 9], [4, 5, 6] * 5]


def guided_params() -> list[SamplingParams]:
    """Two that a grammar guides, two that a text before them foretells."""
    from quire import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex="[ab]{4,9}")
    guided = [p.with_(structured_outputs=grammar, max_tokens=12) for p in PARAMS[1:3]]
    return guided + [SamplingParams(temperature=0.0, max_tokens=16, logprobs=1)] * 2


def drafting(method: str) -> dict[str, Any]:
    spec = {"method": method, "adaptive": False}
    return {"speculative_config": spec, "target_gap_ms": 1000.0}


@pytest.mark.parametrize("stages", [1, 2])
def test_grammars_and_drafts_need_one_rank_alone(
    stages: int, group: RankGroup, tmp_path: Path
) -> None:
    """Red when ranks behind the first must know a grammar, or miss what drafts were refused."""
    folder = tiny_model("qwen2", tmp_path, num_hidden_layers=2)
    args, params = drafting("suffix"), guided_params()
    expected = answers(alone(folder, **args), GUIDED, params)
    with model_on(group, folder, **args, pipeline_parallel_size=stages) as llm:
        assert answers(llm, GUIDED, params) == expected


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_that_drafts_stays_on_the_first_rank(
    stages: int, group: RankGroup, tmp_path: Path
) -> None:
    """Red when ranks behind the first verify other drafts than the first one made."""
    folder = tiny_model("qwen2", tmp_path / "target", num_hidden_layers=2)
    draft = tiny_model("llama", tmp_path / "draft", seed=3, num_hidden_layers=2)
    said = {"method": "draft_model", "model": str(draft), "adaptive": False}
    args: dict[str, Any] = {"speculative_config": said | {"num_speculative_tokens": 3}}
    expected = answers(alone(folder))
    with model_on(group, folder, **args, pipeline_parallel_size=stages) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_drafted_tokens > 0


class Adapted:
    """A model whose requests name two adapters, or none."""

    def __init__(self, folder: Path) -> None:
        tiny = {"num_hidden_layers": 2, "hidden_size": 64}
        self.folder = tiny_model("qwen3", folder / "model", **tiny)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(self.folder)
        first, second = (
            str(write_adapter(folder / name, theirs, seed=seed))
            for seed, name in enumerate(("first", "second"))
        )
        self.adapters = (first, second)
        self.args: dict[str, Any] = {"lora": {"first": first}, "quantization": "rtn-int4-g32"}
        named = LoRARequest("first")
        self._asked = [named, None, LoRARequest("second", 2, second), named]

    def answers(self, llm: LLM) -> list[object]:
        made = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=self._asked)
        return [said(output) for output in made]


@pytest.mark.parametrize("stages", [1, 2])
def test_adapters_are_shared_out(stages: int, group: RankGroup, tmp_path: Path) -> None:
    """Red when a rank adds what another rank's outputs get, or misses that an adapter came."""
    case = Adapted(tmp_path)
    expected = case.answers(alone(case.folder, **case.args))
    assert expected != answers(alone(case.folder, quantization="rtn-int4-g32"))
    kept = {**case.args, "pipeline_parallel_size": stages, "max_loras": 1}
    with model_on(group, case.folder, **kept) as llm:
        assert case.answers(llm) == expected
        for folder in case.adapters:
            shutil.rmtree(folder)
        assert case.answers(llm) == expected  # every rank has a copy


@pytest.mark.parametrize("stages", [1, 2])
def test_random_weights_are_shared_out(stages: int, group: RankGroup, tmp_path: Path) -> None:
    """Red when ranks draw other random weights than one rank does."""
    folder = tiny_model("qwen2_moe", tmp_path)
    args = {"load_format": "dummy", "seed": 4}
    expected = answers(alone(folder, **args))
    with model_on(group, folder, **args, pipeline_parallel_size=stages) as llm:
        assert answers(llm) == expected
