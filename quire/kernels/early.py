"""Early launch: a kernel may start while the one before still runs, and waits before its inputs.

Between two kernels of a decode step the chip idles for some microseconds: the last programs of one
finish, the first of the next are placed, their instructions fetched. With programmatic dependent
launch the next kernel is placed as soon as all programs of the one before have begun, and waits
there until that one has written its results. Every kernel of a chain must wait: the wait covers
only the kernel just before, and that one is done only after its own wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["early_options", "let_next_start", "wait_for_inputs", "wait_for_last"]

FIRST_CAPABILITY = (9, 0)
WITH_INPUTS = tl.constexpr(2)  # an EARLY: the next kernel starts once this one's inputs are there


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY and EARLY != WITH_INPUTS:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Wait until the kernel before has written its results."""
    if EARLY:
        gdc_wait()
    if EARLY == WITH_INPUTS:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """First line of a kernel's work: let the next one start, then wait for the one before.

    A kernel may call the two halves separately. Between them it may read what no kernel of the
    chain writes: weights, tables, the step's positions, slots, lengths and page tables, and all
    keys and values but the newest: its own token's and, where neighbours are tokens of one row
    (drafts), theirs. A plain launch waits for everything before it, but an early
    kernel may begin while the last plain launch ends. So whatever writes these inputs must be
    followed by one more plain launch before the chain begins: the embedding in a step, the choice
    of queries before a prompt's last layer."""
    let_next_start(EARLY)
    wait_for_last(EARLY)


@cache
def early_options(next_has_inputs: bool = False) -> Mapping[str, object]:
    """Compile-time constants and launch options of a kernel that calls `wait_for_inputs`.

    `next_has_inputs`: the next kernel starts only once all programs of this one have waited. So it
    may read at once what this one's inputs are, past its multiprocessor's own cache, and run
    beside it."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= FIRST_CAPABILITY:
        return {"EARLY": WITH_INPUTS.value if next_has_inputs else True, "launch_pdl": True}
    return {"EARLY": False}
