from __future__ import annotations

import pytest

from quire.bench.workload import Span, percentile, random_jobs, skewed_jobs, spread
from quire.errors import BadRequest


def test_the_same_seed_is_the_same_work():
    make = lambda seed: random_jobs(9, Span(3, 8), Span(1, 4), 50, seed)  # noqa: E731
    assert make(1) == make(1) != make(2)
    assert all(3 <= len(job.prompt) <= 8 and 1 <= job.num_output <= 4 for job in make(1))
    assert all(0 <= token < 50 for job in make(1) for token in job.prompt)


@pytest.mark.parametrize("max_len", [64, 128, 512, 4096])
def test_skewed_work_fits_the_context_and_shares_a_prefix(max_len):
    jobs = skewed_jobs(40, max_len, vocab_size=100)
    shared = max_len // 4
    assert len({job.prompt[:shared] for job in jobs}) == 1
    assert len({job.prompt for job in jobs}) == len(jobs)
    assert max(job.num_tokens for job in jobs) < max_len
    outputs = sorted(job.num_output for job in jobs)
    assert outputs[-1] > 3 * outputs[len(outputs) // 2]  # a few long answers among short ones


def test_spread_takes_short_middle_and_long():
    jobs = random_jobs(30, Span(1, 300), Span(1, 1), 50)
    lengths = sorted(job.num_tokens for job in jobs)
    chosen = [jobs[i].num_tokens for i in spread(jobs, 3)]
    assert sorted(chosen) == [lengths[5], lengths[15], lengths[25]]
    assert spread(jobs, 30) == list(range(30))


def test_percentile_is_a_value_that_occurred():
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0
    assert percentile([1.0], 0.99) == 1.0


@pytest.mark.parametrize("text", ["", "0", "9-3", "a-b", "-4"])
def test_bad_spans(text):
    with pytest.raises(BadRequest, match="want a number or a span"):
        Span.parse(text)
