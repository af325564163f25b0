"""Configs from strangers: every field, every kind of nonsense. One line says what is wrong, soon
and in little memory, or the engine works."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError, QuireError
from quire.llm import LLM
from quire.load.fit import check_fit
from quire.load.safetensors_checkpoint import SafetensorsCheckpoint, read_config
from quire.models.registry import spec_of
from quire.models.tiny import tiny_model
from quire.models.tiny_configs import tiny_config, tiny_families
from quire.params import SamplingParams
from quire.text.tokenizer import Tokenizer
from tests.load.hostile import changed, fields, turned

QUICK = ("LlamaForSequenceClassification", "DeepseekV3ForCausalLM")
MAX_BYTES = 16 << 20
MAX_MESSAGE = 600  # characters
is_long = pytest.mark.skipif(
    not os.environ.get("QUIRE_LONG_TESTS"), reason="QUIRE_LONG_TESTS is not set"
)


class Folder:
    """A tiny model whose config.json is replaced again and again."""

    def __init__(self, family: str, folder: Path) -> None:
        self.path = tiny_model(family, folder / family)
        self.checkpoint = SafetensorsCheckpoint.open(self.path)
        self.config = dict(self.checkpoint.config)

        self._judged: dict[str, bool] = {}

    def judge(self, config: Mapping[str, Any]) -> str | None:
        """The spec, spelled out, that a config is accepted as; None where it is refused."""
        self.checkpoint.config = config
        try:
            spec = spec_of(config)
            # Most fields are of other families and change nothing: once for each is enough.
            key = f"{spec} {config.get('quantization_config')} {config.get('model_type')}"
            if key not in self._judged:
                self._judged[key] = False
                check_fit(self.checkpoint, spec)
                self._judged[key] = True
        except QuireError as error:
            assert len(str(error)) < MAX_MESSAGE, str(error)[:MAX_MESSAGE]
            return None
        return key if self._judged[key] else None

    def accepted(self, configs: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """One config for each spec that came out."""
        found: dict[str, Mapping[str, Any]] = {}
        tracemalloc.start()
        try:
            for config in configs:
                if (spec := self.judge(config)) is not None:
                    found.setdefault(spec, config)
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
        finally:
            tracemalloc.stop()
        return found

    def run(self, config: Mapping[str, Any]) -> None:
        """What was accepted must give numbers."""
        (self.path / "config.json").write_text(json.dumps(config))
        small = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_memory": 8 << 20}
        llm = LLM(str(self.path), num_threads=1, skip_tokenizer_init=True, **small)
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, ignore_eos=True)
        try:
            (output,) = llm.generate([{"prompt_token_ids": [5]}], params)
        except QuireError as error:
            assert "max_model_len" in str(error)  # of one position
            return
        for position in output.outputs[0].logprobs or ():
            assert all(math.isfinite(p.logprob) for p in position.values())


def test_the_fields_are_found() -> None:
    """Red when the readers of a config are called otherwise, so that nothing would be tried."""
    wanted = {"num_hidden_layers", "rope_theta", "n_routed_experts", "layer_types", "num_labels"}
    assert wanted | {"eos_token_id", "mscale", "text_config", "mlp_only_layers"} <= set(fields())


@pytest.mark.parametrize("family", QUICK)
def test_every_field_of_two_families(tmp_path: Path, family: str) -> None:
    """Red when a value ends in anything but a message, takes memory, or is taken for another."""
    folder = Folder(family, tmp_path)
    assert folder.judge(folder.config) is not None
    assert folder.accepted(changed(folder.config))


def test_every_field_of_rotary_embeddings(tmp_path: Path) -> None:
    folder = Folder("LlamaForCausalLM", tmp_path)
    assert folder.accepted(turned(folder.config, half_head=4))


@is_long
@pytest.mark.parametrize("family", tiny_families())
def test_every_field_of_every_family_and_the_engine_it_makes(tmp_path: Path, family: str) -> None:
    folder = Folder(family, tmp_path)
    for config in folder.accepted(changed(folder.config)).values():
        folder.run(config)


@is_long
def test_every_accepted_rotary_embedding_turns(tmp_path: Path) -> None:
    folder = Folder("LlamaForCausalLM", tmp_path)
    for config in folder.accepted(turned(folder.config, half_head=4)).values():
        folder.run(config)


LISTED = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("llama", {"num_hidden_layers": 10**9}, "want a whole number from 1 to 4096"),
        ("llama", {"num_hidden_layers": 4000}, "says 4000 layers, the tensors are those of 2"),
        ("llama", {"hidden_size": 10**12}, "want a whole number from 1 to 16777216"),
        ("llama", {"vocab_size": 300}, "has shape (258, 32), the config asks for (300, 32)"),
        ("llama", {"intermediate_size": 50}, "the config asks for (32, 50)"),
        ("llama", {"num_attention_heads": 3}, "is not a multiple of num_key_value_heads=2"),
        ("llama", {"num_key_value_heads": 4}, "the config asks for (32, 32)"),
        ("llama", {"head_dim": 7}, "want an even number of rotated dims"),
        ("llama", {"eos_token_id": "x"}, "got eos_token_id='x', want a whole number"),
        ("llama", {"eos_token_id": [1, True]}, "got eos_token_id=[1, True], want"),
        ("llama", {"rope_theta": math.nan}, "got rope_theta=nan, want a number from"),
        ("llama", {"rms_norm_eps": -1e-5}, "got rms_norm_eps=-1e-05, want a number from"),
        ("llama", {"tie_word_embeddings": "no"}, "want true or false"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": math.nan}}, "got factor=nan"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "rope_theta": 1}}, "are no numbers"),
        ("mistral", {"sliding_window": 8, "layer_types": LISTED * 9}, "want 2 of"),
        ("mixtral", {"num_local_experts": 4000}, "says 4000 experts, the router"),
        ("mixtral", {"num_experts_per_tok": 5}, "want at most the 4 experts"),
        ("gpt2", {"n_head": 5}, "want a divisor of n_embd=32"),
        ("gpt2", {"n_positions": 512}, "has shape (256, 32), the config asks for (512, 32)"),
        ("deepseek_v3", {"first_k_dense_replace": "x"}, "want a whole number from 0"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, family: str, changes: dict[str, Any], told: str
) -> None:
    checkpoint = SafetensorsCheckpoint.open(tiny_model(family, tmp_path, tokenizer=False))
    checkpoint.config = {**checkpoint.config, **changes}
    with pytest.raises(CheckpointError) as caught:
        check_fit(checkpoint, spec_of(checkpoint.config))
    assert told in str(caught.value)


def test_a_model_larger_than_any_is_refused_before_memory_is_taken() -> None:
    """Each number alone may be, not all of them together: without weights nobody else objects."""
    huge = {"hidden_size": 2**23, "intermediate_size": 2**24, "num_hidden_layers": 4096}
    with pytest.raises(CheckpointError, match=r"describes a model of .* weights"):
        spec_of(tiny_config("llama", **huge))


def test_fewer_layers_than_there_are_tensors_for_is_a_model(tmp_path: Path) -> None:
    """Red when checkpoints that carry more (layers that draft tokens) are refused."""
    folder = Folder("LlamaForCausalLM", tmp_path)
    assert folder.judge({**folder.config, "num_hidden_layers": 1}) is not None


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "[" * 100_000,
        '{"a": ' + "9" * 10_000 + "}",
        '{"hidden_size": 32, "hidden_size": 64}',
        "[]",
        "NaN",
    ],
    ids=["deep", "digits", "twice", "list", "nan"],
)
def test_what_is_no_object_of_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        read_config(tmp_path)
    assert len(str(caught.value)) < MAX_MESSAGE


# ------------------------------------------------------------ what stands beside it


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": [1, True]}),
        ("generation_config.json", {"eos_token_id": -1}),
        ("generation_config.json", {"eos_token_id": 10**12}),
        ("generation_config.json", {"eos_token_id": 1.5}),
        ("tokenizer_config.json", {"bos_token": 5}),
        ("tokenizer_config.json", {"eos_token": {"content": []}}),
        ("tokenizer_config.json", {"add_bos_token": "yes"}),
        ("tokenizer_config.json", {"additional_special_tokens": "x"}),
        ("tokenizer_config.json", {"additional_special_tokens": [5]}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"chat_template": [{"name": [], "template": ""}]}),
    ],
)
def test_companions_are_checked_too(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    folder = tiny_model("llama", tmp_path)
    (folder / file).write_text(json.dumps(content))
    (key,) = content
    with pytest.raises(CheckpointError, match=rf"{file}: got {key}="):
        Tokenizer.from_folder(folder)


def test_tokens_the_model_does_not_have(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    checkpoint = SafetensorsCheckpoint.open(folder)
    spec = spec_of(checkpoint.config)
    vocab = json.loads((folder / "tokenizer.json").read_text())
    vocab["model"]["vocab"]["a"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(CheckpointError, match="a token of id 2147483648"):
        check_fit(checkpoint, spec, Tokenizer.from_folder(folder))


def test_an_ending_token_the_model_cannot_write_does_no_harm(tmp_path: Path) -> None:
    """Red when a file that works elsewhere is refused: defaults of other sizes are common."""
    checkpoint = SafetensorsCheckpoint.open(tiny_model("llama", tmp_path, tokenizer=False))
    checkpoint.config = {**checkpoint.config, "eos_token_id": 50256, "bos_token_id": 50256}
    check_fit(checkpoint, spec_of(checkpoint.config))
