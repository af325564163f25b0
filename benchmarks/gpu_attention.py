"""Paged attention on one GPU: is it right, are its bits invariant, how fast is each configuration?

Run from the repository root: `python -m benchmarks.gpu_attention`. Prints a table per question and
one JSON line at the end. Without CUDA it walks the same code in Triton's interpreter on toy
shapes (set TRITON_INTERPRET=1), which checks the script and nothing else. Caches of codes are
timed by `gpu_kv_cache.py`.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from quire.attn.backend import AttnSpec, LayerCache
from quire.attn.triton import TritonAttention
from quire.forward import Batch
from quire.kernels.paged_tile import Launch, PagedConfig, default_config
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope_kv_write import Rope, rope_kv_write
from quire.kernels.silu_mul import silu_mul
from tests.paged_case import PagedCase, make_case

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    import tests.interpreter  # noqa: F401  mends the interpreter for this NumPy
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter cannot multiply bf16
HEADS, KV_HEADS, DIM, PAGE = (32, 8, 128, 16) if ON_GPU else (4, 1, 32, 16)
SPEC = AttnSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, PAGE)
KV_BYTES = 2 * KV_HEADS * DIM * 2  # of one token
POOL_TOKENS = 1 << 18 if ON_GPU else 1 << 10  # 1.07 GB: far beyond L2
LAST = 1300 if ON_GPU else 70  # length of the sequence whose bits are compared

# (block_n, split_size) decide bits; launches under one pair should agree with each other.
SPLITS = {
    (64, 512): [(16, 4, 3), (16, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4)],
    (64, 256): [(64, 4, 3)],
    (64, 1024): [(64, 4, 3)],
    (128, 512): [(64, 4, 2), (16, 4, 2)],
    (128, 1024): [(64, 4, 2)],
}
PREFILLS = {
    (64, 512): [(128, 8, 3), (128, 8, 2), (64, 4, 3), (64, 4, 2)],
    (64, 1024): [(128, 8, 3)],
    (128, 512): [(128, 8, 2)],
    (128, 1024): [(128, 8, 2)],
}
DECODE_SHAPES = {
    "1 x 2k": [2048],
    "8 x 1k": [1024] * 8,
    "256 x 384": [384] * 256,
    "32 x 2k": [2048] * 32,
    "8 x 32k": [32768] * 8,
    "1 x 128k": [131072],
    "255 x 384 + 32k": [384] * 255 + [32768],
}
PREFILL_SHAPES = [(1, 2048, 2048), (4, 2048, 2048), (1, 8192, 8192), (1, 2048, 32768)]
if not ON_GPU:
    SPLITS = PREFILLS = {(16, 32): [(16, 4, 2)]}
    DECODE_SHAPES, PREFILL_SHAPES = {"toy": [40, 33]}, [(1, 8, 40)]


@dataclass(frozen=True, slots=True)
class Timing:
    kind: str
    shape: str
    name: str
    us: float
    rate: float
    unit: str


def candidates(
    table: dict[tuple[int, int], list[tuple[int, int, int]]],
) -> Iterator[tuple[tuple[int, int], str, TritonAttention]]:
    """A backend per candidate that uses its launch for both kernels."""
    for (block_n, split_size), launches in table.items():
        for block_m, warps, stages in launches:
            launch = Launch(block_m, warps, stages)
            config = PagedConfig(block_n, split_size, launch, launch)
            name = f"N{block_n} S{split_size} M{block_m} w{warps} s{stages}"
            yield (block_n, split_size), name, triton_only(config)


def triton_only(config: PagedConfig) -> TritonAttention:
    """A backend that leaves the kernels for Hopper alone: they have launches of their own."""
    backend = TritonAttention(DTYPE, config)
    backend._hopper_split = backend._hopper_prefill = None
    return backend


# ---------------------------------------------------------------- correctness and invariance


def case_of(lens: Sequence[int]) -> PagedCase:
    return make_case(lens, heads=(HEADS, KV_HEADS), head_dim=DIM, dtype=DTYPE, device=DEVICE)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_error(backend: TritonAttention) -> float:
    """Relative error of a mixed batch against dense fp64."""
    size = 512 if ON_GPU else 32
    contexts = [1, size - 1, size, size + 1, 2 * size + 7, 3 * size]
    queries = [1, 1, size, 1, 5, size // 2]
    case = case_of(contexts)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, contexts)
    got = case.step(backend, cache, queries, contexts)
    return relative_error(got, case.expected(queries, contexts))


def check_bits(backend: TritonAttention) -> dict[str, bool]:
    """Does a position's output depend on chunking, path, company or planned bound?"""
    last = LAST
    lens = [last] + [100 + 9 * i for i in range(63)] if ON_GPU else [last, 20, 33]
    case = case_of(lens)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, lens)
    whole = case.step(backend, cache, [last], [last], seqs=[0])

    ends = list(range(1, last + 1, 1 if ON_GPU else 23))
    ones = [1] * len(ends)
    decoded = case.step(backend, cache, ones, ends, seqs=[0] * len(ends))
    verdict = {"decode = prefill": torch.equal(decoded, whole[[e - 1 for e in ends]])}
    for chunk in (5, 16, 64, 200, 512) if ON_GPU else (5, 30):
        cuts = [*range(0, last, chunk), last]
        parts = [
            case.step(backend, cache, [b - a], [b], seqs=[0]) for a, b in itertools.pairwise(cuts)
        ]
        verdict[f"chunks of {chunk}"] = torch.equal(torch.cat(parts), whole)
    alone = [case.step(backend, cache, [1], [n], seqs=[i]) for i, n in enumerate(lens)]
    together = case.step(backend, cache, [1] * len(lens), lens)
    verdict["alone = in company"] = torch.equal(torch.cat(alone), together)
    bounded = case.step(backend, cache, [1] * len(lens), lens, max_context=16 * last)
    verdict["bounded plan"] = torch.equal(bounded, together)
    mixed = case.step(backend, cache, [last, *[1] * (len(lens) - 1)], lens)
    verdict["mixed step"] = torch.equal(mixed, torch.cat([whole, together[1:]]))
    return verdict


def check_launches() -> dict[str, str]:
    """Do all launches of one (block_n, split_size) give the bits of its first prefill?"""
    case = case_of([LAST])
    want = case.expected([LAST], [LAST])
    ends = list(range(1, LAST + 1, 1 if ON_GPU else 23))
    wholes: dict[tuple[int, int], torch.Tensor] = {}
    verdict = {}
    for pair, name, backend in candidates(PREFILLS):
        cache = case.cache(backend, fill=float("nan"))
        whole = case.step(backend, cache, [LAST], [LAST])
        is_equal = torch.equal(whole, wholes.setdefault(pair, whole))
        verdict[f"prefill {name}"] = judged(is_equal, relative_error(whole, want))
    for pair, name, backend in candidates(SPLITS):
        if pair in wholes:
            cache = case.cache(backend, fill=float("nan"))
            case.feed(backend, cache, [LAST])
            some = wholes[pair][[e - 1 for e in ends]]
            seqs = [0] * len(ends)
            got = case.step(backend, cache, [1] * len(ends), ends, seqs, max_context=LAST)
            error = relative_error(got, want[[e - 1 for e in ends]])
            verdict[f"split   {name}"] = judged(torch.equal(got, some), error)
    return verdict


def judged(is_equal: bool, error: float) -> str:
    return f"{'equal' if is_equal else 'DIFFERS'} {error:.1e}"


# ---------------------------------------------------------------- timing


def time_us(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one call; `calls` rotate over buffers, captured back to back."""
    for call in calls:
        call()
    if not ON_GPU:
        begin = time.perf_counter()
        calls[0]()
        return 1e6 * (time.perf_counter() - begin)
    rounds = max(1, 10 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    spans = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        spans.append(1e3 * start.elapsed_time(stop) / (rounds * len(calls)))
    return statistics.median(spans)


def make_pool() -> LayerCache:
    shape = (POOL_TOKENS // PAGE, KV_HEADS, PAGE, DIM)
    return LayerCache(*(torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(2)))


def make_batches(contexts: list[int], query_len: int, copies: int) -> list[Batch]:
    """Batches over disjoint pages as far as the pool reaches."""
    num_seqs, tokens = len(contexts), len(contexts) * query_len
    counts = [-(-n // PAGE) for n in contexts]
    order = torch.randperm(POOL_TOKENS // PAGE).int()
    fit = min(copies, len(order) // sum(counts))
    table = torch.zeros(fit * num_seqs, -(-max(counts) // 16) * 16, dtype=torch.int32)
    pages = iter(order.split(counts * fit + [len(order) - fit * sum(counts)]))
    for row, count in zip(table, counts * fit, strict=True):
        row[:count] = next(pages)
    table = table.to(DEVICE)
    unused = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    host_contexts = np.asarray(contexts, dtype=np.int32)
    return [
        Batch(
            input_ids=unused,
            positions=unused,
            slots=unused,
            query_starts=torch.arange(0, tokens + 1, query_len, dtype=torch.int32, device=DEVICE),
            context_lens=torch.from_numpy(host_contexts).to(DEVICE),
            rows=torch.arange(num_seqs, dtype=torch.int32, device=DEVICE) + i * num_seqs,
            page_table=table,
            page_size=PAGE,
            host_query_lens=np.full(num_seqs, query_len, dtype=np.int32),
            host_context_lens=host_contexts,
        )
        for i in range(fit)
    ]


def time_attention(
    backend: TritonAttention, pool: LayerCache, batches: list[Batch], bound: int | None
) -> float:
    q = torch.randn(batches[0].num_tokens, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    plans = [backend.plan(b, SPEC, bound) for b in batches]
    return time_us([partial(backend.run, q, pool, plan, SPEC) for plan in plans])


def time_decode(pool: LayerCache) -> list[Timing]:
    base = default_backend()._config_of(SPEC)
    runs = [(name, backend, 1) for _, name, backend in candidates(SPLITS)]
    runs += [("as chosen", default_backend(), 1)]
    for programs in (128, 256, 512, 4096):
        # A bound far above the contexts shows what idle programs and empty splits cost.
        backend = triton_only(replace(base, programs=programs))
        runs += [(f"default P{programs}", backend, 1), (f"  P{programs}, bound x8", backend, 8)]
    rows = []
    for shape, contexts in DECODE_SHAPES.items():
        batches = make_batches(contexts, 1, copies=16)
        for name, backend, slack in runs:
            us = time_attention(backend, pool, batches, slack * max(contexts))
            rate = sum(contexts) * KV_BYTES / us / 1e6
            rows.append(Timing("decode", shape, name, us, rate, "TB/s"))
    return rows


def time_prefill(pool: LayerCache) -> list[Timing]:
    rows = []
    for num_seqs, query_len, context in PREFILL_SHAPES:
        batches = make_batches([context] * num_seqs, query_len, copies=2)
        pairs = num_seqs * query_len * (context - (query_len - 1) / 2)
        runs = [(name, backend) for _, name, backend in candidates(PREFILLS)]
        for name, backend in [*runs, ("as chosen", default_backend())]:
            us = time_attention(backend, pool, batches, None)
            shape = f"{num_seqs} x {query_len} of {context}"
            flops = 4 * HEADS * DIM * pairs
            rows.append(Timing("prefill", shape, name, us, flops / us / 1e6, "TFLOP/s"))
    return rows


def time_small(pool: LayerCache) -> list[Timing]:
    """The kernels around attention, at Llama-3.1-8B's widths."""
    rows = []
    for tokens in (1, 256, 8192) if ON_GPU else (1,):
        for name, call, nbytes in small_calls(pool, tokens):
            us = time_us([call])
            rows.append(Timing("small", f"{tokens} tokens", name, us, nbytes / us / 1e6, "TB/s"))
    return rows


def small_calls(pool: LayerCache, tokens: int) -> list[tuple[str, Callable[[], object], int]]:
    hidden, ffn = (4096, 14336) if ON_GPU else (64, 96)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE)
    weight = torch.ones(hidden, device=DEVICE, dtype=DTYPE)
    wide = torch.randn(tokens, 2 * ffn, device=DEVICE, dtype=DTYPE)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE, dtype=DTYPE)
    angles = torch.rand(8192, DIM // 2, device=DEVICE)
    rope = Rope(angles.cos(), angles.sin())
    at = torch.arange(tokens, device=DEVICE)
    return [
        ("rms_norm + residual", lambda: rms_norm(x, weight, 1e-5, x), 4 * x.nbytes),
        ("silu_mul", lambda: silu_mul(wide), wide.nbytes * 3 // 2),
        ("rope_kv_write", lambda: rope_kv_write(qkv, *pool[:2], at, at, rope), 2 * qkv.nbytes),
    ]


def print_timings(rows: list[Timing]) -> None:
    """Names down, shapes across; microseconds and rate, the best of a shape starred."""
    shapes = list(dict.fromkeys(r.shape for r in rows))
    print(f"\n{rows[0].kind}: us, {rows[0].unit}".ljust(26) + "".join(s.rjust(19) for s in shapes))
    for name in dict.fromkeys(r.name for r in rows):
        cells = []
        for shape in shapes:
            r = next(r for r in rows if (r.name, r.shape) == (name, shape))
            best = max(r.rate for r in rows if r.shape == shape)
            cells.append(f"{r.us:.1f} {r.rate:.2f}{'*' if r.rate == best else ' '}".rjust(19))
        print(name.ljust(25) + "".join(cells))


def default_backend() -> TritonAttention:
    # Interpreted matrix products round by shape, so only equal tile heights can agree there.
    return TritonAttention(DTYPE) if ON_GPU else next(candidates(SPLITS))[2]


@torch.inference_mode()
def main() -> None:
    begin = time.perf_counter()
    torch.manual_seed(0)
    error = check_error(default_backend())
    print(f"relative error of the default configuration: {error:.2e} (bf16: under 1e-2)")
    bits = {k: "equal" if ok else "DIFFERS" for k, ok in check_bits(default_backend()).items()}
    launches = check_launches()
    for name, verdict in {**bits, **launches}.items():
        print(f"  {name:<34} {verdict}")
    print(f"checks done after {time.perf_counter() - begin:.0f} s")
    pool = make_pool()
    rows: list[Timing] = []
    for timed in (time_decode, time_prefill, time_small):
        part = timed(pool)
        print_timings(part)
        print(f"after {time.perf_counter() - begin:.0f} s")
        rows += part
    report = {
        "error": error,
        "bits": bits,
        "launches": launches,
        "default": repr(default_config(DIM, DTYPE)),
        "us": {
            f"{kind} {name}": [round(r.us, 1) for r in group]  # in the order of the table
            for (kind, name), group in itertools.groupby(
                sorted(rows, key=lambda r: (r.kind, r.name)), key=lambda r: (r.kind, r.name)
            )
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
