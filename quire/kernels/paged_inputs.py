"""What the paged kernels are launched with: pages of floats or codes, and how programs share them.

`paged_split.py`, `paged_prefill.py`, `paged_shared.py` and `merge_splits.py` read these.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.coded_tile import head_bytes
from quire.kernels.launch import alignments
from quire.kernels.paged_tile import LOG2_E, head_pad


@dataclass(frozen=True, slots=True)
class Coded:
    """Pages that hold codes: `coded_tile.py` says how."""

    bits: int
    heads: tuple[int, int, int]  # kv heads, page size, head dim


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """What both attention kernels read; contiguous, int32 where integral."""

    keys: Tensor  # [pages, kv_heads, page_size, dim]; coded: [pages, bytes], elements are codes
    values: Tensor
    page_table: Tensor  # [max_rows, max_pages]
    rows: Tensor  # [seqs]
    query_starts: Tensor  # [seqs + 1]
    context_lens: Tensor  # [seqs]
    scale: float
    window: int = 0  # last positions that a query sees, its own included; 0: all
    softcap: float = 0.0  # logits go through softcap * tanh(logit / softcap); 0: as they are
    sinks: Tensor | None = None  # [heads] f32 logits that take part in the softmax, no values
    coded: Coded | None = None  # None: floats
    # Of drafts that are trees, each a sequence of one query: `draft_paths.py`; None: no trees.
    paths: Tensor | None = None  # [tokens, 1 + depth]

    @property
    def any_paths(self) -> Tensor:
        """Unread where the width is 0."""
        return self.rows if self.paths is None else self.paths

    @property
    def path_width(self) -> int:
        return 0 if self.paths is None else self.paths.shape[1]

    @property
    def heads(self) -> tuple[int, int, int]:
        """(kv heads, page size, head dim)"""
        if self.coded is not None:
            return self.coded.heads
        _, kv_heads, page_size, head_dim = self.keys.shape
        return kv_heads, page_size, head_dim

    @property
    def layout(self) -> dict[str, int]:
        """Where kernels find a row: constants of theirs."""
        kv_heads, page_size, head_dim = self.heads
        bits = 0 if self.coded is None else self.coded.bits
        head = head_bytes(page_size, head_dim, bits) if bits else page_size * head_dim
        return {
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "HEAD_PAD": head_pad(head_dim),
            "PAGE_SIZE": page_size,
            "HEAD_STRIDE": head,
            "PAGE_STRIDE": self.keys.stride(0),
            "BITS": bits,
        }

    @property
    def state_scale(self) -> float:
        """From the logits in a softmax state to powers of two: products of q and k, or tanh."""
        return (self.softcap or self.scale) * LOG2_E

    @property
    def cap_scale(self) -> float:
        """From products of q and k to what exp2 turns into tanh; 0: no cap."""
        return 2 * LOG2_E * self.scale / self.softcap if self.softcap else 0.0

    @property
    def table_stride(self) -> int:
        return self.page_table.stride(0)

    @property
    def kind(self) -> tuple[object, ...]:
        """What a compiled kernel depends on, for the launcher; the integers are int32."""
        aligned = alignments(self.keys, self.values, self.page_table)
        return self.keys.dtype, self.rows.dtype, aligned


@dataclass(frozen=True, slots=True)
class SplitGrid:
    """How the split kernel is laid out over a batch.

    `tiles` rows are (sequence, first query token of it, first scratch row): None means that tile i
    is the single token of sequence i and owns scratch rows [i * max_splits, (i + 1) * max_splits).
    """

    tiles: Tensor | None  # [num_tiles, 3]
    num_tiles: int
    tile_tokens: int  # most query tokens in a tile
    max_splits: int  # bound on splits of any one tile
    lanes: int  # programs that share the splits of a tile
    acc: Tensor  # [splits, kv_heads, tile_tokens * group, dim] fp32 scratch, flat
    sums: Tensor  # [splits, kv_heads, tile_tokens * group, 2] fp32 scratch, flat: row max, row sum
    folds: bool = False  # the one lane of a tile folds its splits: nothing to merge
    # Neighbours in the batch whose shared splits `paged_shared.py` attends together; 0: none.
    company: int = 0
