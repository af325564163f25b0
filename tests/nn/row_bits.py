"""Run as a script: which products and attentions give a row other bits in other company; with the
word "products", which products alone.

Prints one line for each finding, nothing when there is none. A process of its own, because the
library reads MKL_CBWR once, when it is loaded.
"""

from __future__ import annotations

import sys

import torch

from quire.attn.cpu import CpuAttention
from quire.ops.mkl_linear import PackedLinear
from tests.paged_case import make_case

# (outputs, inputs): odd routers, a head's worth, layers of small models, a vocabulary.
SHAPES = ((1, 64), (5, 64), (9, 33), (96, 64), (130, 200), (192, 576), (4096, 64))
NUM_ROWS = 64
KEY_COUNTS = (1, 17, 127, 128, 129, 190, 200, 256, 257, 300, 383, 400, 511, 512, 513, 700, 900)


def check_products(num_threads: int) -> None:
    for num_out, num_in in SHAPES:
        linear = PackedLinear(torch.randn(num_out, num_in), torch.randn(num_out))
        x = torch.randn(NUM_ROWS + 1, num_in)
        whole = linear(x)
        for m in range(1, NUM_ROWS + 1):
            first, last = linear(x[:m]), linear(x[-m:])
            if not (torch.equal(first, whole[:m]) and torch.equal(last, whole[-m:])):
                print(f"product {num_out} x {num_in}, {m} rows, {num_threads} threads")


def check_attention(num_threads: int) -> None:
    """A decode of each length alone, beside a longer one, and as part of the whole prompt."""
    longest = max(KEY_COUNTS) + 100
    case, backend = make_case([longest, longest], heads=(4, 2), head_dim=64), CpuAttention()
    cache = case.cache(backend)
    whole = case.step(backend, cache, [longest, longest], [longest, longest])
    for keys in KEY_COUNTS:
        alone = case.step(backend, cache, [1], [keys])
        beside = case.step(backend, cache, [1, 1], [keys, min(keys + keys // 5, longest)])
        if not torch.equal(alone[0], beside[0]):
            print(f"attention over {keys} keys beside another, {num_threads} threads")
        if not torch.equal(alone[0], whole[keys - 1]):
            print(f"attention over {keys} keys in the prompt, {num_threads} threads")


if __name__ == "__main__":
    for threads in (1, 2):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        check_products(threads)
        if "products" not in sys.argv[1:]:
            check_attention(threads)
