"""Adapters' kernels: any mix of slots, ranks and sizes in one launch, beside plain torch in fp32.

Runs in Triton's interpreter without a GPU. Red when a tile takes another row's slot, a part another
part's B, a padded rank something that is no zero, or a neighbour reaches into a row's bits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.low_rank_expand import ExpandConfig, low_rank_expand, low_rank_gate
from quire.kernels.low_rank_places import PLACE, Places, shrink_shape
from quire.kernels.low_rank_shrink import ShrinkConfig, low_rank_shrink, room_for_ranks
from quire.kernels.silu_mul import silu_mul
from quire.lora import row_tiles
from quire.lora.row_tiles import TILE, TILE_WORDS, RowTiles, blocks_of, tiles_of

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class LowRanks(NamedTuple):
    """Of one slot and part; rank 0: nothing is added."""

    low: Tensor  # [rank padded, in]
    high: Tensor  # [out, rank padded]
    rank: int
    scale: float


class Case:
    """A product with three linears' places in the table, of which it is the second."""

    def __init__(
        self, num_in: int, sizes: Sequence[int], ranks: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> None:
        """`ranks` [slots from 1 on][parts]."""
        random = torch.Generator().manual_seed(num_in + sum(sizes))

        def filled(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=random) / 8).to(DEVICE, dtype)

        self.sizes, self.dtype, self.num_in = tuple(sizes), dtype, num_in
        self.origin = torch.zeros(16, dtype=dtype, device=DEVICE)
        self.of: dict[tuple[int, int], LowRanks] = {}
        table = torch.zeros(1 + len(ranks), 3, 3, PLACE.value, dtype=torch.int64)
        for slot, of_slot in enumerate(ranks, 1):
            for part, rank in enumerate(of_slot):
                if rank == 0:
                    continue
                padded, scale = -(-rank // 16) * 16, 0.5 + slot / 4
                low, high = filled(padded, num_in), filled(sizes[part], padded)
                low[rank:], high[:, rank:] = 0, 0
                self.of[slot, part] = LowRanks(low, high, rank, scale)
                bits = int(np.float32(scale).view(np.int32))
                entry = (self.place(low), self.place(high), padded, bits)
                table[slot, 1, part] = torch.tensor(entry)
        most = max((-(-rank // 16) * 16 for of in ranks for rank in of), default=16) or 16
        self.places = Places(self.origin, table.to(DEVICE), 1, self.sizes, most)
        self.shrink: ShrinkConfig | None = None
        self.expand: ExpandConfig | None = None

    def place(self, weight: Tensor) -> int:
        return (weight.data_ptr() - self.origin.data_ptr()) // weight.element_size()

    def inputs(self, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.num_in, generator=random).to(DEVICE, self.dtype)
        sums = torch.randn(rows, sum(self.sizes), generator=random).to(DEVICE)
        return x, sums

    def shrunk(self, x: Tensor, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        tiles = torch.from_numpy(tiles_of(np.asarray(slots, dtype=np.int64))).to(DEVICE)
        h = torch.full_like(room_for_ranks(x, self.places), float("nan"))
        low_rank_shrink(x, tiles, self.places, h, self.shrink)
        return h, tiles

    def add(self, x: Tensor, sums: Tensor, slots: Sequence[int]) -> Tensor:
        h, tiles = self.shrunk(x, slots)
        out = sums.to(self.dtype) * float("nan")
        return low_rank_expand(sums, h, tiles, self.places, out, self.expand)

    def gate(self, x: Tensor, sums: Tensor, slots: Sequence[int], pairs: bool) -> Tensor:
        h, tiles = self.shrunk(x, slots)
        out = torch.full((len(x), self.sizes[0]), float("nan"), dtype=self.dtype, device=DEVICE)
        return low_rank_gate(sums, h, tiles, self.places, out, ("silu", pairs), self.expand)

    def wanted(self, x: Tensor, sums: Tensor, slots: Sequence[int]) -> Tensor:
        """fp32 sums with everything added."""
        made = sums.clone()
        for row, slot in enumerate(slots):
            begin = 0
            for part, size in enumerate(self.sizes):
                if (found := self.of.get((slot, part))) is not None:
                    ranks = found.low.double() @ x[row].double()
                    added = found.scale * (found.high.double() @ ranks)
                    made[row, begin : begin + size] += added.float()
                begin += size
        return made


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """One rounding of the same number, which may lie just between two."""
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(got.float(), want, rtol=step, atol=step)


CASES = {
    "rank 4": (64, (48,), [[4]]),
    "rank 16, three parts": (256, (64, 32, 32), [[16, 16, 16]]),
    "rank 64": (272, (130,), [[64]]),
    "ranks of three kinds": (528, (48, 16, 16), [[8, 0, 24], [0, 40, 0]]),
    "several chains": (2064, (48,), [[8], [32]]),
    "more ranks than a step has": (64, (40,), [[70], [4], [130]]),
    "many slots": (64, (20, 12), [[1 + slot % 17, slot % 3] for slot in range(64)]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_mixed_rows(name: str, dtype: torch.dtype) -> None:
    num_in, sizes, ranks = CASES[name]
    case = Case(num_in, sizes, ranks, dtype)
    draw = random.Random(7)
    slots = [draw.randrange(len(ranks) + 1) for _ in range(37)]
    x, sums = case.inputs(len(slots))
    near(case.add(x, sums, slots), case.wanted(x, sums, slots), dtype)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gates(pairs: bool, dtype: torch.dtype) -> None:
    """Red when gate and up change places, or the gate sees numbers before they were rounded."""
    case = Case(80, (72, 72), [[16, 4], [0, 20]], dtype)
    slots = [0, 1, 2, 1, 0] * 4
    x, sums = case.inputs(len(slots))
    given = torch.stack(sums.chunk(2, 1), 2).flatten(1) if pairs else sums
    got = case.gate(x, given.contiguous(), slots, pairs)
    want = silu_mul(case.add(x, sums, slots))
    assert torch.equal(got, want)
    near(got, silu_mul(case.wanted(x, sums, slots)), dtype)


def test_rows_do_not_depend_on_neighbours() -> None:
    """Each row alone, in a crowd of its own slot, and among all others: the same bits."""
    case = Case(528, (48, 32, 16), [[4, 16, 0], [33, 8, 64]], torch.bfloat16)
    slots = ([1] * 19 + [2] * 3 + [0]) * 2
    x, sums = case.inputs(len(slots))
    together = case.add(x, sums, slots)
    for row in (0, 17, 18, 19, 22, 40):
        one = slice(row, row + 1)
        assert torch.equal(case.add(x[one], sums[one], slots[one])[0], together[row])


def test_rows_without_an_adapter_are_only_rounded() -> None:
    case = Case(64, (48,), [[16]], torch.bfloat16)
    x, sums = case.inputs(20)
    sums[0] = -0.0
    slots = [0, 1] * 10
    got = case.add(x, sums, slots)
    own = sums.to(torch.bfloat16)
    assert torch.equal(got[::2].view(torch.int16), own[::2].view(torch.int16))
    assert not torch.equal(got[1::2], own[1::2])


def test_no_rows() -> None:
    case = Case(64, (48,), [[16]], torch.bfloat16)
    x, sums = case.inputs(5)
    assert case.add(x[:0], sums[:0], []).shape == (0, 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16][: 1 + IS_LONG])
@pytest.mark.parametrize("ranks", [[[16, 8], [4, 16], [10, 12]], [[16, 8], [48, 64], [64, 20]]])
def test_bits_follow_no_config_and_no_other_rank(
    ranks: list[list[int]], dtype: torch.dtype
) -> None:
    """Red when an adapter of a larger rank, how many slots go at once, or a block's size reaches
    into a row's bits."""
    if DEVICE == "cpu" and max(map(max, ranks)) > 16:
        pytest.skip("the interpreter sums what is multiplied at once in one go")
    case = Case(2064, (72, 72), ranks, dtype)
    slots = [1, 2, 0, 3, 1, 2, 3, 3, 1, 0, 2, 1, 1, 3, 2, 1, 1, 2]
    x, sums = case.inputs(len(slots))
    usual = case.gate(x, sums, slots, True), case.add(x, sums, slots)
    changes: list[tuple[ShrinkConfig, ExpandConfig, int]] = [
        (ShrinkConfig(num_warps=8), ExpandConfig(32, 16, 4), 64),
        (ShrinkConfig(num_warps=2), ExpandConfig(128, 128, 8), 64),
        (ShrinkConfig(), ExpandConfig(64, 64, 4), 128),
    ]
    if DEVICE == "cuda":
        changes.append((ShrinkConfig(step=256), ExpandConfig(32, 64, 4), 64))
    for case.shrink, case.expand, num_ranks in changes:
        case.places = case.places._replace(num_ranks=num_ranks)
        assert torch.equal(case.gate(x, sums, slots, True), usual[0])
        assert torch.equal(case.add(x, sums, slots), usual[1])
    small = [row for row, slot in enumerate(slots) if slot <= 1]
    case.places = case.places._replace(num_ranks=16)
    case.shrink, case.expand = None, None
    alone = case.add(x[small], sums[small], [slots[row] for row in small])
    assert torch.equal(alone, usual[1][small])


def test_inputs_may_be_columns_of_something_wider() -> None:
    case = Case(64, (48,), [[16]], torch.bfloat16)
    x, sums = case.inputs(5)
    wide = torch.full((5, 96), float("nan"), dtype=x.dtype, device=DEVICE)
    wide[:, :64] = x
    assert torch.equal(case.add(wide[:, :64], sums, [1] * 5), case.add(x, sums, [1] * 5))


def test_chains_cover_all_inputs() -> None:
    for num_in in (16, 256, 272, 4096, 8192, 14336, 53248):
        chain, chains = shrink_shape(num_in)
        assert chain * (chains - 1) < num_in <= chain * chains and chains <= 8


def test_every_row_is_in_one_tile() -> None:
    draw = np.random.default_rng(3)
    for count in (0, 1, 16, 17, 100, row_tiles.BLOCK_ROWS + 5):
        slots = draw.integers(0, 7, count)
        made = RowTiles.of(slots)
        assert made.blocks == blocks_of(count) and made.tiles.shape[1] == TILE_WORDS
        assert len(made.tiles) == (made.blocks[-1].last if count else 0)
        seen = []
        for block in made.blocks:
            for words in made.tiles[block.first : block.last].tolist():
                num_slots, rows, rest = words[0], words[1 : 1 + TILE], words[1 + TILE :]
                which, named = rest[:TILE], rest[TILE : TILE + num_slots]
                assert 0 not in named and len(set(named)) == num_slots
                for row, place in zip(rows, which, strict=True):
                    if row < 0:
                        assert place < 0
                        continue
                    assert slots[block.begin + row] == (named[place] if place >= 0 else 0)
                    seen.append(block.begin + row)
        assert sorted(seen) == list(range(count))
