"""The expanded form, and that a token's form follows from its position and its prompt alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.attn.latent import LatentAttention
from quire.attn.latent_forms import split_forms
from quire.attn.latent_reference import LatentReference
from quire.attn.latent_rounds import MAX_ROUND_KEYS, plan_rounds
from quire.attn.latent_triton import LatentTriton
from tests.attn.test_contract import SMALL_TILES, close, device_of
from tests.latent_case import Sizes, make_latent_case

BACKENDS = {
    "reference": LatentReference,
    "triton": lambda: LatentTriton(torch.float32, SMALL_TILES),
    # Blocks so short that states go from round to round.
    "triton in blocks": lambda: LatentTriton(torch.float32, SMALL_TILES, block_keys=32),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> LatentAttention:
    return BACKENDS[request.param]()


STEPS = {  # query lengths, context lengths, prompt lengths
    "whole prompts": ([37, 5], [37, 5], [37, 5]),
    "chunk with a past": ([18], [70], [90]),
    "a decode beside a prompt": ([1, 33], [40, 33], [39, 50]),
    "across the end of a prompt": ([12, 1, 20], [30, 9, 20], [25, 9, 3]),
}


@pytest.mark.parametrize("step", STEPS)
def test_both_forms_match_dense_heads(backend: LatentAttention, step: str) -> None:
    queries, contexts, prompts = STEPS[step]
    case = make_latent_case(contexts, Sizes(2, 16, 16, 12, 20), device=device_of(backend))
    cache = case.cache(backend)
    case.feed(backend, cache, [n - q for q, n in zip(queries, contexts, strict=True)])
    got = case.step_in_forms(backend, cache, queries, contexts, prompts)
    close(got, case.expected(queries, contexts, is_latent=False))


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("name", ["triton", "triton in blocks"])
def test_chunks_and_blocks_change_no_bit(name: str, chunk: int) -> None:
    """A prompt of 36 tokens and 6 after it: the last 12 at once or in chunks, one of which crosses
    the end of the prompt, all of which cross a border of blocks."""
    backend = BACKENDS[name]()
    case = make_latent_case([42], Sizes(2, 16, 16, 16, 16), device=device_of(backend))
    cache = case.cache(backend)
    whole = case.step_in_forms(BACKENDS["triton"](), cache, [42], [42], [36])
    cuts = [*range(30, 42, chunk), 42]
    parts = [
        case.step_in_forms(backend, cache, [b - a], [b], [36]) for a, b in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts), whole[30:])


def test_company_changes_no_bit() -> None:
    backend = BACKENDS["triton"]()
    case = make_latent_case([30, 45, 17], Sizes(2, 16, 16, 16, 16), device=device_of(backend))
    cache = case.cache(backend)
    together = case.step_in_forms(backend, cache, [30, 45, 17], [30, 45, 17], [30, 20, 0])
    alone = [
        case.step_in_forms(backend, cache, [n], [n], [p], seqs=[i])
        for i, (n, p) in enumerate([(30, 30), (45, 20), (17, 0)])
    ]
    assert torch.equal(torch.cat(alone), together)


def test_tokens_go_to_their_form() -> None:
    """Positions below the prompt's length are expanded, whatever else the step holds."""
    case = make_latent_case([12, 9, 20, 6])
    queries, contexts = [12, 1, 8, 6], [12, 9, 20, 6]
    batch = case.paged.batch(queries, contexts, range(4))
    plain = split_forms(batch)
    assert plain.expanded is None and plain.absorbed is not None
    assert plain.absorbed.batch is batch
    prompts = np.asarray([12, 8, 15, 0], dtype=np.int32)
    forms = split_forms(replace(batch, host_prompt_lens=prompts))
    assert forms.absorbed is not None and forms.expanded is not None
    assert forms.expanded.tokens is not None and forms.absorbed.tokens is not None
    assert forms.expanded.tokens.tolist() == [*range(12), 13, 14, 15]
    assert forms.absorbed.tokens.tolist() == [12, *range(16, 27)]
    for part, lens, ends in (
        (forms.expanded, [12, 3], [12, 15]),
        (forms.absorbed, [1, 5, 6], [9, 20, 6]),
    ):
        assert part.batch.host_query_lens.tolist() == lens
        assert part.batch.host_context_lens.tolist() == part.batch.context_lens.tolist() == ends
        assert part.batch.query_starts.tolist() == [0, *np.cumsum(lens).tolist()]
        assert torch.equal(part.batch.slots, batch.slots[part.tokens])


def test_rounds_are_bounded() -> None:
    """Red when a long context, or many of them, are expanded all at once."""
    case = make_latent_case([20_000, 9_000, 3_000, 3_000, 3_000], Sizes(1, 16, 16, 16, 16))
    batch = case.paged.batch([64, 9_000, 3_000, 1, 3_000], [20_000, 9_000, 3_000, 3_000, 3_000],
                             range(5))  # fmt: skip
    plan = plan_rounds(batch, tile_tokens=128)
    assert plan.has_states
    assert max(len(part.slots) for part in plan.rounds) <= MAX_ROUND_KEYS
    assert sum(len(part.slots) for part in plan.rounds) == 20_000 + 9_000 + 3 * 3_000
    finished = sum(int(part.tiles[:, 6].sum()) for part in plan.rounds)
    assert finished == 1 + 71 + 24 + 1 + 24  # every tile once
