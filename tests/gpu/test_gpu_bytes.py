"""Bytes of packed weights on a GPU, in forms rounded at load and stored by others: what the format
says, and what the allocator handed out for them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire import LLM
from quire.evaluate.footprint import resident_bytes
from quire.models.tiny import tiny_model
from quire.ops.int8_inputs import Int8Inputs
from quire.ops.packed_linear import PackedLinear
from tests.engine.test_resident_weights import BITS
from tests.quant.matrix import folder_of

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 512}
LAYERS = {"num_hidden_layers": 4}
VOCAB = 1024
# Layouts of others, with all there is beside codes; experts in orders of their own among them.
STORED = (
    ("gptq with g_idx", "qwen3_moe"),
    ("gptq of 3 bits", "llama"),
    ("awq", "llama"),
    ("fp8 in blocks of 128", "llama"),
    ("smoothquant", "qwen3_moe"),
    ("bitsandbytes nf4", "llama"),
    ("nvfp4", "llama"),
    ("gpt-oss's mxfp4", "gpt_oss"),
    ("bitnet", "bitnet"),
)
FLOATS = (".weight", "bias", "sinks")  # tensors of no layout


@dataclass(frozen=True, slots=True)
class Held:
    resident: int  # weights, without scratch
    scratch: int
    allocated: int


def held(folder: Path, **how: Any) -> Held:
    """Of an engine in which all but the weights is the same, whatever their form. The first one
    leaves behind what is allocated once in a process."""
    _held(folder, **how)
    return _held(folder, **how)


def _held(folder: Path, **how: Any) -> Held:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        device="cuda",
        enforce_eager=True,
        page_size=16,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory=1 << 22,
        **how,
    )
    gc.collect()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated() - before
    said = [each for each in llm._engine.decisions if each.what in ("expanded weights", "inputs")]
    assert said == []
    model = llm._engine.runner.model
    scratch = sum(map(resident_bytes, {id(s): s for s in scratches(llm)}.values()))
    return Held(resident_bytes(model) - scratch, scratch, allocated)


def scratches(llm: LLM) -> list[object]:
    model = llm._engine.runner.model
    kernels = [model.head.kernel] + [block.attn.out.kernel for block in model.blocks]
    inner = [k.kernel if isinstance(k, Int8Inputs) else k for k in kernels]
    return [kernel.scratch for kernel in inner if isinstance(kernel, PackedLinear)]


def check_allocated(packed: Held, plain: Held) -> None:
    """Red when something is kept that the model does not reach, as a copy in another layout is."""
    assert plain.scratch == 0
    less = plain.resident - packed.resident - packed.scratch
    slack = 0.01 * plain.resident + (1 << 19)  # pieces of 512 bytes, and of the library
    assert abs(plain.allocated - packed.allocated - less) < slack, (packed, plain)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Held]:
    folder = tiny_model(
        "llama", tmp_path_factory.mktemp("llama"), tokenizer=False, vocab_size=VOCAB,
        **SIZES, **LAYERS,
    )  # fmt: skip
    return folder, held(folder)


@pytest.mark.parametrize("name", BITS)
def test_rounded_at_load(name: str, llama: tuple[Path, Held]) -> None:
    """Red when a form is expanded, kept twice or padded."""
    folder, plain = llama
    found = held(folder, quantization=name)
    heads = VOCAB * SIZES["hidden_size"] * 2  # the embedding's and the head's
    layers = plain.resident // 2 - heads  # norms are too few to tell
    in_layers, in_heads = BITS[name]
    want = (layers * in_layers + heads * in_heads) / 8
    assert found.resident / want == pytest.approx(1.0, abs=0.03)
    largest = 2 * SIZES["hidden_size"] * max(VOCAB, 2 * SIZES["intermediate_size"])
    assert found.scratch <= largest
    check_allocated(found, plain)


@pytest.mark.parametrize("form, family", STORED)
def test_stored(form: str, family: str, tmp_path: Path) -> None:
    """Red when a layout is kept wider than its files are; floats of these are kept in bf16."""
    folder, how = folder_of(form, family, tmp_path / "packed", SIZES)
    found, in_files = held(folder, **how), file_bytes(folder)
    assert in_files * 0.95 < found.resident < in_files * 1.03, (found, in_files)
    plain, _ = folder_of("fp8", family, tmp_path / "plain", SIZES)  # not rounded yet
    check_allocated(found, held(plain))


def file_bytes(folder: Path) -> float:
    """Of all tensors, with weights of fp32 as bf16."""
    total = 0.0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                is_wide = tensor.dtype == torch.float32 and name.endswith(FLOATS)
                total += tensor.numel() * tensor.element_size() / (2 if is_wide else 1)
    return total
