"""The tokenizer of a model folder: special ids, added tokens, templates, and damaged files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from quire.errors import BadRequest, CheckpointError
from quire.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_fallback, byte_level

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]


def copy_of(backend: Backend) -> Backend:
    return Backend.from_str(backend.to_str())


def with_bos(backend: Backend) -> Backend:
    backend = copy_of(backend)
    backend.post_processor = TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def text_of(tokenizer: Tokenizer, **options: Any) -> str:
    return tokenizer.apply_chat_template(HI, tokenize=False, **options)


def folder(path: Path, backend: Backend | None = None, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    (backend or byte_level()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}


def test_encode_and_decode(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path, tokenizer_config=CONFIG))
    text = "naïve café 😀 </s> x"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_ids[0] in ids  # special tokens in text are recognised, as elsewhere
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace("</s>", "")
    assert tokenizer.encode_batch([text, "a"]) == [ids, tokenizer.encode("a")]
    assert tokenizer.decode(ids[0]) == tokenizer.decode(ids[:1])


def test_names_hugging_face_scripts_use(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path, tokenizer_config=CONFIG))
    assert len(tokenizer) == tokenizer.vocab_size == byte_level().get_vocab_size()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.bos_token_id == tokenizer.token_to_id("<s>") == tokenizer.bos_id
    assert tokenizer.eos_token_id == tokenizer.token_to_id("</s>")
    assert tokenizer.pad_token_id is None
    assert tokenizer.id_to_token(0) == "<s>"
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_template == TEMPLATE


def test_end_ids_come_from_every_config(tmp_path: Path) -> None:
    files = folder(
        tmp_path,
        tokenizer_config=CONFIG,
        generation_config={"eos_token_id": [7, 1, 9]},
        config={"eos_token_id": 5, "text_config": {"eos_token_id": [7]}},
    )
    assert Tokenizer.from_folder(files).eos_ids == (1, 7, 9, 5)


@pytest.mark.parametrize("in_processor", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_beginning_token(tmp_path: Path, in_processor: bool, flag: bool | None) -> None:
    backend = with_bos(byte_level()) if in_processor else copy_of(byte_level())
    config = CONFIG if flag is None else CONFIG | {"add_bos_token": flag}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, backend, tokenizer_config=config))
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    wants_bos = in_processor if flag is None else flag
    assert tokenizer.encode("the fox") == [tokenizer.bos_id] * wants_bos + plain
    assert tokenizer.encode("") == [tokenizer.bos_id] * wants_bos


def test_end_token_on_request(tmp_path: Path) -> None:
    config = CONFIG | {"add_eos_token": True}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("the fox")[-1] == tokenizer.eos_token_id


def test_truncation_and_padding_of_a_training_run_are_dropped(tmp_path: Path) -> None:
    backend = copy_of(byte_level())
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.from_folder(folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"


def test_tokens_named_in_a_config_become_special(tmp_path: Path) -> None:
    config = {"eos_token": "<tool>", "additional_special_tokens": ["fox", "not a token at all"]}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, special_tokens_map=config))
    assert tokenizer.token_to_id("<tool>") in tokenizer.special_ids
    assert tokenizer.token_to_id("not a token at all") is None
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "ab"


def test_agrees_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for i, backend in enumerate([byte_level(), with_bos(byte_level()), byte_fallback()]):
        files = folder(tmp_path / str(i), backend, tokenizer_config=CONFIG)
        ours = Tokenizer.from_folder(files)
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(files / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        theirs.chat_template = TEMPLATE
        for text in ("the quick fox", "  日本 😀\n", "", "a</s>b", " x"):
            assert ours.encode(text) == theirs.encode(text)
            ids = ours.encode(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert text_of(ours) == theirs.apply_chat_template(HI, tokenize=False)
        assert ours.apply_chat_template(HI) == theirs.encode(
            text_of(ours), add_special_tokens=False
        )
        for text in ("the quick fox", ["the quick fox", "日本"]):
            assert dict(ours(text)) == {
                key: value for key, value in theirs(text).items() if key != "token_type_ids"
            }
            assert ours(text).input_ids == theirs(text).input_ids


def test_the_turn_of_the_model_is_asked_for(tmp_path: Path) -> None:
    """Red when a script written for Hugging Face gets a generation prompt it did not ask for."""
    template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    tokenizer = Tokenizer.from_folder(
        folder(tmp_path, tokenizer_config={"chat_template": template})
    )
    assert text_of(tokenizer) == "hi"
    assert text_of(tokenizer, add_generation_prompt=True) == "hi>"


def test_chat_template_to_ids(tmp_path: Path) -> None:
    files = folder(tmp_path, with_bos(byte_level()), tokenizer_config=CONFIG)
    tokenizer = Tokenizer.from_folder(files)
    text = tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert text == "<s>user:hi</s>"
    ids = tokenizer.apply_chat_template(HI)
    assert ids.count(0) == 1  # the template's own beginning token, not a second one
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_template_file_wins_and_tools_have_their_own(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    files = folder(tmp_path, tokenizer_config={"chat_template": named})
    tokenizer = Tokenizer.from_folder(files)
    assert text_of(tokenizer) == "D"
    assert text_of(tokenizer, tools=[{"name": "f"}]) == "T"
    (files / "chat_template.jinja").write_text("F")
    assert text_of(Tokenizer.from_folder(files)) == "F"
    assert text_of(tokenizer.with_chat_template("W")) == "W"
    assert text_of(tokenizer, chat_template="C") == "C"
    assert text_of(tokenizer) == "D"


def test_no_template_and_bad_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path))
    with pytest.raises(BadRequest, match="no chat template"):
        tokenizer.apply_chat_template(HI)
    with pytest.raises(CheckpointError, match="does not compile"):
        tokenizer.with_chat_template("{% if %}")


def test_continue_final_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path, tokenizer_config=CONFIG))
    messages = [*HI, {"role": "assistant", "content": "well, "}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text == "<s>user:hi</s>assistant:well, "
    with pytest.raises(BadRequest, match="continue_final_message"):
        tokenizer.apply_chat_template([{"role": "a", "content": " "}], continue_final_message=True)


def test_what_is_not_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path))
    with pytest.raises(BadRequest, match="lone surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(BadRequest, match="lone surrogate"):
        tokenizer.encode_batch(["a", "\udfff"])
    with pytest.raises(BadRequest, match="got a int"):
        tokenizer.encode(3)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="cannot decode"):
        tokenizer.decode([-1])
    assert tokenizer.decode([4_000_000]) == ""


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"it has tokenizer.model: convert"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read"):
        Tokenizer.from_folder(tmp_path)
    folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="want an object"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        Tokenizer.from_folder(tmp_path)


def test_prefix_the_library_would_die_of(tmp_path: Path) -> None:
    files = folder(tmp_path)
    content = json.loads((files / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "x"
    (files / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="continuing_subword_prefix"):
        Tokenizer.from_folder(files)


def test_mutated_folders_load_or_are_refused(tmp_path: Path) -> None:
    files = folder(tmp_path, tokenizer_config=CONFIG, generation_config={"eos_token_id": [1, 2]})
    chance = random.Random(1)
    originals = {path: path.read_bytes() for path in files.glob("*.json")}
    for _ in range(150):
        path, data = chance.choice(list(originals.items()))
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            tokenizer = Tokenizer.from_folder(files)
            tokenizer.decode(tokenizer.encode("the 日本 fox"))
            tokenizer.apply_chat_template(HI)
        except (CheckpointError, BadRequest):
            pass
        path.write_bytes(data)
