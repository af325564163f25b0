from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.cli.layer_plan import data_sheet
from quire.cli.main import main
from quire.cli.pull import is_cached
from quire.load.known import KNOWN_MODELS, WheelSource
from quire.native.library import find_library
from tests.cli.conftest import ENGINE
from tests.tiny_folder import CONFIG


def test_list_names_source_licence_and_cache(run_json, monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    records = run_json("pull", "--list")
    assert [r["name"] for r in records] == [m.name for m in KNOWN_MODELS]
    assert all(r["licence"] and r["source"] for r in records)
    assert records[0]["cached"] is False


def test_a_cached_file_counts_only_when_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    model = next(m for m in KNOWN_MODELS if isinstance(m.source, WheelSource))
    file = tmp_path / "models" / model.name / model.source.filename
    file.parent.mkdir(parents=True)
    file.write_bytes(b"part")
    assert not is_cached(model)
    with file.open("r+b") as out:
        out.truncate(model.source.size)  # sparse: no bytes are written
    assert is_cached(model)


def test_pull_of_a_path_tells_the_path(tiny, run_json):
    (record,) = run_json("pull", tiny)
    assert record == {"name": tiny, "path": tiny, "bytes": 0}


def test_small_sizes_have_small_units(tiny, capsys):
    """Red when a small model is said to take 0.00 GiB, 0 MiB or 0 MB."""
    file = Path(tiny) / "model.safetensors"
    file.write_bytes(bytes(1536))
    try:
        assert main(["pull", tiny]) == 0
    finally:
        file.unlink()
    assert capsys.readouterr().err == f"{tiny}: 1.50 KiB\n"
    assert main(["inspect", tiny, "--load-format", "dummy"]) == 0
    shown = capsys.readouterr().out
    assert "bytes, 125 KiB as float32" in shown
    assert not re.search(r"\b0(\.0+)? ?[KMG]i?B", shown)


def test_inspect_does_the_arithmetic(tiny, run_json):
    words = ["--page-size", "8", "--max-model-len", "64", "--max-num-seqs", "2"]
    (record,) = run_json("inspect", tiny, *ENGINE, *words)
    model = record["model"]
    head_dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    per_token = 2 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * head_dim * 4
    assert model["kv bytes per token"] == per_token
    assert model["kv bytes per page"] == per_token * 8
    assert model["kv bytes per full request"] == per_token * 64
    assert model["chat template"] == "yes"
    decided = {d["what"]: (d["value"], d["why"]) for d in record["decisions"]}
    assert decided["max_model_len"] == ("64", "asked for")
    # Never more than every sequence at full length could use.
    assert decided["kv cache"][0] == "about 16 pages of 8 = 128 tokens"


def test_inspect_counts_packed_files_as_they_are_kept(default_model_path, run_json):
    """Red when a file of 98 MB is said to take the memory of its weights in fp32."""
    (record,) = run_json("inspect", str(default_model_path), "--device", "cpu")
    decided = {d["what"]: d["value"] for d in record["decisions"]}
    if not decided["cpu kernels"].startswith("torch"):
        assert record["model"]["weights in memory"] == 96_576_768
        assert record["model"]["kv bytes per token"] == 2 * 30 * 3 * 64 * 2


def test_inspect_tells_layers_pages_and_the_bound(tiny, run_json):
    """Red when the plan, the pages of the context asked about, or the bytes of a step are wrong."""
    words = ["--page-size", "8", "--max-model-len", "64", "--context", "33", "--dtype", "float32"]
    (record,) = run_json("inspect", tiny, *ENGINE, *words)
    assert record["layers"] == [{"layers": "0-1", "attention": "full", "feed_forward": "gated 48"}]
    cache = record["cache"]
    assert cache["context"] == 33 and cache["pages"] == 5
    assert cache["groups"] == [
        {"layers": [0, 1], "window": None, "token_bytes": cache["token_bytes"], "pages": 5}
    ]
    # All weights but the embedding, of which a step reads a row or so, and the norms.
    hidden, ffn, head_dim, kv = 32, 48, 8, 16
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * ffn
    weights = (2 * layer + CONFIG["vocab_size"] * hidden) * 4
    assert head_dim * CONFIG["num_key_value_heads"] == kv
    bound = record["decode_bound"]
    for rate in bound["rates"]:
        kept = rate["batch"] * (33 + 1) * cache["token_bytes"]  # read, and one token written
        assert rate["step_bytes"] == weights + kept
        want = rate["batch"] * bound["bytes_per_s"] / rate["step_bytes"]
        assert abs(rate["tokens_per_s"] - want) < want * 1e-3 + 0.1
    assert [rate["batch"] for rate in bound["rates"]] == [1, 32, 128]
    assert "measured" in bound["source"]


def test_inspect_refuses_a_context_the_engine_would(tiny, capsys):
    assert main(["inspect", tiny, *ENGINE, "--max-model-len", "64", "--context", "65"]) == 2
    assert "want at most max_model_len=64" in capsys.readouterr().err


def test_data_sheets():
    """Red when one name is taken for part of another."""
    assert data_sheet("NVIDIA H200").bytes_per_s == 4.8e12
    assert data_sheet("NVIDIA H20").bytes_per_s == 4.0e12
    assert data_sheet("NVIDIA GH200 480GB").bytes_per_s == 4.0e12
    assert data_sheet("NVIDIA A100-SXM4-80GB").bytes_per_s == 2.04e12
    assert data_sheet("NVIDIA A10").bytes_per_s == 0.6e12
    assert data_sheet("Some Other Card") is None


def test_inspect_says_when_nothing_fits(tiny, run_json):
    words = ["--load-format", "dummy", "--kv-cache-memory", "1KiB"]
    (record,) = run_json("inspect", tiny, *words)
    last = record["decisions"][-1]
    assert last["value"] == "does not fit" and "max_model_len" in last["why"]


def test_inspect_table_without_tokenizer(mute, capsys):
    assert main(["inspect", mute, *ENGINE]) == 0
    assert "only token ids can be used" in capsys.readouterr().out


@pytest.mark.skipif(find_library()[0] is None, reason="without the library weights are expanded")
def test_inspect_tells_forms_by_layer_and_their_bytes(tiny, run_json):
    """Red when the bound of decoding counts other bytes than the weights have in their form."""
    words = ["--page-size", "8", "--max-model-len", "64", "--context", "33", "--device", "cpu"]
    (plain,) = run_json("inspect", tiny, *ENGINE, *words, "--dtype", "float32")
    (record,) = run_json("inspect", tiny, *ENGINE, *words, "--quantization", "mxfp4")
    parts = {part["where"]: part for part in record["weights"]}
    hidden, ffn, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    layer = 2 * hidden * hidden + 2 * hidden * 16 + 2 * hidden * ffn
    # 32 inputs are a block of mxfp4; those of `down`, 48, are none: it stays in fp32.
    assert parts["layers 0-1"]["forms"] == {
        "mxfp4": 2 * layer * 17 // 32,
        "float32": 2 * (hidden * ffn + 2 * hidden) * 4,
    }
    assert parts["embedding"]["forms"] == {"8 bits": vocab * hidden * 34 // 32}
    assert record["model"]["weights in memory"] == sum(p["bytes"] for p in record["weights"])
    steps = [r["decode_bound"]["rates"][0]["step_bytes"] for r in (plain, record)]
    cache = [r["cache"]["token_bytes"] for r in (plain, record)]
    assert cache[1] == cache[0] // 2  # beside packed weights it is fp16
    head = vocab * hidden
    want = 2 * (layer * 17 // 32 + hidden * ffn * 4) + head * 34 // 32 + (33 + 1) * cache[1]
    assert steps[1] == want < steps[0] / 2


def test_inspect_tells_forms_of_a_file(default_model_path, run_json):
    """Red when a layer's form is not the file's own word for it."""
    (record,) = run_json("inspect", str(default_model_path), "--device", "cpu")
    parts = {part["where"]: part["forms"] for part in record["weights"]}
    if not record["decisions"][5]["value"].startswith("torch"):
        assert list(parts["layers 0-29"]) == ["Q4_1", "F32"] and list(parts["embedding"]) == [
            "Q8_0"
        ]
