"""Bytes and operations against counters and tensors that know nothing of the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quire.bench.peers import H200
from quire.bench.roofline import (
    Ceilings,
    Feed,
    Load,
    attention_load,
    floats_of,
    step_loads,
    total,
)
from quire.bench.shapes import SHAPES, shrunk
from quire.bench.suite import h200_suite
from quire.bench.suite_limits import limit_of
from quire.models.registry import spec_of
from quire.models.spec import MlaSpec

TINY = shrunk(SHAPES["8b"])


def hf_flops(length: int) -> int:
    config = LlamaConfig(
        **{k: v for k, v in TINY.items() if k not in ("architectures", "model_type")},
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None], logits_to_keep=1, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("length", [1, 24])
def test_operations_are_those_torch_counts_in_transformers(length):
    """Red when a product is forgotten or counted twice (eager attention computes what it masks)."""
    loads = dict(step_loads(spec_of(TINY), [Feed(0, length)], 4))
    attention = loads.pop("attention").num_flops
    whole = attention * length**2 / (length * (length + 1) / 2)
    rotary = hf_flops(length) - total(loads.values()).num_flops - whole
    assert 0 <= rotary <= 2 * length * 16  # transformers makes its rotary tables by a product


@pytest.mark.parametrize("shape", ["8b", "0.6b", "14b"])
def test_weights_are_as_many_as_in_transformers(shape):
    """Red when a weight is forgotten; at full size, on a device without memory."""
    values = dict(SHAPES[shape])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    inner = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    loads = step_loads(spec_of(SHAPES[shape]), [], 2)
    assert total(loads.values()) == Load(2 * (inner + model.lm_head.weight.numel()))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("decode-8b-1", 3.54),
        ("decode-8b-8", 3.6),
        ("decode-8b-32", 3.8),
        ("long-8b-32k", 11.4),
        ("long-8b-128k", 7.5),
        ("decode-14b-1", 6.6),
        ("decode-8b-int4-1", 0.975),  # 3.6 GB of layers, 0.53 of the head, at 4.24 TB/s
    ],
)
def test_floors_agree_with_those_worked_out_by_hand(name, published):
    suite = h200_suite()
    (row,) = suite.select([name]).rows
    assert limit_of(row, spec_of(suite.shapes[row.shape]), H200) == pytest.approx(
        published, rel=0.01
    )


def brute_pairs(start: int, num: int, window: int | None) -> tuple[int, int]:
    """(query-key pairs, keys read) by listing them."""
    pairs = [
        (query, key)
        for query in range(start, start + num)
        for key in range(query + 1)
        if window is None or query - key < window
    ]
    return len(pairs), len({key for _, key in pairs})


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize(("start", "num"), [(0, 1), (0, 7), (3, 5), (12, 1), (20, 6)])
def test_windows_by_listing_every_pair(start, num, window):
    plain = spec_of(TINY)
    spec = replace(plain, windows=(None, window))
    found = attention_load(spec, [Feed(start, num)], floats_of(spec, 2))
    full, part = brute_pairs(start, num, None), brute_pairs(start, num, window)
    assert found.num_flops == (full[0] + part[0]) * 4 * 4 * 16
    assert found.num_bytes == (full[1] + part[1]) * 2 * 2 * 16 * 2


def test_latent_attention_keeps_one_vector_a_token():
    mla = MlaSpec(q_rank=None, kv_rank=24, rope_dim=8, nope_dim=16, v_dim=12)
    spec = replace(spec_of(TINY), mla=mla)
    assert floats_of(spec, 2).token_bytes == 2 * (24 + 8) * 2
    loads = step_loads(spec, [Feed(9, 1)], 2)
    q, down, up = 32 * 4 * 24, 32 * 32, 24 * 4 * 28
    assert loads["qkv"].num_bytes == 2 * 2 * (q + down + up)
    assert loads["out"].num_bytes == 2 * 2 * 4 * 12 * 32


def test_a_lone_token_reads_its_own_experts_and_a_crowd_all():
    config = {
        **TINY,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    spec = spec_of(config)
    one, router = 3 * 16 * 32, 8 * 32
    lone = step_loads(spec, [Feed(4, 1)], 1)
    assert lone["experts"].num_bytes == pytest.approx(2 * (2 * one + router))
    assert lone["up"] == Load(0, 0)
    crowd = step_loads(spec, [Feed(4, 1)] * 500, 1)
    assert crowd["experts"].num_bytes == pytest.approx(2 * (8 * one + router))


def test_the_slower_of_memory_and_arithmetic_decides():
    slow_memory, slow_math = Ceilings(1.0, 1e9, ""), Ceilings(1e9, 1.0, "")
    load = Load(num_bytes=3.0, num_flops=5.0)
    assert (load.seconds(slow_memory), load.seconds(slow_math)) == (3.0, 5.0)
