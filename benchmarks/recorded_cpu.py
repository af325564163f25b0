"""Decode on a CPU in the shapes of several families: a step as one call, and layer by layer.

Random weights, the whole engine in every step. Engines of both ways run in turns, and each time is
the lower quartile of its steps. One JSON line for each shape.

    python -m benchmarks.recorded_cpu [SHAPE ...] [--steps 40] [--threads 2] [--batch 1]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.moe_cpu import ConfigOnly, step_times
from quire.config import EngineArgs
from quire.engine.build import Engine, build_engine
from quire.params import SamplingParams
from quire.request import Request

PROMPT_LEN = 64
COMMON = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        **COMMON,
        "num_key_value_heads": 16,
        "intermediate_size": 2816,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **COMMON,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2816,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
    },
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **COMMON,
        "num_key_value_heads": 16,
        "intermediate_size": 2816,
        "moe_intermediate_size": 384,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}


def start(config: dict[str, Any], args: argparse.Namespace, **changes: Any) -> Engine:
    """An engine with its requests past their prompts."""
    engine_args = EngineArgs(
        device="cpu",
        dtype=args.dtype,
        quantization=args.quantization,
        load_format="dummy",
        num_threads=args.threads,
        kv_cache_memory=64 << 20,
        max_num_seqs=args.batch,
        max_model_len=512,
        **changes,
    )
    engine = build_engine(engine_args, ConfigOnly(config))
    params = SamplingParams(temperature=1.0, max_tokens=args.steps + 1, ignore_eos=True)
    for i in range(args.batch):
        prompt = [3 + (7 * i + j) % 900 for j in range(PROMPT_LEN)]
        engine.core.add(Request.new(i, prompt, params, seed=i))
    engine.core.step()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    args = parser.parse_args()
    for name in args.shapes:
        engines = [start(SHAPES[name], args), start(SHAPES[name], args, enforce_eager=True)]
        times = dict(zip(("as it runs", "layer by layer"), step_times(engines), strict=True))
        record: dict[str, Any] = {"shape": name, "batch": args.batch, "threads": args.threads}
        record["steps"] = [d.value for d in engines[0].decisions if d.what == "steps"]
        record["weights"] = [d.value for d in engines[0].decisions if d.what == "weights"]
        print(json.dumps({**record, "ms": {way: round(t, 3) for way, t in times.items()}}))


if __name__ == "__main__":
    main()
