"""DeepSeek-V2 and V3 through pages of latents, against transformers and against themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.config import EngineArgs
from quire.engine.build import Engine, build_engine
from quire.errors import CheckpointError, NotSupported
from quire.load.safetensors_checkpoint import SafetensorsCheckpoint
from quire.models.registry import spec_of
from tests.hf import VOCAB, StateDictCheckpoint, greedy, rope, tiny_engine
from tests.model.records import NUM_TOKENS, records
from tests.model.test_parity import TOLERANCE, make, prompts, run

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7)
GROUPS = {"n_group": 4, "topk_group": 2}
NATIVE = {"q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2", {"q_lora_rank": None, **YARN}),
    "v2": (
        "DeepseekV2",
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0, **GROUPS},
    ),
    "v3": ("DeepseekV3", GROUPS),
    "v3-yarn": ("DeepseekV3", {**GROUPS, **YARN}),
    # Sizes that the native library takes.
    "v2-native": ("DeepseekV2", {**NATIVE, "q_lora_rank": None, **YARN}),
    "v3-native": ("DeepseekV3", {**NATIVE, **GROUPS}),
    # As Moonlight: no groups, no squeezed queries.
    "v3-small": ("DeepseekV3", {"n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    # Rotated dims in halves, biases, and an epsilon that is not that of the latents' norms.
    "v3-halves": (
        "DeepseekV3",
        {**GROUPS, "rope_interleave": False, "attention_bias": True, "rms_norm_eps": 0.05},
    ),
}


@cache
def model_of(family: str) -> Any:
    """Weights large enough that logits differ clearly between tokens."""
    torch.manual_seed(0)
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            elif "bias" in key:
                parameter.normal_(0, 0.1)
            else:
                parameter.uniform_(0.5, 1.5)
        for key, buffer in model.named_buffers():
            if "correction" in key:
                buffer.normal_(0, 0.2)
    return model


def check_logits(engine: Engine, model: Any, prompt: list[int]) -> None:
    """Every position, read through prompt logprobs."""
    want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    request = make(1, prompt, 1)
    request.params = request.params.with_(prompt_logprobs=20, logprobs=20)
    engine.core.add(request)
    found = {}
    while engine.core.has_work:
        for event in engine.core.step():
            found |= dict(enumerate(event.prompt_logprobs, event.prompt_start))
            found |= dict(enumerate(event.logprobs, len(prompt) - 1))
    assert sorted(found) == list(range(len(prompt)))
    for position, record in found.items():
        got, tops = torch.tensor(record.top_logprobs), torch.tensor(record.top_tokens)
        assert (got - want[position][tops]).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_logits_equal_transformers(family: str, backend: str | None) -> None:
    engine = tiny_engine(model_of(family), max_num_batched_tokens=16, attention_backend=backend)
    check_logits(engine, model_of(family), prompts(1, seed=3, longest=50)[0] + [5, 6, 7, 8, 9] * 5)


@pytest.mark.parametrize("family", ["v2-lite", "v3"])
@pytest.mark.parametrize("form", ["expanded", "both"])
def test_the_expanded_form_is_the_same_model(
    family: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompt lengths in the batch; `both` claims that every prompt ends after 30 tokens."""
    engine = tiny_engine(model_of(family), max_num_batched_tokens=16, attention_backend="reference")
    backend = engine.runner.backend
    plain, seen = backend.plan, set()

    def plan(batch: Any, *more: Any) -> object:
        ends = batch.host_context_lens
        lens = ends.clip(max=30) if form == "both" else ends
        made = plain(replace(batch, host_prompt_lens=lens), *more)
        seen.add((made.absorbed is not None, made.expanded is not None))
        return made

    monkeypatch.setattr(backend, "plan", plan)
    check_logits(engine, model_of(family), prompts(1, seed=5, longest=50)[0] + [5, 6, 7] * 9)
    both = {(False, True), (True, True), (True, False)}
    assert seen == (both if form == "both" else {(False, True)})


@pytest.mark.parametrize("family", ["v2-lite", "v3"])
def test_without_a_prefix_cache_prompts_are_expanded(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whose tokens they are, not by how they are fed: red when a lone prompt token, or an answer
    computed again after preemption, takes the form of the other."""
    model = model_of(family)
    engine = tiny_engine(
        model,
        attention_backend="reference",
        enable_prefix_caching=False,
        max_num_seqs=5,
        **{**tiny_pool(family, 80 // 4 + 9), "max_chunk": 3},
    )
    backend, asked = engine.runner.backend, []
    plain = backend.plan

    def plan(batch: Any, *more: Any) -> object:
        asked.append(batch.host_prompt_lens)
        return plain(batch, *more)

    monkeypatch.setattr(backend, "plan", plan)
    some = prompts(5, seed=6)
    requests = [make(i, p, 20) for i, p in enumerate(some)]
    run(engine, requests)
    for request, prompt in zip(requests, some, strict=True):
        assert request.output == greedy(model, prompt, 20)
    assert engine.core.scheduler.stats().num_preempted > 0
    known = {len(prompt) for prompt in some}
    assert {int(n) for lens in asked for n in lens} == known


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_in_a_mixed_batch(family: str) -> None:
    """Prefill chunks and decodes in the same steps, shared prefixes, more requests than rows."""
    model = model_of(family)
    engine = tiny_engine(model, max_num_batched_tokens=24, max_num_seqs=4)
    some = prompts(5, seed=1)
    some += [some[0] + some[1][:9], some[0] + some[2][:5]]
    requests = [make(i, p, 8) for i, p in enumerate(some)]
    run(engine, requests)
    for request, prompt in zip(requests, some, strict=True):
        assert request.output == greedy(model, prompt, 8)
    assert engine.core.scheduler.stats().prefix_hit_tokens > 0


needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise is MKL's")


@cache
def alone(family: str) -> list[Any]:
    """Each prompt in an engine of its own: one chunk, nothing cached."""
    lone = tiny_engine(model_of(family), max_num_seqs=1, enable_prefix_caching=False)
    return [records(lone, [p], first=i)[0] for i, p in enumerate(prompts(7, seed=4))]


def tiny_pool(family: str, num_pages: int) -> dict[str, Any]:
    page_bytes = tiny_engine(model_of(family)).runner.pool.cache.page_bytes
    return {"max_model_len": 80, "kv_cache_memory": page_bytes * num_pages}


ENGINES: dict[str, Callable[[str], dict[str, Any]]] = {
    "full batch": lambda _: {"max_num_batched_tokens": 1024},
    "chunks of 1": lambda _: {"max_chunk": 1},
    "chunks of 3": lambda _: {"max_chunk": 3},
    "small steps": lambda _: {"max_num_batched_tokens": 11},
    "preemption": lambda family: tiny_pool(family, 80 // 4 + 9),
}


@needs_mkl
@pytest.mark.parametrize("family", ["v2-lite", "v3"])
@pytest.mark.parametrize("name", ENGINES)
def test_bits_do_not_depend_on_the_engine(family: str, name: str) -> None:
    engine = tiny_engine(model_of(family), **ENGINES[name](family))
    assert records(engine, prompts(7, seed=4)) == alone(family)
    if name == "preemption":
        assert engine.core.scheduler.stats().num_preempted > 0


@needs_mkl
@pytest.mark.parametrize("family", ["v2-lite", "v3"])
def test_an_answer_in_the_next_prompt_has_the_bits_of_any_prompt(family: str) -> None:
    """A conversation: the second prompt finds the first answer's pages, written while decoding.
    Red when what was generated is computed in another form than what was given."""
    engine = tiny_engine(model_of(family), max_num_batched_tokens=64)
    first = prompts(1, seed=9, longest=40)[0] + [7] * 10
    answer = [record.token for record in records(engine, [first])[0]]
    assert len(answer) == NUM_TOKENS
    second = first + answer + [11, 12, 13]
    before = engine.core.scheduler.stats().prefix_hit_tokens
    on_hit = records(engine, [second], first=1)
    assert engine.core.scheduler.stats().prefix_hit_tokens - before > len(first)
    fresh = tiny_engine(model_of(family), enable_prefix_caching=False)
    assert on_hit == records(fresh, [second])


def test_only_latents_are_cached() -> None:
    """Bytes of a token against keys and values of every head, here and in the published models."""
    engine = tiny_engine(model_of("v3"))
    pool = engine.runner.pool
    layer = pool.layer(0)
    cached = (layer.keys.nbytes + layer.values.nbytes) / pool.num_pages / 4  # pages of 4 tokens
    assert cached == (32 + 8) * 4
    assert 6 * (16 + 8 + 12) * 4 / cached == 5.4  # six heads of keys and values
    published = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    for heads, saved in ((16, 8.9), (128, 71.1)):  # V2-Lite, V3
        config = transformers.DeepseekV3Config(num_attention_heads=heads, **published).to_dict()
        spec = spec_of({**config, "architectures": ["DeepseekV3ForCausalLM"]})
        assert spec.mla is not None
        every_head = spec.num_heads * (spec.head_dim + spec.mla.v_dim)
        assert round(every_head / (spec.mla.kv_rank + spec.mla.rope_dim), 1) == saved


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_saved_models_load_as_they_were(family: str, tmp_path: Path) -> None:
    """Experts are one tensor each on disk; layers that predict further tokens are left there."""
    model = model_of(family)
    model.save_pretrained(tmp_path)
    saved, held = SafetensorsCheckpoint.open(tmp_path), StateDictCheckpoint(model)
    assert any(".experts.0." in name for name in saved.names())
    extra = {
        name.replace("layers.2.", "layers.3."): tensor + 1
        for name, tensor in held.tensors.items()
        if "layers.2." in name
    }
    held.tensors |= {**extra, "model.layers.3.eh_proj.weight": torch.zeros(48, 96)}
    words: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 22}
    args = EngineArgs(**words, max_model_len=64)
    found = [records(build_engine(args, of), [[5, 9, 17, 40]]) for of in (saved, held)]
    assert found[0] == found[1]


def test_dense_layers() -> None:
    config = StateDictCheckpoint(model_of("v3")).config
    spec = spec_of({**config, "num_hidden_layers": 7, "moe_layer_freq": 2})
    assert [spec.is_sparse(i) for i in range(7)] == [False, False, True, False, True, False, True]
    dense = spec_of({**config, "n_routed_experts": None})
    assert dense.moe is None


@pytest.mark.parametrize(
    "family, changes, kind, message",
    [
        ("v3", {"quantization_config": {"quant_method": "aqlm"}}, NotSupported, "use one of"),
        ("v3-small", {"attention_bias": True}, NotSupported, "attention_bias=true without"),
        ("v2", {"norm_topk_prob": True}, NotSupported, "norm_topk_prob=true"),
        ("v3", {"scoring_func": "softmax"}, CheckpointError, "got scoring_func='softmax'"),
        ("v2", {"topk_method": "noaux_tc"}, CheckpointError, "got topk_method='noaux_tc'"),
        ("v3", {"kv_lora_rank": None}, CheckpointError, "got no kv_lora_rank"),
    ],
)
def test_what_is_refused(
    family: str, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    config = StateDictCheckpoint(model_of(family)).config
    with pytest.raises(kind, match=message):
        spec_of({**config, **changes})


V2_LITE = {  # as published, in the older spelling
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "torch_dtype": "bfloat16",
}


def test_a_published_config() -> None:
    spec = spec_of(V2_LITE)
    assert spec.mla is not None and spec.moe is not None and spec.rope is not None
    assert (spec.mla.q_rank, spec.mla.kv_rank, spec.head_dim) == (None, 512, 192)
    assert (spec.moe.shared_ffn_size, spec.moe.shared_gate) == (2816, False)
    assert spec.moe.dense_layers == {0}
    assert (spec.rope.dim, spec.rope.kind) == (64, "yarn")
    assert spec.attn_scale == pytest.approx(0.11472, abs=1e-5)  # 192^-0.5 (0.0707 ln 40 + 1)^2


def test_older_spellings_of_yarn() -> None:
    config = dict(StateDictCheckpoint(model_of("v3-yarn")).config)
    new = dict(config.pop("rope_parameters"))
    theta, kind = new.pop("rope_theta"), new.pop("rope_type")
    older = {**config, "rope_theta": theta, "rope_scaling": {**new, "type": kind}}
    assert spec_of(json.loads(json.dumps(older))) == spec_of(
        StateDictCheckpoint(model_of("v3-yarn")).config
    )


def test_a_long_prompt_beyond_one_round_of_pages() -> None:
    """As long as the engine's context, with the last token alone in its step."""
    model = model_of("v3-yarn")
    engine = tiny_engine(model, max_model_len=256, max_num_batched_tokens=127)
    check_logits(engine, model, random.Random(0).choices(range(3, VOCAB), k=255))
