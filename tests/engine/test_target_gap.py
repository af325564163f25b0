"""An engine with a target for the gap between tokens: it measures its steps before it serves."""

from __future__ import annotations

from pathlib import Path

from quire import LLM, SamplingParams
from tests.tiny_folder import write_tiny_folder


def test_an_engine_measures_itself_and_answers_the_same(tmp_path: Path) -> None:
    """Red when the measuring leaves something behind in rows or pages."""
    folder = str(write_tiny_folder(tmp_path))
    plain = LLM(folder, load_format="dummy", device="cpu")
    timed = LLM(
        folder, load_format="dummy", device="cpu", target_gap_ms=5.0, max_num_batched_tokens=64
    )
    prompts = [{"prompt_token_ids": list(range(1, 1 + n))} for n in (3, 90, 17)]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    first, second = (
        [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        for llm in (plain, timed)
    )
    assert first == second
    (decision,) = [d for d in timed.decisions if d.what == "target gap"]
    assert decision.value == "5 ms" and "prompt tokens beside one" in decision.why
