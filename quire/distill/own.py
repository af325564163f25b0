"""Own answers: some lessons are what the pupil itself wrote, judged by the teacher (GKD).

A pupil that only ever reads the target's text never sees where its own mistakes lead. So in each
pass over the answers but the first, a share of them are the pupil's own to the same prompts, as it
stands at the beginning of that pass. They are kept on disk like the target's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.distill.answers import Answer, ask_again
from quire.distill.engines import let_go
from quire.distill.recipe import Corpus, Schedule

if TYPE_CHECKING:
    from quire.llm import LLM


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    answers: Sequence[Answer]  # the target's
    corpus: Corpus
    schedule: Schedule
    folder: Path
    make_llm: Callable[[Path], LLM]  # of the pupil as it is now, written to this folder
    device: torch.device
    _made: dict[int, dict[int, Answer]] = field(default_factory=dict)

    def in_pass(self, number: int) -> Mapping[int, Answer]:
        """By the number of the answer they stand for; none in the first pass."""
        if number == 0 or not self.schedule.own_share:
            return {}
        if number not in self._made:
            self._made.clear()
            self._made[number] = self._make(number)
        return self._made[number]

    def _make(self, number: int) -> dict[int, Answer]:
        count = round(self.schedule.own_share * len(self.answers))
        generator = torch.Generator().manual_seed(self.schedule.seed * 1_000_003 - number)
        chosen = torch.randperm(len(self.answers), generator=generator)[:count].tolist()
        corpus = replace(self.corpus, seed=self.corpus.seed + number * len(self.answers))
        beside = self.folder / "own-model"

        def make_llm() -> LLM:
            shutil.rmtree(beside, ignore_errors=True)
            return self.make_llm(beside)

        prompts = [self.answers[i].prompt for i in chosen]
        made = ask_again(self.folder / f"own-{number}.jsonl", corpus, prompts, make_llm)
        let_go(self.device)
        shutil.rmtree(beside, ignore_errors=True)
        return dict(zip(chosen, made, strict=True))
