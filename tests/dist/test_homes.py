"""Ranks that attend their own requests and share all else give the bits of one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire import LLM, StructuredOutputsParams
from quire.cli.inspect import inspect
from quire.config import Decision
from quire.dist.ranks import ALONE, Ranks
from quire.engine.rank_group import RankGroup
from quire.flat_args import args_of
from quire.lora.request import LoRARequest
from quire.models.tiny import tiny_model
from quire.step import Pending, StepPlan
from tests.dist.group import PARAMS, PROMPTS, alone, answers, model_on, said
from tests.dist.test_fast import FLOATS, distance, prompt_logprobs
from tests.dist.test_ranks import CASES, steps_of
from tests.lora.cases import write_adapter

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
HOMES: dict[str, Any] = {"tensor_parallel_size": 1, "data_parallel_size": 2}
QUICK = ("windows", "experts", "latents", "int8", "coded cache")


def watched(llm: LLM) -> list[list[int]]:
    """For each step the requests that each rank attends, filled in as they run."""
    runner, seen = llm._engine.runner, list[list[int]]()
    execute, size = runner.execute, runner.model.ranks.size

    def noted(plan: StepPlan) -> Pending:
        made = execute(plan)
        homes = [int(runner.rows.homes[work.row]) for work in plan.works]
        seen.append([homes.count(rank) for rank in range(size)])
        return made

    runner.execute = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", CASES if IS_LONG else QUICK)
def test_requests_of_two_ranks_have_the_bits_of_one(
    name: str, group: RankGroup, tmp_path: Path
) -> None:
    """Red when a rank attends another's rows, reads another's pages, or gives rows back in another
    order; when a rank that has no row in a step does not take part in it."""
    family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    one = alone(folder, **args)
    expected = answers(one)
    with model_on(group, folder, **args, **HOMES) as llm:
        seen = watched(llm)
        assert answers(llm) == expected
        assert answers(llm) == expected  # from cached pages
        assert llm.stats().prefix_hit_tokens > 0
        assert any(all(counts) for counts in seen) and any(0 in counts for counts in seen)
        if steps_of(one) == "one call":
            assert steps_of(llm).endswith(" calls")


@pytest.mark.skipif(not IS_LONG, reason="set QUIRE_LONG_TESTS=1")
@pytest.mark.parametrize("name", ["experts", "latents", "int8"])
def test_requests_of_ranks_over_sockets(name: str, tmp_path: Path) -> None:
    """Red as above, where memory cannot be shared."""
    family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    group = RankGroup(2, comm="gloo")
    try:
        with model_on(group, folder, **args, **HOMES) as llm:
            assert answers(llm) == answers(alone(folder, **args))
    finally:
        group.close()


def cache_said(decisions: Iterable[Decision]) -> str:
    return next(decision.value for decision in decisions if decision.what == "kv cache")


def test_inspect_says_whose_pages_it_counts(tmp_path: Path) -> None:
    """Red when somebody who plans memory takes a rank's pages for the group's."""
    folder = str(tiny_model("deepseek_v3", tmp_path))
    for ranks in ({}, {"data_parallel_size": 3, "max_model_len": 96}):
        args = args_of({"model": folder, "device": "cpu", "kv_cache_memory": 1 << 20, **ranks})
        said_so = "on each of 3 ranks" in cache_said(inspect(args).decisions)
        assert said_so == bool(ranks)


def test_latents_are_stored_once(group: RankGroup, tmp_path: Path) -> None:
    """Red when a group with requests of its own on each rank does not hold twice the tokens of one
    whose ranks have all latents, in the same memory."""
    folder = tiny_model("deepseek_v3", tmp_path)
    prompts = [[i] * 40 for i in range(2, 6)]
    params = [PARAMS[0].with_(max_tokens=16, ignore_eos=True, prompt_logprobs=None)] * 4
    args: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory": 60 << 10}
    expected = answers(alone(folder, **args), prompts, params)
    totals, preempted = [], []
    for ranks in ({}, HOMES):
        with model_on(group, folder, **args, **ranks) as llm:
            assert answers(llm, prompts, params) == expected
            totals.append(llm.stats().pages_total)
            preempted.append(llm.stats().num_preempted)
            said_so = ", on each of 2 ranks" in cache_said(llm.decisions)
            assert said_so == bool(ranks)
            pool = llm._engine.runner.pool
            assert pool.num_pages * pool.page_bytes <= args["kv_cache_memory"]
    assert totals[1] == 2 * totals[0]
    assert preempted[0] and not preempted[1]


def test_pages_of_a_full_rank(group: RankGroup, tmp_path: Path) -> None:
    """Red when what a rank lost, copied or gave back is mixed up with another's pages."""
    folder = tiny_model("qwen2_moe", tmp_path)
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    params = [each.with_(max_tokens=40, ignore_eos=True) for each in (*PARAMS, *PARAMS[::-1])]
    many = PARAMS[1].with_(n=3, max_tokens=9)
    one = alone(folder)
    expected, siblings = answers(one, prompts, params), texts(one, many)
    with model_on(group, folder, **HOMES, kv_cache_memory=26 << 10, max_num_seqs=6) as llm:
        assert answers(llm, prompts, params) == expected
        assert llm.stats().num_preempted > 0
        stream = llm.stream(PROMPTS[0], PARAMS[0])
        next(stream)
        stream.close()
        assert texts(llm, many) == siblings
        assert llm.stats().pages_copied > 0
        assert answers(llm, prompts, params) == expected


def texts(llm: LLM, params: Any) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS[:2], [params] * 2, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def test_grammars_and_drafts_of_several_homes(group: RankGroup, tmp_path: Path) -> None:
    """Red when drafts that were refused stay in a rank's pages, or a grammar meets another row."""
    folder = tiny_model("qwen2_moe", tmp_path)
    grammar = StructuredOutputsParams(regex="[ab]{4,9}")
    params = [p.with_(structured_outputs=grammar, max_tokens=12) for p in PARAMS[1:3]]
    params += [PARAMS[0].with_(max_tokens=16, prompt_logprobs=None)] * 2
    prompts = ["once", "twice", [9, 8, 9, 8, 9, 8, 9], [4, 5, 6] * 5]
    for method in ("suffix", "ngram") if IS_LONG else ("suffix",):
        spec = {"method": method, "adaptive": False}
        args: dict[str, Any] = {"speculative_config": spec, "target_gap_ms": 1000.0}
        expected = answers(alone(folder, **args), prompts, params)
        with model_on(group, folder, **args, **HOMES) as llm:
            assert answers(llm, prompts, params) == expected
            assert llm.stats().num_drafted_tokens > 0


@pytest.mark.parametrize("is_recorded", [True, False] if IS_LONG else [True])
def test_adapters_of_several_homes(is_recorded: bool, group: RankGroup, tmp_path: Path) -> None:
    """Red when a row is given the adapter of a row of another rank."""
    folder = tiny_model("qwen3", tmp_path / "model", num_hidden_layers=2, hidden_size=64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    first, second = (
        str(write_adapter(tmp_path / name, theirs, seed=seed))
        for seed, name in enumerate(("first", "second"))
    )
    asked = [LoRARequest("first"), None, LoRARequest("second", 2, second), LoRARequest("first")]

    def adapted(llm: LLM) -> list[object]:
        made = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=asked)
        return [said(output) for output in made]

    args: dict[str, Any] = {"lora": {"first": first}, "enforce_eager": not is_recorded}
    args["quantization"] = "rtn-int4-g32"
    expected = adapted(alone(folder, **args))
    with model_on(group, folder, **args, **HOMES) as llm:
        assert adapted(llm) == expected


def test_embeddings_of_several_homes(group: RankGroup, tmp_path: Path) -> None:
    """Red when what is read of all tokens is read of a rank's own."""
    folder = tiny_model("qwen3_moe", tmp_path)

    def embeddings(llm: LLM) -> list[list[float]]:
        return [list(out.outputs.embedding) for out in llm.embed(PROMPTS, use_tqdm=False)]

    expected = embeddings(alone(folder))
    with model_on(group, folder, **HOMES) as llm:
        assert embeddings(llm) == expected


def test_experts_with_two_homes_of_requests_of_several(group: RankGroup, tmp_path: Path) -> None:
    """Red when moving experts and attending one's own rows get in each other's way."""
    folder = tiny_model("mixtral", tmp_path)
    args = {"num_redundant_experts": 2, "eplb_step_interval": 2}
    expected = answers(alone(folder))
    with model_on(group, folder, **args, **HOMES) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected


def test_latents_of_prompts_expanded(group: RankGroup, tmp_path: Path) -> None:
    """Red when a rank takes another form of latent attention for its rows than one rank does."""
    folder = tiny_model("deepseek_v3", tmp_path)
    args = {"enable_prefix_caching": False}
    expected = answers(alone(folder, **args))
    with model_on(group, folder, **args, **HOMES) as llm:
        assert answers(llm) == expected


@pytest.mark.parametrize("name", ["windows", "experts", "latents"] if IS_LONG else ["experts"])
def test_split_sums_beside_whole_attention(name: str, group: RankGroup, tmp_path: Path) -> None:
    """Red when attention, which no rank shares, is split with the rest."""
    family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    expected = prompt_logprobs(alone(folder, **args))
    with model_on(group, folder, tp_reduce="fast", **args, **HOMES) as llm:
        assert distance(prompt_logprobs(llm), expected) < FLOATS
        together = answers(llm)
        assert [answers(llm, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)] == together


def test_attention_is_whole_and_the_rest_is_shared_out() -> None:
    """Red when a rank with requests of its own has heads, or experts, of another number."""
    ranks = Ranks(1, 2, has_homes=True)
    assert ranks.attention is ALONE
    assert ranks.attention.heads(8, 2).kv.is_whole
    assert [cut.size for cut in ranks.experts(8)] == [4, 4]
    assert Ranks(1, 2).attention.heads(8, 2).kv.size == 1
