"""TritonAttention: paged attention on CUDA whose bits do not depend on the batch.

`plan` sorts the sequences of a step into two kernels: those whose queries fit one tile (decodes,
short drafts) take the split kernel, long chunks take the prefill kernel. Both follow the fixed
tiles and splits of `kernels/paged_tile.py`, so the choice affects speed only. On Hopper two more
kernels do the same work, where their layouts fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton import next_power_of_2

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.coded_pages import CodedPages
from quire.attn.moves import move_by_head
from quire.forward import Batch
from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.merge_splits import merge_splits
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_prefill import prefill_attention
from quire.kernels.paged_shared import company_size, shared_attention
from quire.kernels.paged_split import split_attention
from quire.kernels.paged_tile import PagedConfig, default_config
from quire.kernels.rope_kv_write import HeadNorm, Rope, rope_kv_write

if TYPE_CHECKING:
    from quire.kernels.paged_prefill_hopper import HopperPrefill
    from quire.kernels.paged_split_hopper import HopperSplit

SCRATCH_STEP = 1 << 22  # floats: scratch grows by multiples of 16 MB
COMPANY_LANES = 2  # fewest lanes of sequences that share a prefix, where no lane folds its splits
# The longest run of one lane, in splits of the smallest size. A long context among many short ones
# would otherwise still run when all others are done.
LONGEST_WALK = 16
SHORT_WALK = 4  # contexts up to here do not differ by much

_Ints = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step's work, sorted by kernel."""

    batch: Batch
    config: PagedConfig
    split: SplitGrid | None
    prefill_tiles: Tensor | None  # [tiles, 3]


class TritonAttention:
    caps = AttnCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        head_dims=None,
        page_sizes=frozenset({16, 32, 64, 128, 256}),
        graphs=True,
        prompt_graphs=True,
        codes={"int8": 2, "fp8": 2, "int4": 4},
        trees=True,
        by_node=True,
    )

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, config: PagedConfig | None = None
    ) -> None:
        self.dtype = self.cache_dtype = dtype
        self._config = config
        # Layers and steps run one after another, so all plans share the newest, largest buffer.
        # Outgrown ones are never freed: captured graphs still write to them.
        self._scratch: list[Tensor] = []

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        return (num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> TritonPlan:
        """Lay out one step. With `max_context` (decode only) the plan depends on nothing but the
        number of sequences and that bound, and stays right while contexts grow up to it: the form
        to capture in a graph. The bound costs scratch and idle programs, never correctness."""
        config = self._config_of(spec)
        window = spec.window or 0
        if max_context is not None:
            assert batch.is_decode, "a bounded plan is for decode"
            num, splits = batch.num_seqs, config.splits.count(max_context)
            if window:  # its keys may start with the last of a split
                splits = min(splits, -(-(window - 1) // config.split_size) + 1)
            scratch = num * splits if splits > 1 else 0  # a single split bypasses scratch
            grid = self._grid(batch, spec, None, 1, splits, scratch)
            if batch.shares_prefix and splits > 1 and not window:
                company = company_size(config, spec.num_heads // spec.num_kv_heads)
                lanes = min(splits, max(COMPANY_LANES, grid.lanes))
                grid = replace(grid, company=company, lanes=lanes, folds=False)
            return TritonPlan(batch, config, grid, None)

        group = spec.num_heads // spec.num_kv_heads
        lens, contexts = batch.host_query_lens, batch.host_context_lens
        tokens = config.split.block_m // group  # of a split tile: longer queries are prefill
        short, long = np.flatnonzero(lens <= tokens), np.flatnonzero(lens > tokens)
        tokens = min(tokens, next_power_of_2(int(lens[short].max(initial=1))))
        few = _tiles(short, lens, contexts, tokens)
        many = _tiles(long, lens, contexts, config.prefill.block_m // group)

        splits_of = config.splits.counts(few[:, 2])
        if window:
            first = contexts[few[:, 0]] - lens[few[:, 0]] + few[:, 1]  # position of a tile
            splits_of -= config.splits.counts(np.maximum(first + 1 - window, 0) + 1) - 1
        needed = np.where(splits_of > 1, splits_of, 0)
        few[:, 2] = np.cumsum(needed) - needed  # from keys seen to first scratch row
        tiles = _upload(np.concatenate([few, many]), batch.page_table.device)
        split = None
        if len(few):
            scratch = int(needed.sum())
            split = self._grid(
                batch, spec, tiles[: len(few)], tokens, int(splits_of.max()), scratch
            )
        return TritonPlan(batch, config, split, tiles[len(few) :] if len(many) else None)

    def fewest_tokens(self, spec: AttnSpec) -> int:
        return self._config_of(spec).split.block_m // (spec.num_heads // spec.num_kv_heads) + 1

    def prompt_tiles(
        self, query_lens: _Ints, context_lens: _Ints, num_tokens: int, spec: AttnSpec
    ) -> _Ints:
        """[tiles, 3] for the prefill kernel, whatever the number of queries: no path changes a bit.

        The padding repeats the first tile."""
        tokens = self._config_of(spec).prefill.block_m // (spec.num_heads // spec.num_kv_heads)
        tiles = _tiles(np.arange(2), query_lens, context_lens, tokens)
        most = -(-num_tokens // tokens) + 1
        return np.concatenate([tiles, np.repeat(tiles[:1], most - len(tiles), 0)])

    def plan_prompt(self, batch: Batch, spec: AttnSpec, tiles: Tensor) -> TritonPlan:
        return TritonPlan(batch, self._config_of(spec), None, tiles.view(-1, 3))

    def mixed_tiles(
        self,
        query_lens: _Ints,
        context_lens: _Ints,
        num_singles: int,
        most_prompts: int,
        spec: AttnSpec,
    ) -> _Ints:
        """[tiles, 3]: `num_singles` for the split kernel, the rest for the prefill kernel.

        The padding belongs to the sequences that feed nothing. A split program without keys ends
        at once; the prefill kernel needs at least one key."""
        tokens = self._config_of(spec).prefill.block_m // (spec.num_heads // spec.num_kv_heads)
        few = _tiles(np.flatnonzero(query_lens == 1), query_lens, context_lens, 1)
        many = _tiles(np.flatnonzero(query_lens > 1), query_lens, context_lens, tokens)
        most = -(-int(query_lens.sum()) // tokens) + most_prompts
        assert len(few) <= num_singles and len(many) <= most, f"{len(few)=} {len(many)=}"
        tiles = np.zeros((num_singles + most, 3), np.int32)
        tiles[:num_singles, 0], tiles[num_singles:, 0] = len(query_lens) - 2, len(query_lens) - 1
        few[:, 2] = 0  # no states are left in scratch
        tiles[: len(few)], tiles[num_singles : num_singles + len(many)] = few, many
        return tiles

    def plan_mixed(
        self, batch: Batch, spec: AttnSpec, tiles: Tensor, num_singles: int
    ) -> TritonPlan:
        tiles = tiles.view(-1, 3)
        # One lane folds all splits of a tile, so the bound on splits and the scratch are not read.
        grid = replace(self._grid(batch, spec, tiles[:num_singles], 1, 1, 0), folds=True)
        return TritonPlan(batch, self._config_of(spec), grid, tiles[num_singles:])

    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        assert isinstance(plan, TritonPlan)
        batch = plan.batch
        rope = norm = None
        if heads.cos is not None and heads.sin is not None:
            rope = Rope(heads.cos, heads.sin)
        if heads.q_norm is not None and heads.k_norm is not None:
            norm = HeadNorm(heads.q_norm, heads.k_norm, heads.eps)
        if (coded := CodedPages.of(cache, spec)) is not None:
            return coded.store(qkv, batch, rope, norm, heads)
        return rope_kv_write(
            qkv, cache.keys, cache.values, batch.positions, batch.slots, rope, norm
        )

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: object,
        spec: AttnSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(plan, TritonPlan)
        assert q.dtype == self.dtype, f"{q.dtype=} {self.dtype=}"
        batch, coded = plan.batch, CodedPages.of(cache, spec)
        keys, values, config, split = cache.keys, cache.values, plan.config, plan.split
        if coded is not None:
            keys, values = coded.pages
            q = coded.codes.turned_queries(q)
            config = config.for_codes
            split = split and _shared_out(split, spec, config)
        inputs = PagedInputs(
            keys,
            values,
            batch.page_table,
            batch.rows,
            batch.query_starts,
            batch.context_lens,
            spec.scale,
            spec.window or 0,
            spec.softcap or 0.0,
            sinks,
            None if coded is None else coded.coded,
            batch.paths,
        )
        out = torch.empty_like(q)  # [tokens, heads, dim]
        if plan.prefill_tiles is not None:
            self._prefill(q, inputs, plan.prefill_tiles, config, out)
        if split is not None:
            if split.company:
                shared_attention(q, inputs, split, config)
            self._split(q, inputs, split, config, out)
            merge_splits(inputs, split, config, out)
        return out if coded is None else coded.codes.turned_back(out)

    def move(self, cache: LayerCache, sources: Tensor, targets: Tensor, spec: AttnSpec) -> None:
        """As in `moves.py`."""
        if (coded := CodedPages.of(cache, spec)) is not None:
            coded.move(sources, targets)
            return
        for part in cache[:2]:
            move_by_head(part, sources, targets)

    def _prefill(
        self, q: Tensor, inputs: PagedInputs, tiles: Tensor, config: PagedConfig, out: Tensor
    ) -> None:
        """Run the faster prefill kernel; both give the same bits."""
        hopper = self._hopper_prefill
        if hopper is not None and hopper.can_run(q, inputs, config):
            hopper(q, inputs, tiles, config, out)
        else:
            prefill_attention(q, inputs, tiles, config, out)

    def _split(
        self, q: Tensor, inputs: PagedInputs, grid: SplitGrid, config: PagedConfig, out: Tensor
    ) -> None:
        """Run the faster split kernel; both give the same bits."""
        hopper = self._hopper_split
        if hopper and hopper.can_run(q, inputs, grid, config) and hopper.is_faster(inputs, grid):
            hopper(q, inputs, grid, config, out)
        else:
            split_attention(q, inputs, grid, config, out)

    @cached_property
    def _hopper_split(self) -> HopperSplit | None:
        if not has_hopper_kernels(torch.device("cuda")):
            return None
        from quire.kernels.paged_split_hopper import HopperSplit

        return HopperSplit()

    @cached_property
    def _hopper_prefill(self) -> HopperPrefill | None:
        if not has_hopper_kernels(torch.device("cuda")):
            return None
        from quire.kernels.paged_prefill_hopper import HopperPrefill

        return HopperPrefill()

    def _config_of(self, spec: AttnSpec) -> PagedConfig:
        config = self._config or default_config(spec.head_dim, self.dtype)
        if spec.window is not None:  # few splits anyway: longer ones would leave lanes idle
            config = replace(config, octave=0)
        return _widened(config, spec.num_heads // spec.num_kv_heads)

    def _grid(
        self,
        batch: Batch,
        spec: AttnSpec,
        tiles: Tensor | None,
        tokens: int,
        max_splits: int,
        num_scratch: int,  # splits to keep states of
    ) -> SplitGrid:
        num_tiles = batch.num_seqs if tiles is None else len(tiles)
        config = self._config_of(spec)
        lanes = min(max_splits, lanes_of(num_tiles * spec.num_kv_heads, max_splits, config))
        rows = num_scratch * spec.num_heads * tokens
        size = rows * (spec.head_dim + 2)
        last = self._scratch[-1].numel() if self._scratch else 0
        if last < max(1, size):  # doubling bounds the sum of what is kept
            grown = -(-max(size, 2 * last, 1) // SCRATCH_STEP) * SCRATCH_STEP
            device = batch.page_table.device
            self._scratch.append(torch.empty(grown, dtype=torch.float32, device=device))
        cut = rows * spec.head_dim
        acc, sums = self._scratch[-1][:cut], self._scratch[-1][cut:size]
        folds = config.folds and lanes == 1
        return SplitGrid(tiles, num_tiles, tokens, max_splits, lanes, acc, sums, folds)


def lanes_of(programs: int, max_splits: int, config: PagedConfig) -> int:
    """How many lanes share the splits of a tile.

    Where tiles fill the chip one lane does all splits and leaves no states to merge. Long contexts
    may differ much in length; that then takes twice as many tiles, so that programs end together.
    """
    longest = config.splits.start(max_splits) // config.split_size
    fewest = -(-longest // LONGEST_WALK)
    if config.folds and programs >= config.programs * (1 if longest <= SHORT_WALK else 2):
        return fewest
    return max(fewest, 1 + config.folds, config.programs // max(1, programs))


def _shared_out(grid: SplitGrid, spec: AttnSpec, config: PagedConfig) -> SplitGrid:
    """As many lanes as another configuration wants; what is planned for one lane stays so."""
    if grid.lanes == 1 or grid.company:
        return grid
    lanes = lanes_of(grid.num_tiles * spec.num_kv_heads, grid.max_splits, config)
    return replace(grid, lanes=max(grid.lanes, min(grid.max_splits, lanes)))


def _widened(config: PagedConfig, group: int) -> PagedConfig:
    """Tiles that hold at least one token of all query heads that share a kv head."""
    rows = next_power_of_2(group)
    if rows <= min(config.split.block_m, config.prefill.block_m):
        return config
    return replace(
        config,
        split=replace(config.split, block_m=max(rows, config.split.block_m)),
        prefill=replace(config.prefill, block_m=max(rows, config.prefill.block_m)),
    )


def _tiles(seqs: _Ints, lens: _Ints, contexts: _Ints, tokens: int) -> _Ints:
    """Cut the sequences' queries into tiles: [tiles, 3] of sequence, first token, keys seen.

    Tiles with most keys come first, so that the programs end together."""
    counts = -(-lens[seqs] // tokens)
    seq = np.repeat(seqs, counts)
    first = np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = first * tokens
    keys = contexts[seq] - lens[seq] + np.minimum(start + tokens, lens[seq])
    tiles = np.stack([seq, start, keys], 1).astype(np.int32)
    return tiles[np.argsort(-keys, kind="stable")]


def _upload(tiles: _Ints, device: torch.device) -> Tensor:
    host = torch.from_numpy(tiles)
    if device.type != "cuda":
        return host
    # The pinned block is kept by torch's host allocator until the copy has run.
    return host.pin_memory().to(device, non_blocking=True)
