"""Two ranks on one GPU give the bits of one: what NCCL would carry goes through the host here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire import LLM, SamplingParams
from quire.engine.rank_group import RankGroup
from quire.errors import RankLost
from quire.lora.request import LoRARequest
from quire.models.tiny import tiny_model
from tests.dist.group import PARAMS, PROMPTS, alone, answers, model_on, said
from tests.lora.cases import write_adapter

ON_ONE: dict[str, Any] = {"device": "cuda:0,cuda:0"}
# Pages that the GPU's kernels take.
MEMORY: dict[str, Any] = {
    "kv_cache_memory": 1 << 22,
    "page_size": 16,
    "max_num_batched_tokens": 160,
    "max_model_len": 256,
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
# Wide enough for kernels that stream their weights.
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
LATENT = WIDE | {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 32}
# Prompts in chunks, whose last layer leaves out what nothing is drawn after.
LONG = [[2 + i * 7 % 90 for i in range(230)], [9, 8] * 60, [4, 5, 6]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
SIDE_BY_SIDE: dict[str, Any] = {}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
HOMES: dict[str, Any] = {"data_parallel_size": 2}

# how ranks share the model, family, what differs from its tiny member, arguments of the engine
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "dense": (SIDE_BY_SIDE, "qwen3", WIDE, {}),
    "experts": (SIDE_BY_SIDE, "qwen2_moe", WIDE, {}),
    "packed experts": (SIDE_BY_SIDE, "qwen3_moe", WIDE, {"quantization": "mxfp4"}),
    "int4": (SIDE_BY_SIDE, "llama", WIDE, {"quantization": "rtn-int4-g32"}),
    "fp8 and a coded cache": (
        *(SIDE_BY_SIDE, "qwen3", WIDE | {"head_dim": 32}),
        {"quantization": "fp8", "kv_cache_dtype": "int8"},
    ),
    "large": (SIDE_BY_SIDE, "llama", LARGE, {}),
    "large, int4": (SIDE_BY_SIDE, "llama", LARGE, {"quantization": "rtn-int4-g128"}),
    "large, fp8": (SIDE_BY_SIDE, "llama", LARGE, {"quantization": "fp8"}),
    "latents": (SIDE_BY_SIDE, "deepseek_v3", LATENT, {}),
    "stages": (STAGES, "gemma3_text", WIDE, {}),
    "stages, packed experts": (STAGES, "qwen3_moe", WIDE, {"quantization": "int8"}),
    "homes, latents": (HOMES, "deepseek_v3", LATENT, {}),
    "homes, experts": (HOMES, "qwen2_moe", WIDE, {}),
}


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    made = RankGroup(2)
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_bits_of_one(name: str, group: RankGroup, tmp_path: Path) -> None:
    """Red when a kernel's bits depend on how many outputs it computes, when a share of a packed
    weight is not the right one, or when what goes through the host comes back otherwise."""
    how, family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    one = alone(folder, device="cuda", **args, **MEMORY)
    expected, of_long = answers(one), answers(one, LONG, [GREEDY] * 3)
    with model_on(group, folder, **args, **how, **ON_ONE, **MEMORY) as llm:
        assert answers(llm) == expected
        assert answers(llm, LONG, [GREEDY] * 3) == of_long
        assert answers(llm) == expected  # from cached pages
        made = {decision.what: decision.value for decision in llm.decisions}
        assert made["ranks"] == "cuda:0, cuda:0" and made["steps"] == "kernel by kernel"


@pytest.mark.parametrize("how", [SIDE_BY_SIDE, STAGES], ids=["side by side", "stages"])
def test_a_model_that_drafts_stays_on_the_first_rank(
    how: dict[str, Any], group: RankGroup, tmp_path: Path
) -> None:
    """Red when ranks behind the first verify other drafts than the first one made."""
    folder = tiny_model("qwen2", tmp_path / "target", num_hidden_layers=2, **WIDE)
    draft = tiny_model("llama", tmp_path / "draft", seed=3, num_hidden_layers=2, **WIDE)
    drafts = {"method": "draft_model", "model": str(draft), "adaptive": False}
    args: dict[str, Any] = {"speculative_config": drafts | {"num_speculative_tokens": 3}}
    expected = answers(alone(folder, device="cuda", **MEMORY))
    with model_on(group, folder, **args, **how, **ON_ONE, **MEMORY) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_drafted_tokens > 0


def test_adapters_are_shared_out(group: RankGroup, tmp_path: Path) -> None:
    """Red when a rank adds what another rank's outputs get."""
    folder = tiny_model("qwen3", tmp_path / "model", num_hidden_layers=2, **WIDE)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    first = str(write_adapter(tmp_path / "first", theirs, seed=0))
    asked = [LoRARequest("first"), None, None, LoRARequest("first")]

    def adapted(llm: LLM) -> list[object]:
        made = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=asked)
        return [said(output) for output in made]

    args = {"lora": {"first": first}, **MEMORY}
    expected = adapted(alone(folder, device="cuda", **args))
    with model_on(group, folder, **args, **ON_ONE) as llm:
        assert adapted(llm) == expected


def test_ranks_share_the_memory_of_their_card(group: RankGroup, tmp_path: Path) -> None:
    """Red when each of them takes what was meant for all."""
    folder = tiny_model("llama", tmp_path, **WIDE)
    sizes = {"page_size": 16, "max_model_len": 512, "gpu_memory_utilization": 0.3}
    with model_on(group, folder, **ON_ONE, **sizes) as llm:
        total = torch.cuda.mem_get_info()[1]
        assert 0.02 * total < 2 * llm._engine.runner.pool.data.nbytes < 0.3 * total


def test_a_killed_rank_ends_its_group(tmp_path: Path) -> None:
    """Red when the first rank waits for one that is dead, or a process is left behind."""
    group = RankGroup(2, deadline_s=10.0)
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with model_on(group, tiny_model("llama", tmp_path, **WIDE), **ON_ONE, **MEMORY) as llm:
        stream = llm.stream([5, 6, 7], long)
        next(stream)
        (other,) = group._others
        os.kill(other.process.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
            list(stream)
        assert time.monotonic() - begun < 20.0
        assert other.process.poll() is not None
