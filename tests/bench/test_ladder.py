from __future__ import annotations

from dataclasses import replace

import pytest

from quire.bench.drive import Run
from quire.bench.ladder import NOT_WITH_GROUPS, Ladder, LadderOptions, Rung, differences
from quire.bench.report import LADDER_COLUMNS, identical_line, ladder_rows, ladder_summary
from quire.config import EngineArgs
from quire.models.tiny import write_config
from quire.models.tiny_configs import tiny_config


def ladder(family, folder, requests, changes, **args):
    write_config(tiny_config(family, **changes), folder, tokenizer=False)
    args = EngineArgs(model=str(folder), load_format="dummy", num_threads=1, device="cpu", **args)
    return Ladder(args, replace(LadderOptions.quick(), requests=requests))


def climb(family, folder, requests, **changes):
    return ladder(family, folder, requests, changes).climb()


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return climb("llama", tmp_path_factory.mktemp("tiny"), 16)


def test_techniques_change_no_answer(result):
    assert result.differing == []
    assert identical_line(result) == "outputs identical: yes"


def test_every_rung_does_the_whole_work_but_the_labelled_first(result):
    whole = sum(job.num_output for job in result.jobs)
    first, *others = [rung for rung in result.rungs if rung.run]
    assert first.sample == 2 and first.run.num_tokens < whole
    assert [rung.run.num_tokens for rung in others] == [whole] * len(others)


def test_all_rungs_stay_within_one_budget(result):
    budget = result.num_pages * result.page_size
    assert budget == result.options.budget_rows * 128
    for rung in result.rungs:
        assert rung.run is None or rung.run.peak_reserved.reserved <= budget


def test_pages_fit_more_requests_than_reservations(result):
    at_once = {rung.name: rung.run.peak_running for rung in result.rungs if rung.run}
    assert at_once["continuous batch"] == result.options.budget_rows
    assert at_once["paged cache"] > at_once["continuous batch"]
    waste = {rung.name: rung.run.waste for rung in result.rungs if rung.run}
    assert waste["paged cache"] < waste["continuous batch"] / 2


def test_the_prefix_is_computed_once_not_for_everyone(result):
    peak = {rung.name: rung.run.peak_reserved for rung in result.rungs if rung.run}
    paged, shared = peak["paged cache"], peak["prefix cache"]
    assert shared.reserved / shared.num_running < paged.reserved / paged.num_running


def test_the_table_has_a_cell_for_every_column(result):
    summary = ladder_summary(result)
    rows = ladder_rows(summary["rungs"])
    assert {len(row) for row in rows} == {len(LADDER_COLUMNS)}
    assert rows[0][0] == "no cache (2 of 16 requests)"
    assert rows[-1][:2] == ["CUDA graphs", "n/a"]
    assert summary["rungs"][1]["vs_previous"] == summary["rungs"][1]["vs_first"]


def test_a_changed_token_is_named():
    same, other = Run(outputs={0: [1, 2, 3], 1: [4]}), Run(outputs={0: [1, 2, 9], 1: [4]})
    rungs = [Rung("a", "", same), Rung("b", "", other), Rung("c", "", None)]
    assert differences(rungs) == ["b: job 0 from token 2"]


def test_layers_that_see_different_distances_begin_with_pages(tmp_path):
    """Red when a windowed model runs on rows that write one of its tables, or on one big group."""
    result = climb("gemma3_text", tmp_path, 6)  # five windowed layers and a full one
    notes = {rung.name: rung.note for rung in result.rungs if rung.run is None}
    assert notes.pop("CUDA graphs")
    assert set(notes) == {"no cache", "KV cache", "static batch", "continuous batch"}
    assert set(notes.values()) == {NOT_WITH_GROUPS}
    assert result.differing == []
    whole = sum(job.num_output for job in result.jobs)
    assert [rung.run.num_tokens for rung in result.rungs if rung.run] == [whole] * 3
    assert result.num_pages == result.options.budget_rows * 6 * 128 // result.page_size
    assert result.slot_bytes == 2 * 2 * 16 * 4  # keys and values, heads, dims, bytes: one layer's
    rows = ladder_rows(ladder_summary(result)["rungs"])
    assert {len(row) for row in rows} == {len(LADDER_COLUMNS)}


@pytest.mark.parametrize(
    "family, changes, slot_bytes",
    [
        ("deepseek_v2", {}, 3 * (24 + 8) * 4),  # layers, latent and rotated key, bytes
        ("mistral", {"sliding_window": 24}, 2 * 2 * 2 * 16 * 4),  # one window: one table
    ],
)
def test_other_caches_climb_every_rung(tmp_path, family, changes, slot_bytes):
    """Red when pages of latents are counted as keys and values, or one window as several."""
    result = climb(family, tmp_path, 6, **changes)
    assert result.differing == []
    assert [rung.name for rung in result.rungs if rung.run is None] == ["CUDA graphs"]
    assert result.num_pages == result.options.budget_rows * 128 // result.page_size
    assert result.slot_bytes == slot_bytes


def test_rungs_with_and_without_a_prefix_cache_compute_alike(tmp_path):
    """Red when latents take another form because the user's own engine would have no cache."""
    made = ladder("deepseek_v2", tmp_path, 1, {}, enable_prefix_caching=False)
    assert not made.engine.runner.expand_prompts
