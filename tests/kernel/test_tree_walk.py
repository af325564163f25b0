"""tree_walk against the walk of the host: which drafts were right, and what moves where."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quire.request import RequestId
from quire.runner.rows import RequestRows
from quire.runner.tree_walk import Walked, chain_of, depth_of, stage_walks, walk
from quire.runner.upload import IntArray, Uploader
from quire.spec.tree import Parents, is_chain, paths_of
from quire.spec.verify import verified_path
from quire.step import Work

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE_SIZE, NUM_GROUPS, MAX_LEN = 4, 2, 96
FEW = 3  # token ids: many drafts are right


class Walks(NamedTuple):
    works: list[Work]
    drawn: Tensor  # [samples] int64
    drafts: Tensor  # [samples] int32, in the places behind them
    rows: RequestRows
    before: Tensor  # [rows, places] the rows' tokens
    made: Walked


def tree_of(rng: Random, most: int) -> Parents:
    made = tuple(rng.choice((node, rng.randint(0, node))) for node in range(rng.randint(1, most)))
    return () if is_chain(made) else made


def works_of(rng: Random, count: int, most: int) -> list[Work]:
    """Trees, chains, chunks of prompts that draw or do not, in rows of any order."""
    works = []
    for at, row in enumerate(rng.sample(range(9), count)):
        parents, start = tree_of(rng, most), rng.randint(0, 60)
        kind = "tree" if at == 0 else rng.choice(("tree", "tree", "chain", "chunk", "silent"))
        if kind == "tree":
            parents = parents or (0, 0)
            drafts = tuple(rng.randrange(FEW) for _ in parents)
            works.append(
                Work(
                    RequestId(at), row, start, 1 + len(parents), True, len(parents), drafts, parents
                )
            )
        elif kind == "chain":
            num = rng.randint(0, 3)
            drafts = tuple(rng.randrange(FEW) for _ in range(num))
            works.append(Work(RequestId(at), row, start, 1 + num, True, num, drafts))
        else:
            works.append(Work(RequestId(at), row, start, rng.randint(1, 6), kind == "chunk"))
    return works


def walked(seed: int, count: int, most: int = 7) -> Walks:
    rng, torch_rng = Random(seed), torch.Generator().manual_seed(seed)
    works = works_of(rng, count, most)
    rows = RequestRows(9, MAX_LEN, MAX_LEN // PAGE_SIZE + 1, DEVICE, NUM_GROUPS)
    for table in (rows.tokens, rows.page_tables):  # pages beyond what 32 bits of slots count
        table.copy_(torch.randint(0, 2**31 - 1, table.shape, generator=torch_rng))
    num_samples = sum(1 + work.num_drafts for work in works if work.sample)
    drafts = torch.full((num_samples,), -1, dtype=torch.int32)
    first = 0
    for work in works:
        if work.sample:
            drafts[first : first + work.num_drafts] = torch.tensor(work.drafts, dtype=torch.int32)
            first += 1 + work.num_drafts
    drawn = torch.randint(0, FEW, (num_samples,), generator=torch_rng)
    arrays: dict[str, IntArray] = {}
    stage_walks(works, arrays)
    sent = Uploader(DEVICE).send(arrays)
    before = rows.tokens.cpu().clone()
    made = walk(works, sent, drawn.to(DEVICE), drafts.to(DEVICE), rows, PAGE_SIZE)
    return Walks(works, drawn, drafts, rows, before, Walked(*(part.cpu() for part in made)))


def slots(walks: Walks, row: int, places: list[int]) -> list[list[int]]:
    """By group."""
    tables = walks.rows.page_tables[:, row].tolist()
    return [[t[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in places] for t in tables]


@pytest.mark.parametrize("seed", range(12))
def test_same_as_on_the_host(seed: int) -> None:
    """Red when a walk leaves the right drafts, takes a later sibling, ends a draft early or late,
    reads a neighbour's tree, or writes a row that it does not walk."""
    walks = walked(seed, count=1 + seed % 7)
    works, made, want = walks.works, walks.made, walks.before.clone()
    token = sample = token_at = sample_at = move_at = 0
    for work in works:
        num = 1 + work.num_drafts if work.sample else 0
        chain, nodes = chain_of(work), list(range(work.num_tokens))
        kept = 1 + chain.num_drafts if work.sample else 0
        samples = list(range(kept))
        if work.parents:
            depth = depth_of(work)
            assert depth == max(map(len, paths_of(work.parents))) and kept == 1 + depth
            drawn = walks.drawn[sample : sample + num].tolist()
            right = verified_path(drawn, work.drafts, work.parents)
            nodes = samples = right + [right[-1]] * (depth + 1 - len(right))
            at = slice(work.start + 1, work.start + 1 + len(right))
            want[work.row, at] = torch.tensor([drawn[node] for node in right]).int()
            lies = [node if d < len(right) else d for d, node in enumerate(nodes)][1:]
            moves = slice(move_at, move_at + depth)
            places = [[work.start + n for n in ns] for ns in (lies, range(1, 1 + depth))]
            assert made.sources[:, moves].tolist() == slots(walks, work.row, places[0])
            assert made.targets[:, moves].tolist() == slots(walks, work.row, places[1])
            move_at += depth
        own = made.tokens[token_at : token_at + len(nodes)].tolist()
        assert own == [token + node for node in nodes], work
        own = made.samples[sample_at : sample_at + kept].tolist()
        assert own == [sample + node for node in samples], work
        token, token_at = token + work.num_tokens, token_at + len(nodes)
        sample, sample_at = sample + num, sample_at + kept
    assert (len(made.tokens), len(made.samples)) == (token_at, sample_at)
    assert made.sources.shape == made.targets.shape == (NUM_GROUPS, move_at)
    assert torch.equal(walks.rows.tokens.cpu(), want)


def test_no_slot_is_moved_to_twice() -> None:
    """Red when what a draft leaves depends on which of two moves comes last."""
    for seed in range(10):
        targets = walked(seed, count=6).made.targets
        assert all(len(set(own)) == len(own) for own in targets.tolist())


def test_the_largest_tree() -> None:
    """Red when a node beyond those of a warp is nobody's."""
    work = Work(RequestId(0), 3, 5, 65, True, 64, (1,) * 63 + (2,), (0,) * 64)
    rows = RequestRows(9, MAX_LEN, MAX_LEN // PAGE_SIZE + 1, DEVICE, 1)
    arrays: dict[str, IntArray] = {}
    stage_walks([work], arrays)
    drawn = torch.tensor([2] + [0] * 63 + [7])
    drafts = torch.tensor([*work.drafts, -1], dtype=torch.int32)
    sent = Uploader(DEVICE).send(arrays)
    made = walk([work], sent, drawn.to(DEVICE), drafts.to(DEVICE), rows, PAGE_SIZE)
    assert made.tokens.tolist() == made.samples.tolist() == [0, 64]
    assert rows.tokens[3, 6:8].tolist() == [2, 7]
