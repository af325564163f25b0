"""GGUF files of Hugging Face models, made by the gguf package, and what an engine makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quire.config import EngineArgs
from quire.engine.build import build_engine
from quire.load.gguf_checkpoint import GGUFCheckpoint
from tests.hf import greedy
from tests.model.test_parity import make, prompts, run

ATTENTION = {  # Hugging Face's names of a layer's parts, and GGUF's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def new_writer(path: Path, config: Any, arch: str, head_dim: int) -> Any:
    """With the sizes that files of every architecture state."""
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    return writer


def finish(writer: Any, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_generates_as(checkpoint: GGUFCheckpoint, model: Any, count: int) -> None:
    """Greedy answers from the file are those of the model it was made of."""
    args = EngineArgs(
        device="cpu", dtype="float32", page_size=4, kv_cache_memory=1 << 22, max_model_len=128
    )
    engine, some = build_engine(args, checkpoint), prompts(count, seed=4)
    requests = [make(i, prompt, 6) for i, prompt in enumerate(some)]
    run(engine, requests)
    for request, prompt in zip(requests, some, strict=True):
        assert request.output == greedy(model, prompt, 6)
