"""Two ranks on one GPU give the bits of one: they map each other's memory, and dense models replay
graphs. Stages talk through the host.

Most of the time goes into kernels that are compiled for the first time, so cases share models, what
one rank answers, and the processes; those that cover most come first.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire import LLM, SamplingParams
from quire.engine.rank_group import RankGroup
from quire.errors import RankLost
from quire.lora.request import LoRARequest
from quire.models.tiny import tiny_model
from quire.runner.joint_graphs import JointMemory
from tests.dist.group import PARAMS, PROMPTS, alone, answers, model_on, said

ON_ONE: dict[str, Any] = {"device": "cuda:0,cuda:0"}
# Pages that the GPU's kernels take.
MEMORY: dict[str, Any] = {
    "kv_cache_memory": 1 << 22,
    "page_size": 16,
    "max_num_batched_tokens": 160,
    "max_model_len": 256,
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
CODED = WIDE | {"head_dim": 32}
# Wide enough for kernels that stream their weights.
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
LATENT = WIDE | {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 32}
# Prompts in chunks, whose last layer leaves out what nothing is drawn after.
LONG = [[2 + i * 7 % 90 for i in range(230)], [9, 8] * 60, [4, 5, 6]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)

PATIENCE_S = 300.0
# How far log-probabilities in bf16 may be apart where sums are split: three times what they are on
# a CPU. An input that is missing, or another's, moves them by more.
SPLIT = 0.15
# A token that is nearly as near to two experts may go to the other one: 0.24 on a GPU.
OTHER_EXPERT = 0.8

SHARED_OUT: dict[str, dict[str, int]] = {
    "beside": {},
    "stages": {"pipeline_parallel_size": 2},
    "homes": {"data_parallel_size": 2},
}
# family, what differs from its tiny member, arguments of the engine
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", WIDE, {}),
    "int4": ("llama", WIDE, {"quantization": "rtn-int4-g32"}),
    "int4, coded cache": (
        *("llama", CODED),
        {"quantization": "rtn-int4-g32", "kv_cache_dtype": "int8"},
    ),
    "fp8, coded cache": ("qwen3", CODED, {"quantization": "fp8", "kv_cache_dtype": "int8"}),
    "experts": ("qwen2_moe", WIDE, {}),
    "experts of mxfp4": ("qwen3_moe", WIDE, {"quantization": "mxfp4"}),
    "experts of int8": ("qwen3_moe", WIDE, {"quantization": "int8"}),
    "latents": ("deepseek_v3", LATENT, {}),
    "windows": ("gemma3_text", WIDE, {}),
    "large": ("llama", LARGE, {}),
    "large of int4": ("llama", LARGE, {"quantization": "rtn-int4-g128"}),
    "large of fp8": ("llama", LARGE, {"quantization": "fp8"}),
}
FIRST = [
    ("dense", "beside"),
    ("dense", "stages"),
    ("int4, coded cache", "beside"),
    ("experts", "beside"),
    ("experts", "homes"),
]
THEN = [
    ("int4", "beside"),
    ("experts of mxfp4", "beside"),
    ("experts of int8", "stages"),
    ("latents", "homes"),
    ("latents", "beside"),
    ("fp8, coded cache", "beside"),
    ("windows", "stages"),
    ("large of int4", "beside"),
    ("large", "beside"),
    ("large of fp8", "beside"),
]


class Bench:
    """What cases share."""

    def __init__(self, folder: Path) -> None:
        # They import what they need side by side, while one rank answers.
        # Kernels are compiled in steps, side by side with other tests: a rank may wait for long.
        self.group, self.doomed = RankGroup(2, deadline_s=PATIENCE_S), RankGroup(2)
        self._folder = folder
        self._said: dict[str, list[list[object]]] = {}

    def model(self, name: str) -> Path:
        folder = self._folder / name.replace(", ", "-").replace(" ", "-")
        return folder if folder.exists() else tiny_model(MODELS[name][0], folder, **MODELS[name][1])

    def expected(self, name: str) -> list[list[object]]:
        """What one rank answers; steps that replay graphs have the same bits, and compile more."""
        if name not in self._said:
            args = MODELS[name][2] | MEMORY
            one = alone(self.model(name), device="cuda", enforce_eager=True, **args)
            self._said[name] = everything(one)
        return self._said[name]

    def close(self) -> None:
        self.group.close()
        self.doomed.close()


def everything(llm: LLM) -> list[list[object]]:
    return [answers(llm), answers(llm, LONG, [GREEDY] * 3)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def check_bits(bench: Bench, name: str, how: str) -> None:
    expected, args = bench.expected(name), MODELS[name][2] | SHARED_OUT[how] | ON_ONE | MEMORY
    with model_on(bench.group, bench.model(name), **args) as llm:
        assert everything(llm) == expected
        assert answers(llm) == expected[0]  # from cached pages
        made = {decision.what: decision.value for decision in llm.decisions}
        assert made["ranks"] == "cuda:0, cuda:0"
        is_graphed = how == "beside" and "expert" not in name and name != "latents"
        assert made["steps"] == ("graphs" if is_graphed else "kernel by kernel")
        if how != "stages":
            assert made["between ranks"] == "memory of GPUs that all have mapped"
        if is_graphed:
            assert num_replays(llm) > 10
            assert kinds_of(llm) >= ({"decodes", "mixed"} if name == "dense" else {"decodes"})


def num_replays(llm: LLM) -> int:
    graphs = llm._engine.runner.graphs
    assert graphs is not None and isinstance(graphs.memory, JointMemory)
    return graphs.memory.num_replays


def kinds_of(llm: LLM) -> set[str]:
    """Of the graphs that were captured."""
    runner = llm._engine.runner
    kinds = {"decodes": runner.graphs, "prompt": runner.prompt_graphs, "mixed": runner.mixed_graphs}
    return {kind for kind, graphs in kinds.items() if graphs is not None and graphs.graphs}


@pytest.mark.parametrize(("name", "how"), FIRST, ids=map(" ".join, FIRST))
def test_two_ranks_give_the_bits_of_one(name: str, how: str, bench: Bench) -> None:
    """Red when a kernel's bits depend on how many outputs it computes, when a share of a packed
    weight is not the right one, when what ranks say comes back otherwise, or when they replay other
    graphs than each other."""
    check_bits(bench, name, how)


@pytest.mark.parametrize(("name", "near"), [("dense", SPLIT), ("experts", OTHER_EXPERT)])
def test_split_sums_are_close(name: str, near: float, bench: Bench) -> None:
    """Red when a rank adds another's inputs, a bias counts twice, or a batch changes bits."""
    from tests.dist.test_fast import distance, prompt_logprobs  # and transformers, which is slow

    one = alone(bench.model(name), device="cuda", enforce_eager=True, **MEMORY)
    expected = prompt_logprobs(one)
    with model_on(bench.group, bench.model(name), tp_reduce="fast", **ON_ONE, **MEMORY) as llm:
        assert distance(prompt_logprobs(llm), expected) < near
        together = answers(llm)
        assert [answers(llm, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)] == together


@pytest.mark.parametrize("how", ["beside", "stages"])
def test_a_model_that_drafts_stays_on_the_first_rank(
    how: str, bench: Bench, tmp_path: Path
) -> None:
    """Red when ranks behind the first verify other drafts than the first one made."""
    draft = tiny_model("qwen3", tmp_path, seed=3, **WIDE)
    drafts = {"method": "draft_model", "model": str(draft), "adaptive": False}
    args: dict[str, Any] = {"speculative_config": drafts | {"num_speculative_tokens": 3}}
    args |= SHARED_OUT[how] | ON_ONE | MEMORY
    with model_on(bench.group, bench.model("dense"), **args) as llm:
        assert answers(llm) == bench.expected("dense")[0]
        assert llm.stats().num_drafted_tokens > 0


LONG_ANSWER = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


def first_tokens(llm: LLM, num: int) -> Iterator[object]:
    """An answer that has begun."""
    stream = llm.stream([5, 6, 7], LONG_ANSWER)
    for _ in range(num):
        next(stream)
    return stream


def test_a_killed_rank_ends_its_group(bench: Bench) -> None:
    """Red when the first rank waits for one that is dead, or a process is left behind."""
    group = bench.doomed
    with model_on(group, bench.model("dense"), **ON_ONE, **MEMORY) as llm:
        stream = first_tokens(llm, 5)
        assert num_replays(llm) > 0
        (other,) = group._others
        os.kill(other.process.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
            list(stream)
        assert time.monotonic() - begun < 20.0
        assert other.process.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_is_lost_in_a_replay(number: signal.Signals, bench: Bench) -> None:
    """Red when a replay that waits on the device for a lost rank keeps the host for ever."""
    group = RankGroup(2, deadline_s=20.0)
    try:
        with model_on(group, bench.model("dense"), **ON_ONE, **MEMORY) as llm:
            answers(llm)  # whatever has to be compiled is
            stream = first_tokens(llm, 5)
            (other,) = group._others
            os.kill(other.process.pid, signal.SIGSTOP)  # the first rank's next replay waits for it
            ended = threading.Timer(2.0, os.kill, (other.process.pid, number))
            ended.start()
            before, begun = num_replays(llm), time.monotonic()
            with pytest.raises(RankLost, match="rank"):
                list(stream)
            assert time.monotonic() - begun < 60.0
            assert num_replays(llm) <= before + 3, "replayed without the other one"
            ended.join()
            assert other.process.poll() is not None
            with pytest.raises(RankLost):
                llm.generate([[5, 6, 7]], LONG_ANSWER, use_tqdm=False)
    finally:
        group.close()
    assert torch.ones(3, device="cuda").sum().item() == 3, "the device goes on"


def test_adapters_are_shared_out(bench: Bench, tmp_path: Path) -> None:
    """Red when a rank adds what another rank's outputs get."""
    import transformers  # which takes seconds

    from tests.lora.cases import write_adapter

    folder = bench.model("dense")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    first = str(write_adapter(tmp_path, theirs, seed=0))
    asked = [LoRARequest("first"), None, None, LoRARequest("first")]

    def adapted(llm: LLM) -> list[object]:
        made = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=asked)
        return [said(output) for output in made]

    args: dict[str, Any] = {"lora": {"first": first}, **MEMORY}
    expected = adapted(alone(folder, device="cuda", enforce_eager=True, **args))
    with model_on(bench.group, folder, **args, **ON_ONE) as llm:
        assert adapted(llm) == expected


def test_ranks_share_the_memory_of_their_card(bench: Bench) -> None:
    """Red when each of them takes what was meant for all."""
    free, total = torch.cuda.mem_get_info()
    if free < total // 4:
        pytest.skip(f"others have taken most of the card: {free >> 20} of {total >> 20} MiB left")
    sizes = {name: size for name, size in MEMORY.items() if name != "kv_cache_memory"}
    with model_on(bench.group, bench.model("dense"), **ON_ONE, **sizes) as llm:
        why = next(made.why for made in llm.decisions if made.what == "kv cache")
        found = re.match(r"([\d.]+) GiB usable of ([\d.]+) GiB", why)
        assert found is not None, why
        usable, of_card = map(float, found.groups())
        assert 0 < 2 * usable < llm._engine.config.gpu_memory_utilization * of_card


@pytest.mark.parametrize(("name", "how"), THEN, ids=map(" ".join, THEN))
def test_and_so_do_other_models(name: str, how: str, bench: Bench) -> None:
    """Red when kernels of other forms, or of larger weights, have other bits for a share."""
    check_bits(bench, name, how)
