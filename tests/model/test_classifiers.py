"""Classification heads against transformers: the same numbers, however the prompt was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.errors import CheckpointError, NotSupported
from quire.llm import LLM
from quire.models.registry import spec_of
from quire.models.sequence_head import Verdict, labels_of
from quire.models.tiny import tiny_model
from quire.models.tiny_configs import labels, tiny_config
from quire.params import SamplingParams

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Mixtral", "Gemma2", "Gemma3Text", "GPT2"]
TEXTS = [
    "x",
    "the quick brown fox jumps over the lazy dog",
    "naïve café, voilà",
    "the quick brown fox jumps over the lazy dog, and returns",
]


def folder_of(family: str, folder: Path, **changes: Any) -> Path:
    return tiny_model(f"{family}ForSequenceClassification", folder, seed=2, **changes)


def llm_of(folder: Path, **changes: Any) -> LLM:
    words = {"device": "cpu", "dtype": "float32", "page_size": 4, "kv_cache_memory": 1 << 22}
    return LLM(str(folder), **{**words, **changes})


def expected(folder: Path, ids: list[int]) -> list[float]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return list(model(torch.tensor([ids])).logits[0].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(family: str, tmp_path: Path) -> None:
    """Red when the head reads another token, or a chunk or a cached prefix changes what it sees."""
    folder = folder_of(family, tmp_path)
    llm = llm_of(folder, max_num_batched_tokens=16, max_num_seqs=3)
    for _ in range(2):  # the second time the prefix cache holds every prompt
        for output in llm.reward(TEXTS, use_tqdm=False):
            want = expected(folder, output.prompt_token_ids)
            assert output.outputs.data == pytest.approx(want, abs=1e-4)
    assert llm.stats().prefix_hit_tokens > 0


def test_classes_are_named_and_sum_to_one(tmp_path: Path) -> None:
    names = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    folder = folder_of("Qwen3", tmp_path, **names)
    llm = llm_of(folder)
    for output in llm.classify(TEXTS, use_tqdm=False):
        want = torch.tensor(expected(folder, output.prompt_token_ids)).softmax(-1)
        assert output.outputs.probs == pytest.approx(want.tolist(), abs=1e-4)
        assert output.outputs.label == ("bad", "good")[int(want.argmax())]
        assert output.outputs.num_classes == 2


def test_pairs_through_a_head(tmp_path: Path) -> None:
    """Red when the two texts are not one prompt, in that order."""
    folder = folder_of("Llama", tmp_path, **labels(1))
    llm = llm_of(folder)
    for text, output in zip(TEXTS, llm.score("the", TEXTS, use_tqdm=False), strict=True):
        ids = llm.get_tokenizer().encode("the") + llm.get_tokenizer().encode(text)
        assert output.prompt_token_ids == ids
        want = torch.tensor(expected(folder, ids)).sigmoid().item()
        assert output.outputs.score == pytest.approx(want, abs=1e-5)


def test_pairs_through_embeddings(tmp_path: Path) -> None:
    """A plain language model: the cosine between the two."""
    llm = llm_of(tiny_model("qwen3", tmp_path))
    vectors = [torch.tensor(o.outputs.embedding) for o in llm.embed(TEXTS, use_tqdm=False)]
    scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    for vector, output in zip(vectors[1:], scores, strict=True):
        want = torch.cosine_similarity(vectors[0], vector, dim=0).item()
        assert output.outputs.score == pytest.approx(want, abs=1e-5)
    (same,) = llm.score(TEXTS[1], TEXTS[1], pooling="last", use_tqdm=False)
    assert same.outputs.score == pytest.approx(1.0)


def test_who_can_do_what(tmp_path: Path) -> None:
    """Red when a model is asked for what it has not, and the engine finds out."""
    judge = llm_of(folder_of("Llama", tmp_path / "judge"))
    with pytest.raises(NotSupported, match="classifies and cannot generate"):
        judge.generate("a", use_tqdm=False)
    with pytest.raises(NotSupported, match="need a head of one label, this one has 3"):
        judge.score("a", "b", use_tqdm=False)
    assert len(judge.embed("a", use_tqdm=False)[0].outputs.embedding) == 32
    writer = llm_of(tiny_model("llama", tmp_path / "writer"))
    for ask in (writer.classify, writer.reward):
        with pytest.raises(NotSupported, match="needs a model with a classification head"):
            ask("a", use_tqdm=False)
    with pytest.raises(NotSupported, match="needs a model with a classification head"):
        writer.generate("a", SamplingParams(pooling="classify"), use_tqdm=False)


def test_labels_of_configs() -> None:
    config = tiny_config("LlamaForSequenceClassification")
    assert spec_of(config).num_labels == 3
    del config["id2label"]
    assert spec_of(config).num_labels == 2, "as in transformers"
    assert spec_of({**config, "num_labels": 5}).num_labels == 5
    assert labels_of({"id2label": {"1": "b", "0": "a"}}) == ("a", "b")
    for bad in ({"id2label": {"0": "a", "2": "b"}}, {"id2label": []}, {"num_labels": 0}):
        with pytest.raises(CheckpointError, match=r"config\.json: got"):
            labels_of(bad)


@pytest.mark.parametrize(
    "task, count, activation",
    [
        (None, 1, "sigmoid"),
        (None, 2, "softmax"),
        ("regression", 1, "none"),
        ("single_label_classification", 1, "softmax"),
        ("multi_label_classification", 3, "sigmoid"),
    ],
)
def test_what_numbers_mean(task: str | None, count: int, activation: str) -> None:
    config = {**tiny_config("Qwen2ForSequenceClassification"), **labels(count)}
    verdict = Verdict.of({**config, "problem_type": task})
    assert verdict is not None and verdict.activation == activation
    scores = torch.linspace(-800, 900, count).double()
    want = {"sigmoid": scores.sigmoid(), "softmax": scores.softmax(-1), "none": scores}[activation]
    assert verdict.probabilities(scores.tolist()) == pytest.approx(want.tolist())
    assert Verdict.of(tiny_config("qwen2")) is None


@pytest.mark.parametrize(
    "said",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_rerankers_name_their_activation(said: dict[str, Any]) -> None:
    """Red when a reranker trained on plain numbers has them squashed."""
    config = {**tiny_config("Qwen3ForSequenceClassification"), **labels(1)}
    verdict = Verdict.of({**config, **said})
    assert verdict is not None and verdict.probabilities([3.0]) == [3.0]
