"""A trained drafter drafts in the engine what it learned: the same tokens, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.distill.loop import Job, distil
from quire.distill.recipe import Corpus, Recipe, Schedule, Shape
from quire.errors import CheckpointError, NotSupported
from quire.models.tiny import tiny_model
from tests.distill.case import CPU, silent

ENGINE = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory": 1 << 23}
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
PROMPTS = ["hello", "how are you", "tell me more"]
SHAPES = {
    "draft_model": Shape("draft_model", layers=1),
    "early_exit": Shape("early_exit", layers=1),
    "medusa": Shape("medusa", vocab=120, depth=2),
    "eagle3": Shape("eagle3", vocab=120, depth=3),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("distill") / "target", **WIDTHS)


def answers(model: Path, config: dict[str, object] | None) -> tuple[list[list[int]], float]:
    """Of the prompts, and the share of drafts that were right."""
    llm = LLM(str(model), speculative_config=config, **ENGINE)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    outputs = llm.chat(chats, params, use_tqdm=False)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    drafted = sum(m.num_drafted_tokens for m in metrics)
    accepted = sum(m.num_accepted_tokens for m in metrics)
    return [output.outputs[0].token_ids for output in outputs], accepted / max(1, drafted)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_was_learned_by_heart_is_drafted(kind: str, model: Path, tmp_path: Path) -> None:
    """Red when the engine reads, wires or positions a drafter other than it was trained, or its
    drafts change what is drawn."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    corpus = Corpus(6, 24, (0.0,), str(prompts))
    schedule = Schedule(steps=150, batch=3, learning_rate=1e-2, warmup=5, save_every=150)
    recipe = Recipe(str(model), SHAPES[kind], corpus, schedule)
    report = distil(Job(recipe, tmp_path / "out", CPU, 1), silent)
    depth = 2
    config = {"method": kind, "model": str(tmp_path / "out"), "adaptive": False}
    plain, _ = answers(model, None)
    drafted, share = answers(model, {**config, "num_speculative_tokens": depth})
    assert drafted == plain
    held_out = report["after"]
    learned = (held_out["accepted_1"] + held_out["accepted_2"]) / depth
    assert learned > 0.6 and share > 0.6 * learned, (learned, share)


def test_exits_that_do_not_fit(model: Path, tmp_path: Path) -> None:
    """Red when an exit of another model or another layer is taken in silence."""
    recipe = Recipe(str(model), SHAPES["early_exit"], Corpus(2, 8), Schedule(steps=1, batch=1))
    distil(Job(recipe, tmp_path / "out", CPU, 1), silent)
    config = {"method": "early_exit", "model": str(tmp_path / "out")}
    with pytest.raises(NotSupported, match="trained after layer 1; leave it out"):
        LLM(str(model), speculative_config={**config, "exit_layer": 2}, **ENGINE)
    other = tiny_model("llama", tmp_path / "other")
    with pytest.raises(CheckpointError, match="is for another model"):
        LLM(str(other), speculative_config=config, **ENGINE)
    with pytest.raises(CheckpointError, match="quire distill --kind early_exit"):
        LLM(str(model), speculative_config={**config, "model": str(other)}, **ENGINE)
