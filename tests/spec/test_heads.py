"""Heads against their published layouts: the logits of every guess, in fp32.

Turns red when a head reads the state, the token or the pages of another position, when states are
kept of drafts that were wrong, or when a layout is read differently from how it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.llm import LLM
from quire.lora.request import LoRARequest
from quire.models.tiny import tiny_model
from quire.params import SamplingParams
from quire.request import RequestId
from quire.sched.scheduler import Scheduler
from quire.step import Draft, StepPlan, TokenEvent, Took, Work
from tests.lora.cases import write_adapter
from tests.spec import heads
from tests.spec.cases import TEXTS, open_tiny
from tests.spec.head_oracles import (
    chain,
    eagle3_guess,
    medusa_logits,
    mtp_guess,
    streams_of,
    target_of,
)

DEPTH = 3
# Latents whose steps are recorded ones.
RECORDED = {
    "hidden_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
}
LONG = TEXTS[0] * 3  # longer than what a head leaves unread


@dataclass
class Watched:
    """Every guess of an engine: the row's tokens, where they began, and the logits."""

    seen: list[tuple[list[int], int, list[Tensor]]] = field(default_factory=list)
    is_taped: bool = False  # whether guesses are one native call each

    @staticmethod
    def of(llm: LLM) -> Watched:
        made, runner = Watched(), llm._engine.runner
        drafter: Any = runner.drafter
        made.is_taped = getattr(drafter, "_tape", None) is not None
        fill, draw = drafter.fill, drafter._draws.draw
        drawn: dict[int, list[Tensor]] = {}

        def watch_draw(works: Sequence[Work], positions: Sequence[int], logits: Tensor) -> None:
            for work, row in zip(works, logits.clone(), strict=True):
                drawn.setdefault(work.row, []).append(row)
            draw(works, positions, logits)

        def watch_fill(works: Sequence[Work]) -> None:
            drawn.clear()
            fill(works)
            for work in works:
                tokens = runner.rows.tokens[work.row, : work.start + work.num_drafts + 1].tolist()
                made.seen.append((tokens, work.start, drawn[work.row]))

        drafter.fill, drafter._draws.draw = watch_fill, watch_draw
        return made


def watched(folder: Path, family: str, config: dict[str, Any], **changes: Any) -> Watched:
    """Guesses for a few greedy requests, with chunks, a prefix hit and refused drafts."""
    asked = {"adaptive": False, "num_speculative_tokens": DEPTH, **config}
    llm = open_tiny(folder, family, speculative_config=asked, max_num_batched_tokens=48, **changes)
    assert (llm._engine.runner.tapes is None) == bool(changes.get("enforce_eager"))
    made = Watched.of(llm)
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    llm.generate([LONG, TEXTS[1]], params, use_tqdm=False)
    llm.generate([LONG + " and on"], params, use_tqdm=False)
    assert len(made.seen) > 8
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    open_tiny(made, "llama")
    tiny_model("deepseek_v3", made / "deepseek_v3", seed=3, **RECORDED)
    heads.add_mtp(made / "deepseek_v3")
    heads.eagle3(made / "eagle3", 64)
    heads.medusa(made / "medusa", 64)
    return made


@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True}], ids=["tape", "eager"])
@torch.inference_mode()
def test_eagle3_guesses_as_published(folder: Path, changes: dict[str, Any]) -> None:
    config = {"method": "eagle3", "model": str(folder / "eagle3")}
    target = target_of(folder / "llama")
    features, guess = eagle3_guess(folder / "eagle3", target)
    made = watched(folder, "llama", config, **changes)
    assert made.is_taped != bool(changes)
    for tokens, start, logits in made.seen:
        known = features(streams_of(target, tokens[:start]))
        want = chain(known, tokens, start, len(logits), guess)
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


@dataclass
class Seldom:
    """Drafts once in so many tokens."""

    every: int = 37

    def make(self, scheduler: Scheduler) -> dict[RequestId, Draft]:
        running = scheduler.running.values()
        decoding = [request for request in running if request.num_to_feed == 1]
        return {r.id: Draft(DEPTH) for r in decoding if r.num_output % self.every == 0}

    def awaits_results(self, scheduler: Scheduler) -> bool:
        return True

    def marked(self, plan: StepPlan) -> StepPlan:
        return plan

    def learn(self, plan: StepPlan, events: Sequence[TokenEvent], took: Took) -> None:
        """Nothing is learned."""


@torch.inference_mode()
def test_states_wait_until_drafts_are_asked_for(folder: Path) -> None:
    """Red when positions are read twice, or never, while a request goes on without drafts."""
    config = {"method": "eagle3", "model": str(folder / "eagle3"), "adaptive": False}
    llm = open_tiny(folder, "llama", speculative_config=config)
    made = Watched.of(llm)
    llm._engine.core.drafts = Seldom()
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    llm.generate([TEXTS[1], TEXTS[2]], params, use_tqdm=False)
    assert len(made.seen) == 4
    target = target_of(folder / "llama")
    features, guess = eagle3_guess(folder / "eagle3", target)
    for tokens, start, logits in made.seen:
        known = features(streams_of(target, tokens[:start]))
        want = chain(known, tokens, start, len(logits), guess)
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


FLAGS = [
    {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    {"norm_before_fc": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
@torch.inference_mode()
def test_the_other_layout_of_eagle3(folder: Path, flags: dict[str, bool], tmp_path: Path) -> None:
    """Also leaves out what nobody reads of the last layer: no stream is read behind it."""
    head = heads.speculators_eagle3(tmp_path / "head", 64, **flags)
    target = target_of(folder / "llama")
    features, guess = eagle3_guess(head, target)
    for tokens, start, logits in watched(
        folder, "llama", {"method": "eagle3", "model": str(head)}
    ).seen:
        known = features(streams_of(target, tokens[:start]))
        want = chain(known, tokens, start, len(logits), guess)
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_medusa_guesses_as_published(folder: Path) -> None:
    config = {"method": "medusa", "model": str(folder / "medusa")}
    target = target_of(folder / "llama")
    for tokens, start, logits in watched(folder, "llama", config).seen:
        hidden = streams_of(target, tokens[:start])[-1][-1]
        want = [medusa_logits(folder / "medusa", hidden, head) for head in range(len(logits))]
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True}], ids=["tape", "eager"])
@torch.inference_mode()
def test_mtp_guesses_as_published(folder: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    target = target_of(folder / "deepseek_v3")
    guess = mtp_guess(folder / "deepseek_v3", tmp_path / "deeper", target)
    for tokens, start, logits in watched(folder, "deepseek_v3", {"method": "mtp"}, **changes).seen:
        hidden = streams_of(target, tokens[:start])[-1]
        want = chain(hidden, tokens, start, len(logits), guess)
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_adapters_beside_heads(folder: Path, method: str, tmp_path: Path) -> None:
    """Red when a step with adapters hands over states of another recording, or none."""
    adapter = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", target_of(folder / "llama"))))
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)
    config = {"method": method, "model": str(folder / method), "adaptive": False}
    answers = []
    for asked in (None, config):
        llm = open_tiny(folder, "llama", enable_lora=True, speculative_config=asked)
        texts, adapters = [LONG, *TEXTS], [None, adapter, None, adapter, adapter]
        found = llm.generate(texts, params, lora_request=adapters, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in found])
    assert answers[0] == answers[1]
    assert llm.stats().num_drafted_tokens > 100


def test_who_takes_no_drafts_pays_nothing(folder: Path) -> None:
    """Red when states are kept, or prompts computed to the end, for requests without drafts."""
    llm = open_tiny(folder, "deepseek_v3", speculative_config={"method": "mtp"})
    runner = llm._engine.runner
    drafter: Any = runner.drafter
    kept: list[object] = []
    drafter.keep = lambda *step: kept.append(step)
    tails: list[bool] = []
    assert runner.tapes is not None
    run = runner.tapes.run
    runner.tapes.run = lambda *step, **more: (tails.append(step[2]), run(*step, **more))[1]  # type: ignore[method-assign]
    for most in (0, None):
        params = SamplingParams(temperature=0.0, max_tokens=2, num_speculative_tokens=most)
        llm.generate([f"{most}{LONG}"], params, use_tqdm=False)
    assert tails == [True, True, False] + 3 * [False]  # two chunks, and one token more, twice
    assert len(kept) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_vocab_size": 97}, "lm_head.weight has shape"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"target_hidden_size": 48}, "states of 48"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7]}}, r"\(0, 7\) of 2"),
    ],
)
def test_heads_of_other_models_are_refused(
    folder: Path, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Red when a head that cannot fit is run, or the message does not say why."""
    tensors = heads.eagle3_tensors(64, 3, 96)
    head = heads.write(tmp_path / "h", heads.eagle3_config(64, (0, 1, 2), 96) | change, tensors)
    config = {"method": "eagle3", "model": str(head)}
    with pytest.raises((CheckpointError, NotSupported), match=message):
        open_tiny(folder, "llama", speculative_config=config)
    with pytest.raises(CheckpointError, match="no Medusa heads"):
        open_tiny(folder, "llama", speculative_config={**config, "method": "medusa"})
    with pytest.raises(NotSupported, match="no layer for multi-token"):
        open_tiny(folder, "llama", speculative_config={"method": "mtp"})


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_heads_are_no_models(folder: Path, method: str) -> None:
    """Red when a script that leaves out the method is told of an unknown architecture."""
    with pytest.raises(NotSupported, match=f"say method '{method}'"):
        open_tiny(folder, "llama", speculative_config={"model": str(folder / method)})


def test_no_more_drafts_than_heads(folder: Path) -> None:
    """Red when places that no head fills are fed as guesses."""
    config = {"method": "medusa", "model": str(folder / "medusa"), "num_speculative_tokens": 4}
    with pytest.raises(NotSupported, match="3 heads; use 3 or less"):
        open_tiny(folder, "llama", speculative_config=config)
    del config["num_speculative_tokens"]
    llm = open_tiny(folder, "llama", speculative_config=config)
    drafts: Any = llm._engine.core.drafts
    assert drafts.limits.depth == 3
