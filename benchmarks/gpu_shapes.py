"""Decode steps of mixtures of experts and latent models on one GPU, with random weights.

    python -m benchmarks.gpu_shapes mixtral-8x7b 1x128 32x128 128x128
    python -m benchmarks.gpu_shapes deepseek-v2-lite 1x128 32x128 8x8000
    python -m benchmarks.gpu_shapes gpt-oss-20b 1x128 32x128 128x128 --quantization mxfp4

A job is requests x tokens of context. A step is (time of 64 tokens - time of 1) / 63, the better of
two. Prints one JSON line with the floor: the weights that the batch must reach, in the bytes they
take, over the memory's speed. `gqa-as-v2-lite` is DeepSeek-V2-Lite with four kv heads in place of
latents, all else equal.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "norm_topk_prob": False,
}
V2_LITE = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True,
    },
    "deepseek-v2-lite": {
        **V2_LITE,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "greedy",
    },
    "gqa-as-v2-lite": {
        **V2_LITE,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_key_value_heads": 4,
        "num_experts": 64,
        "shared_expert_intermediate_size": 2816,
        "mlp_only_layers": [0],
    },
}
BITS = {"fp8": 8, "fp8-weights": 8, "int8": 8, "mxfp4": 4.25, "rtn-int4-g128": 4.125}  # of a weight
BANDWIDTH = 4.24e12  # bytes a second, an H200 as measured
NUM_OUT = 64


class Clock:
    """Times generations of random prompts that no cache can know."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.random = llm, random.Random(0)

    def seconds(self, requests: int, context: int, num_out: int) -> float:
        prompts = [
            {"prompt_token_ids": [self.random.randrange(100, 30000) for _ in range(context)]}
            for _ in range(requests)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def step(self, requests: int, context: int) -> dict[str, float]:
        self.seconds(requests, context, 4)  # compiles and captures
        first = min(self.seconds(requests, context, 1) for _ in range(2))
        whole = min(self.seconds(requests, context, NUM_OUT) for _ in range(2))
        step = (whole - first) / (NUM_OUT - 1)
        return {"step_ms": round(step * 1e3, 3), "prefill_ms": round(first * 1e3, 1)}


def reached(spec: Any, requests: int) -> float:
    """Expected parameters that a step of so many tokens reads."""
    if spec.moe is None:
        return float(spec.num_params)
    rule = spec.moe.router
    missed = (1 - rule.top_k / rule.num_experts) ** requests
    chosen = spec.num_active_params - spec.num_params
    per_share = chosen / (rule.top_k / rule.num_experts - 1)  # all experts' parameters
    return float(spec.num_params - per_share * missed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("jobs", nargs="+", metavar="REQUESTSxCONTEXT")
    parser.add_argument("--quantization", choices=sorted(BITS), default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**COMMON, **SHAPES[args.shape]}))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=9216,
            seed=0,
            quantization=args.quantization,
        )
    spec, clock = llm._engine.spec, Clock(llm)
    steps = []
    for job in args.jobs:
        requests, context = map(int, job.split("x"))
        floor = BITS.get(args.quantization, 16) / 8e-3 * reached(spec, requests) / BANDWIDTH
        steps.append({"job": job, **clock.step(requests, context), "weights_ms": round(floor, 2)})
    record = {
        "shape": args.shape,
        "quantization": args.quantization,
        "params": spec.num_params,
        "active": spec.num_active_params,
    }
    print(json.dumps({**record, "steps": steps}))


if __name__ == "__main__":
    main()
