"""What a watcher sees of drafts: totals, shares by place, and each request's last step."""

from __future__ import annotations

from pathlib import Path

from quire.engine.snapshot import Snapshots
from tests.spec.cases import TEXTS, answer, open_tiny, sampling


def test_answers_tell_where_drafts_were_right(tmp_path: Path) -> None:
    """Red when places are counted from another draft, or nobody is charged for the guessing."""
    open_tiny(tmp_path, "llama")
    model = {"method": "draft_model", "model": str(tmp_path / "llama")}
    config = {**model, "num_speculative_tokens": 3, "adaptive": False}
    llm = open_tiny(tmp_path, "llama", speculative_config=config)
    asked = sampling("warm", 1, max_tokens=13, ignore_eos=True, n=2)
    (output,) = llm.generate(TEXTS[0], asked, use_tqdm=False)
    assert output.metrics is not None
    by_position = output.metrics.accepted_by_position
    assert by_position == (6, 6, 6)  # of each answer the last 12 tokens take three steps
    assert sum(by_position) == output.metrics.num_accepted_tokens
    assert 0 < output.metrics.draft_seconds <= llm._engine.core.drafts.counts.seconds


def test_pictures_tell_guesses_as_they_come(tmp_path: Path) -> None:
    """Red when a picture's guesses are not those of the step, or refused ones count as fed."""
    config = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    llm = open_tiny(tmp_path, "llama", speculative_config=config)
    core = llm._engine.core
    snapshots, step = Snapshots(core), core.step
    seen: list[dict[str, int]] = []

    def watched() -> object:
        before = {id: r.num_computed for id, r in core.scheduler.running.items()}
        events = step()
        snapshots.observe(core.last_plan, 0.001)
        picture = snapshots.take()
        for lane in picture["lanes"]:
            if lane["fed"] and lane["id"] in before:
                assert lane["computed"] - before[lane["id"]] == lane["fed"]
                assert lane["kind"] == "decode" or not lane["drafted"]
        seen.extend(picture["lanes"])
        return events

    core.step = watched  # type: ignore[method-assign, assignment]
    asked = [(text, sampling("warm", i, ignore_eos=True)) for i, text in enumerate(TEXTS)]
    answer(llm, asked)
    core.step = step  # type: ignore[method-assign]
    spec, stats = snapshots.take()["spec"], llm.stats()
    assert spec["proposer"] == "ngram"
    assert spec["drafted"] == stats.num_drafted_tokens > 20
    assert spec["accepted"] == stats.num_accepted_tokens
    assert spec["seconds"] > 0
    assert 0.0 <= min(spec["by_position"]) <= max(spec["by_position"]) <= 1.0
    # Of a request's last step nothing is seen: it is gone by then.
    assert 0 < sum(lane["drafted"] for lane in seen) <= stats.num_drafted_tokens
    assert sum(lane["accepted"] for lane in seen) <= stats.num_accepted_tokens
    assert Snapshots(open_tiny(tmp_path, "llama")._engine.core).take()["spec"] is None
