"""What single families bring beyond the common table: bits, longrope's two lengths, spellings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineArgs
from quire.engine.build import build_engine
from quire.errors import CheckpointError
from quire.load.safetensors_checkpoint import SafetensorsCheckpoint
from quire.models.registry import spec_of
from tests.hf import SPARSE, VOCAB, StateDictCheckpoint, tiny_engine, tiny_model
from tests.model.records import records
from tests.model.test_parity import TOLERANCE, prompts

DENSE = ["phi3-longrope", "olmo2", "granite"]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise is MKL's")
@pytest.mark.parametrize("family", [*SPARSE, *DENSE])
def test_bits_do_not_depend_on_the_company(family: str) -> None:
    """Alone or together, an expert's rows are many, few or one: the floats are the same."""
    model, some = tiny_model(family), prompts(7, seed=4)
    lone = tiny_engine(model, max_num_seqs=1, enable_prefix_caching=False)
    alone = [records(lone, [prompt], first=i)[0] for i, prompt in enumerate(some)]
    for changes in (
        {"max_num_batched_tokens": 1024},
        {"max_chunk": 3},
        {"max_num_batched_tokens": 11},
    ):
        assert records(tiny_engine(model, **changes), some) == alone, changes


@pytest.mark.parametrize("family", [*SPARSE, *DENSE])
def test_saved_models_load_as_they_were(family: str, tmp_path: Path) -> None:
    """Experts are one tensor each on disk (w1|w3|w2 or gate|up|down) and fused in memory."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    saved, held = SafetensorsCheckpoint.open(tmp_path), StateDictCheckpoint(model)
    if family in SPARSE:
        assert any(".experts.0." in name for name in saved.names())
        assert not any(".experts.0." in name for name in held.names())
    words: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 22}
    args = EngineArgs(**words, max_model_len=64)
    prompt = [5, 9, 17, 40]
    found = [records(build_engine(args, checkpoint), [prompt]) for checkpoint in (saved, held)]
    assert found[0] == found[1]


def test_longrope_beyond_the_trained_context() -> None:
    """An engine with room past it uses the long factors, transformers once it is fed so much."""
    model = tiny_model("phi3-longrope")
    engine = tiny_engine(model, max_model_len=400, max_num_batched_tokens=128)
    prompt = random.Random(0).choices(range(3, VOCAB), k=300)
    want = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    ((record, *_),) = records(engine, [prompt])
    got = torch.tensor(record.top_logprobs)
    assert (got - want[torch.tensor(record.top_tokens)]).abs().max() < TOLERANCE


def test_longrope_in_its_older_spellings() -> None:
    config = StateDictCheckpoint(tiny_model("phi3-longrope")).config
    new = config["rope_parameters"]
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    older |= {
        "rope_theta": new["rope_theta"],
        "partial_rotary_factor": new["partial_rotary_factor"],
        "original_max_position_embeddings": 256,
    }
    factors = {key: new[key] for key in ("short_factor", "long_factor")}
    for kind in ("longrope", "su", "yarn"):
        assert spec_of(older | {"rope_scaling": {"type": kind, **factors}}) == spec_of(config)
    short = {"type": "longrope", "short_factor": [1.0], "long_factor": factors["long_factor"]}
    with pytest.raises(CheckpointError, match=r"got short_factor=\[1.0\], want a list of 3"):
        spec_of(older | {"rope_scaling": short})


@pytest.mark.parametrize(
    "key, field",
    [
        ("embedding_multiplier", "embed_scale"),
        ("residual_multiplier", "residual_scale"),
        ("attention_multiplier", "attn_scale"),
    ],
)
def test_granite_reads_each_multiplier(key: str, field: str) -> None:
    config = StateDictCheckpoint(tiny_model("granite")).config
    assert getattr(spec_of({**config, key: 0.7}), field) == 0.7
    with pytest.raises(CheckpointError, match=f"got {key}=0, want a number from"):
        spec_of({**config, key: 0})
