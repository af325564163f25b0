"""Trees of drafts: attention over a tree is causal attention on every path, bit for bit.

Turns red when a draft reads a sibling's slot, when its keys are summed in another order than a
chain's, when company changes its bits, or when a draft that moved to its rightful slot is not what
a chain would have left there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.attn.backend import HeadTransform
from quire.attn.cpu import CpuAttention
from quire.attn.latent_cpu import LatentCpu
from quire.attn.latent_native import LatentNative
from quire.attn.latent_reference import LatentReference
from quire.attn.latent_triton import LatentTriton
from quire.attn.native import NativeAttention
from quire.attn.reference import ReferenceAttention
from quire.attn.triton import TritonAttention
from quire.forward import Batch
from quire.kernels.paged_tile import Launch, PagedConfig
from quire.request import RequestId
from quire.runner.trees import Sequences, StepTrees
from quire.spec.tree import Parents, paths_of
from quire.step import Work
from tests.coded_case import coded_cache
from tests.latent_case import LatentCase, make_latent_case
from tests.paged_case import PagedCase, make_case

TILES = PagedConfig(16, 32, Launch(16, 4, 1), Launch(32, 4, 1))
BACKENDS: dict[str, Callable[[], Any]] = {
    "reference": ReferenceAttention,
    "cpu": CpuAttention,
    "native": NativeAttention,
    "native fp16": lambda: NativeAttention(torch.float16),
    "latent reference": LatentReference,
    "latent cpu": LatentCpu,
    "latent native": LatentNative,
    "triton": lambda: TritonAttention(torch.float32, TILES),
    "triton, merged": lambda: TritonAttention(torch.float32, replace(TILES, folds=False)),
    "triton, growing": lambda: TritonAttention(torch.float32, replace(TILES, octave=1)),
    "latent triton": lambda: LatentTriton(torch.float32, replace(TILES, octave=0)),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"heads": (6, 2)},
    "window": {"window": 9, "heads": (4, 4)},
    "cap and sinks": {"softcap": 2.0, "has_sinks": True},
    "pages of 4": {"page_size": 4, "window": 140},
    "int8": {"form": "int8"},
    "fp8": {"form": "fp8", "page_size": 4},
    "int4": {"form": "int4", "window": 30},
}


@dataclass(frozen=True, slots=True)
class TreeCase(PagedCase):
    """The last tokens of some sequences are trees; their tokens lie by place."""

    trees: dict[int, Parents] = field(default_factory=dict)
    by_node: bool = False

    def batch(
        self, query_lens: Sequence[int], context_lens: Sequence[int], seqs: Sequence[int]
    ) -> Batch:
        made = PagedCase.batch(self, query_lens, context_lens, seqs)
        if sum(query_lens) == sum(context_lens):
            return made  # everything in front of the trees
        works = [
            Work(RequestId(s), s, n - q, q, True, parents=self.trees.get(s, ()))
            for s, q, n in zip(seqs, query_lens, context_lens, strict=True)
        ]
        trees = StepTrees.of(works)
        assert trees is not None
        positions = made.positions - torch.from_numpy(trees.shifts)
        made = replace(made, positions=positions, paths=torch.from_numpy(trees.paths))
        return self._apart(made, trees) if self.by_node else made

    def _apart(self, batch: Batch, trees: StepTrees) -> Batch:
        whole = (batch.rows.numpy(), batch.host_query_lens, batch.host_context_lens)
        rows, query_lens, context_lens = trees.apart(Sequences(*whole))
        ends = np.cumsum(query_lens, dtype=np.int32)
        return replace(
            batch,
            rows=torch.from_numpy(rows),
            query_starts=torch.from_numpy(np.concatenate(([np.int32(0)], ends))),
            context_lens=torch.from_numpy(context_lens),
            host_query_lens=query_lens,
            host_context_lens=context_lens,
        )


def random_tree(rng: random.Random, num: int) -> Parents:
    return tuple(rng.choice((node, rng.randint(0, node))) for node in range(num))


def angles(dim: int) -> HeadTransform:
    turns = torch.outer(torch.arange(400.0), 100.0 ** -torch.linspace(0, 1, dim // 2))
    return HeadTransform(turns.cos(), turns.sin(), None, None, 1e-6)


class Fed:
    """A backend and a case of either kind, and the few things that differ between the kinds."""

    def __init__(self, name: str, kind: str, lens: Sequence[int]) -> None:
        self.backend, self.kind = BACKENDS[name](), dict(KINDS[kind])
        self.form = self.kind.pop("form", None)
        if "latent" in name:
            size = self.kind.get("page_size", 16)
            self.case: Any = make_latent_case(lens, page_size=size)
            self.paged: PagedCase = self.case.paged
            self.more: dict[str, Any] = {}
        else:
            self.case = self.paged = make_case(lens, **self.kind)
            self.more = {"transform": angles(32)}

    def cache(self) -> Any:
        if self.form is not None:
            return coded_cache(self.paged, self.form)
        made = self.case.cache(self.backend)
        if self.backend.cache_dtype == torch.float16:
            return made._replace(keys=made.keys.half(), values=made.values.half())
        return made

    def with_trees(self, trees: dict[int, Parents]) -> Any:
        p = self.paged
        made = TreeCase(p.spec, p.page_table, p.rows, p.num_pages, p.qkv, p.sinks, trees)
        made = replace(made, by_node=self.backend.caps.by_node)
        return replace(self.case, paged=made) if isinstance(self.case, LatentCase) else made

    def picked(self, seq: int, tokens: list[int]) -> Any:
        """The same with these tokens of a sequence alone."""
        if isinstance(self.case, LatentCase):
            kept = type(self.case.tokens[seq])(*(x[tokens] for x in self.case.tokens[seq]))
            return replace(
                self.case, tokens=[kept if i == seq else t for i, t in enumerate(self.case.tokens)]
            )
        qkv = [x[tokens] if i == seq else x for i, x in enumerate(self.case.qkv)]
        return replace(self.case, qkv=qkv)

    def feed(self, case: Any, cache: Any, lens: Sequence[int]) -> None:
        case.feed(self.backend, cache, lens, **self.more)

    def step(
        self, case: Any, cache: Any, queries: Sequence[int], contexts: Sequence[int], seqs: Any
    ) -> Tensor:
        made: Tensor = case.step(self.backend, cache, queries, contexts, seqs, **self.more)
        return made


def slots(fed: Fed, seq: int, places: list[int]) -> Tensor:
    size, at = fed.paged.spec.page_size, torch.tensor(places)
    return fed.paged.page_table[fed.paged.rows[seq], at // size].long() * size + at % size


CASES = [
    (name, kind)
    for name in BACKENDS
    for kind in KINDS
    if kind in ("plain", "pages of 4") or "latent" not in name
    if "triton" not in name
]
# In the interpreter kernels take their time.
KERNELS = [
    *(("triton", kind) for kind in ("plain", "window", "cap and sinks", "int8", "int4")),
    ("triton, merged", "plain"),
    ("triton, growing", "plain"),
    ("latent triton", "plain"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_path_is_a_chain(name: str, kind: str) -> None:
    """Roots around the borders of pages and spans, beside a chunk and a decode."""
    rng = random.Random(7)
    roots = [3, 126, 40, 143]  # the newest known tokens
    nums = [6, 18, 12, 0]  # drafts; of the third a chunk, of the last a decode
    trees = {0: random_tree(rng, 6), 1: random_tree(rng, 18)}
    ends = [root + 1 + num for root, num in zip(roots, nums, strict=True)]
    fed = Fed(name, kind, [end + 1 for end in ends])
    cache, queries = fed.cache(), [1 + num for num in nums]
    fed.feed(fed.case, cache, roots)
    got = fed.step(fed.with_trees(trees), cache, queries, ends, range(4)).split(queries)
    for seq, parents in trees.items():
        root, paths = roots[seq], paths_of(parents)
        leaves = [path for node, path in enumerate(paths) if node not in parents]
        for path in leaves:  # the others are on their way
            want = _chain(fed, seq, root, [root + node for node in path])
            assert torch.equal(got[seq][[0, *path]], want)
    for seq in (2, 3):  # bits of the rest are those of a step without trees
        own = fed.step(fed.case, cache, queries[seq : seq + 1], ends[seq : seq + 1], [seq])
        if "reference" not in name:
            assert torch.equal(got[seq], own)


def _chain(fed: Fed, seq: int, root: int, drafts: list[int]) -> Tensor:
    """Token by token, and at once where that must not matter."""
    case, end = fed.picked(seq, [*range(root + 1), *drafts]), root + 1 + len(drafts)
    cache = fed.cache()
    _feed_one(fed, case, cache, seq, root)
    one_by_one = [
        fed.step(case, cache, [1], [context], [seq]) for context in range(root + 1, end + 1)
    ]
    found = torch.cat(one_by_one)
    if "triton" in type(fed.backend).__name__.lower():
        return found
    if "Reference" not in type(fed.backend).__name__:
        again = fed.cache()
        _feed_one(fed, case, again, seq, root)
        assert torch.equal(found, fed.step(case, again, [end - root], [end], [seq]))
    return found


def _feed_one(fed: Fed, case: Any, cache: Any, seq: int, num: int) -> None:
    fed.feed(case, cache, [num if i == seq else 0 for i in range(4)])


@pytest.mark.parametrize(("name", "kind"), KERNELS)
def test_every_path_of_a_kernel_is_a_chain(name: str, kind: str) -> None:
    """The border of a split lies within the tree, and a chunk and a decode are beside it."""
    roots, nums, parents = [30, 9, 33], [5, 2, 0], (0, 0, 2, 3, 1)
    ends = [root + 1 + num for root, num in zip(roots, nums, strict=True)]
    fed = Fed(name, kind, [end + 1 for end in (*ends, 1)])
    cache, queries = fed.cache(), [1 + num for num in nums]
    fed.feed(fed.case, cache, [*roots, 0])
    got = fed.step(fed.with_trees({0: parents}), cache, queries, ends, range(3)).split(queries)
    for path in ((2, 3, 4), (1, 5)):
        want = _chain(fed, 0, roots[0], [roots[0] + node for node in path])
        assert torch.equal(got[0][[0, *path]], want)
    for seq in (1, 2):
        own = fed.step(fed.case, cache, queries[seq : seq + 1], ends[seq : seq + 1], [seq])
        assert torch.equal(got[seq], own)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_was_right_moves_to_its_slots(name: str, kind: str) -> None:
    """Red when a moved token is not what a chain would have stored, or is moved elsewhere."""
    root, parents = 13, (0, 0, 1, 2, 2, 5, 0, 6, 8, 9)
    fed = Fed(name, kind, [root + 13, 1, 1, 1])
    path = paths_of(parents)[10]  # across a border of pages
    assert path == (2, 5, 6, 8, 9, 10)
    cache = fed.cache()
    _feed_one(fed, fed.case, cache, 0, root)
    fed.step(fed.with_trees({0: parents}), cache, [11], [root + 11], [0])
    sources = slots(fed, 0, [root + node for node in path])
    targets = slots(fed, 0, [root + depth for depth, _ in enumerate(path, 1)])
    fed.backend.move(cache, sources, targets, fed.case.spec)
    end = root + 1 + len(path)
    case = fed.picked(0, [*range(root + 1), *(root + node for node in path), root + 12])
    chained = fed.cache()
    _feed_one(fed, case, chained, 0, end)
    want = fed.step(case, chained, [1], [end + 1], [0])
    assert torch.equal(fed.step(case, cache, [1], [end + 1], [0]), want)
