"""Lessons: answers as padded batches, with what the teacher thinks of every position.

Which answers a step reads follows from its number and the seed, so a run that goes on reads what it
would have read. The last answers are held out: pupils are judged by them and never see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.distill.answers import Answer
from quire.distill.own import OwnAnswers
from quire.distill.teacher import States, Teacher, padded

HELD_OUT = 24  # answers at most, or a tenth of all


@dataclass(frozen=True, slots=True)
class Lesson:
    ids: Tensor  # [seqs, length] int64, padded behind
    counts: Tensor  # [seqs, length] bool: the token after this one was written by the target
    rows: Tensor  # [rows] where that is so, in the flattened batch: found without a wait for a GPU
    states: States  # the teacher's, [seqs, length, ...]
    logits: Callable[[Tensor], Tensor]  # the teacher's, of rows of its final states


@dataclass(frozen=True, slots=True)
class Lessons:
    answers: Sequence[Answer]
    own: OwnAnswers
    teacher: Teacher
    batch: int
    seed: int
    _orders: dict[int, list[int]] = field(default_factory=dict)  # by pass

    @property
    def num_held_out(self) -> int:
        return max(1, min(HELD_OUT, len(self.answers) // 10))

    def of_step(self, micro_step: int) -> Lesson:
        """All answers once in an order of the seed, then in another."""
        return self._lesson(self._chosen(micro_step))

    def num_tokens(self, micro_step: int) -> int:
        """That a lesson is about: they count alike, however many of them its batch has."""
        return sum(len(answer.answer) for answer in self._chosen(micro_step).values())

    def _chosen(self, micro_step: int) -> dict[str, Answer]:
        """By the names that the teacher keeps them under."""
        num_read = len(self.answers) - self.num_held_out
        first = micro_step * self.batch
        chosen = {}
        for at in range(first, first + self.batch):
            number_of_pass, place = divmod(at, num_read)
            number = self._order(number_of_pass, num_read)[place]
            own = self.own.in_pass(number_of_pass).get(number)
            name = f"{number:06}" if own is None else f"own-{number_of_pass}-{number:06}"
            chosen[name] = own or self.answers[number]
        return chosen

    def held_out(self) -> list[Lesson]:
        numbers = range(len(self.answers) - self.num_held_out, len(self.answers))
        return [
            self._lesson({f"{n:06}": self.answers[n] for n in numbers[i : i + self.batch]})
            for i in range(0, len(numbers), self.batch)
        ]

    def _order(self, epoch: int, count: int) -> list[int]:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # a batch lies in two passes at most
                self._orders.clear()
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._orders[epoch] = torch.randperm(count, generator=generator).tolist()
        return self._orders[epoch]

    def _lesson(self, named: Mapping[str, Answer]) -> Lesson:
        chosen, target = list(named.values()), self.teacher.target
        ids = padded([torch.tensor(answer.ids) for answer in chosen], torch.int64)
        counts = torch.zeros(ids.shape, dtype=torch.bool)
        for row, answer in zip(counts, chosen, strict=True):
            row[len(answer.prompt) - 1 : len(answer.ids) - 1] = True
        states = self.teacher.read({name: answer.ids for name, answer in named.items()})
        rows = counts.flatten().nonzero().flatten()
        ids, counts, rows = (tensor.to(target.device) for tensor in (ids, counts, rows))
        return Lesson(ids, counts, rows, states, target.logits)
