"""The suite's workloads are fixed by what others were measured with; its runs survive failures."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace

import pytest

from quire.bench.h200 import ResultFile, RunOptions, SuiteRun, merged_results, run_suite
from quire.bench.peers import VLLM
from quire.bench.startup import ChildFailed, child_records
from quire.bench.suite import Row, h200_suite, rehearsal, request_lengths
from quire.bench.suite_child import Workbench, measure
from quire.bench.suite_report import markdown, summary, table_rows
from quire.errors import BadRequest

ENGINE = {"kv_cache_memory": 8 << 20, "num_threads": 1}


def rows(*words: str) -> tuple[Row, ...]:
    return h200_suite().select(words).rows


# ---------------------------------------------------------------- what is measured


def test_every_row_has_the_figure_it_is_compared_with():
    alone = {"rtn-int4-g128", "int8", "sparse24"}  # nobody measured these
    assert {row.name for row in h200_suite().rows if row.form not in alone} == set(VLLM)


def test_packed_rows_ask_for_their_form(tmp_path):
    """Red when a row called int4 is measured on floats."""
    packed = rows("packed-int4")
    assert {row.form for row in packed} == {"rtn-int4-g128"}
    run = SuiteRun(h200_suite().select(["packed-int4"]), RunOptions(tmp_path / "h200.json"))
    assert run._engine_options(list(packed))["quantization"] == "rtn-int4-g128"
    assert "quantization" not in run._engine_options(list(rows("decode-8b")))


def test_lengths_are_drawn_in_the_order_others_were_measured_with():
    """Red when a change of the draws makes another workload of the same name."""
    (mixed, nano) = rows("mixed-8b", "nano-0.6b")
    r = random.Random(0)
    pairs = [(r.randint(100, 1024), r.randint(100, 1024)) for _ in range(512)]
    assert request_lengths(mixed, 1) == pairs
    r = random.Random(1)
    prompts = [r.randint(100, 1024) for _ in range(256)]
    assert request_lengths(nano, 1) == [(p, r.randint(100, 1024)) for p in prompts]


def test_long_contexts_decide_the_length_of_their_engine():
    suite = h200_suite()
    assert suite.max_model_len(rows("decode-8b", "long-8b")) == 131072
    assert suite.max_model_len(rows("decode-8b", "prefill-8b")) == 9216
    assert suite.max_model_len(rows("start")) == 9216


def test_rows_are_chosen_by_name_or_group():
    names = [row.name for row in rows("decode-14b", "prefill-8b-512")]
    assert names == ["prefill-8b-512", "decode-14b-1", "decode-14b-64"]
    with pytest.raises(BadRequest, match="did you mean 'decode-8b'"):
        rows("decode8b")


class Clockwork:
    """An engine whose requests take a second for the prompts and 10 ms for each later step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, []
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def generate(self, prompts, params, use_tqdm):
        from types import SimpleNamespace

        most = max(p.max_tokens for p in params)
        self.calls.append((len(prompts), [len(p["prompt_token_ids"]) for p in prompts], most))
        self.now += 1.0 + 0.01 * (most - 1)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.max_tokens)]) for p in params
        ]


def test_a_decode_step_is_what_later_tokens_cost(monkeypatch):
    """Red when prompts are counted into a step, or a run is left out of the medians."""
    engine = Clockwork(monkeypatch)
    (row,) = rows("decode-8b-32")
    found = measure(Workbench(engine, 1000), row)
    assert found["value"] == pytest.approx(10.0)
    assert found["tok_s"] == pytest.approx(3200)
    assert [call[2] for call in engine.calls] == [4, 1, 1, 1, 256, 256, 256]
    assert {call[0] for call in engine.calls} == {32}
    assert {length for call in engine.calls for length in call[1]} == {128}


def test_prefill_leaves_out_two_runs_and_throughput_takes_the_better(monkeypatch):
    engine = Clockwork(monkeypatch)
    (prefill, mixed) = rows("prefill-8b-512", "mixed-8b")
    assert measure(Workbench(engine, 1000), prefill)["value"] == pytest.approx(1000)
    assert len(engine.calls) == 7
    engine.calls.clear()
    found = measure(Workbench(engine, 1000), mixed)
    num = sum(n for _, n in request_lengths(mixed, 0))
    longest = max(n for _, n in request_lengths(mixed, 0))
    assert found["value"] == pytest.approx(num / (1 + 0.01 * (longest - 1)))
    assert len(found["runs"]) == 2


def test_prefix_row_shares_its_prefix_and_nothing_else(monkeypatch):
    engine = Clockwork(monkeypatch)
    (row,) = rows("prefix-8b")
    seen = []
    real = engine.generate

    def generate(prompts, params, use_tqdm):
        seen.append([tuple(p["prompt_token_ids"]) for p in prompts])
        return real(prompts, params, use_tqdm)

    engine.generate = generate
    measure(Workbench(engine, 1000), row)
    assert [len(prompts) for prompts in seen] == [1, 256, 1, 256]
    heads = [{prompt[:2048] for prompt in prompts} for prompts in seen]
    assert all(len(found) == 1 for found in heads)
    assert heads[0] == heads[1] != heads[2] == heads[3]
    assert len({prompt[2048:] for prompt in seen[1]}) == 256
    assert {len(prompt) for prompt in seen[1]} == {2048 + 64}


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Every kind of row, through real processes and a real, tiny engine."""
    path = tmp_path_factory.mktemp("suite") / "h200.json"
    words = ["start", "decode-8b-8", "prefill-8b-512", "mixed-8b", "prefix-8b", "long-8b-32k"]
    said: list[str] = []
    suite = rehearsal(h200_suite()).select(words)
    data = run_suite(suite, RunOptions(path, engine=ENGINE, say=said.append))
    return path, data, said


def test_a_rehearsal_measures_every_kind_of_row(rehearsed):
    path, data, said = rehearsed
    assert [name for name, row in data["rows"].items() if row.get("value", 0) <= 0] == []
    assert len(data["rows"]) == len(said) == 7
    assert json.loads(path.read_text()) == data
    first, again = (data["rows"][f"start-8b-{turn}"] for turn in ("first", "again"))
    assert first["value"] > again["runs"]["building"] > 0
    assert data["engines"]["8b"]["engine"]["device"] == "cpu"
    rates = data["engines"]["8b"]["machine"]
    assert list(rates) == ["before", "after"]
    assert all(rate > 0 for found in rates.values() for rate in found.values())
    assert "after its rows: the machine reads" in markdown(data)


def test_a_rehearsal_is_compared_with_nobody(rehearsed):
    _, data, _ = rehearsed
    found = summary(data)
    assert found["geomean_vs_vllm"] is None
    assert {line["vllm"] for line in found["rows"]} == {line["limit"] for line in found["rows"]}
    assert "none of these figures means anything" in markdown(data)


def test_a_rehearsal_does_not_mix_with_results(rehearsed, tmp_path):
    path, _, _ = rehearsed
    with pytest.raises(BadRequest, match="name another"):
        ResultFile(path, "h200")
    ResultFile(tmp_path / "real.json").put("rows", "mixed-8b", {"value": 1.0})
    with pytest.raises(BadRequest, match="rehearsal"):
        merged_results([path, tmp_path / "real.json"])


class Children:
    """Processes of which each says its lines; the text "dies" among them is its end."""

    def __init__(self, *scripts: list[object]) -> None:
        self.scripts, self.asked = list(scripts), []

    def __call__(self, module, task):
        self.asked.append([row["name"] for row in task["rows"]])
        for said in self.scripts.pop(0):
            if said == "dies":
                raise ChildFailed("the measured process failed: CUDA error", ["a trace"])
            yield dict(said)


def run_with(children, monkeypatch, tmp_path):
    monkeypatch.setattr("quire.bench.h200.child_records", children)
    suite = h200_suite().select(["decode-8b-1", "decode-8b-8", "decode-8b-32"])
    return run_suite(suite, RunOptions(tmp_path / "h200.json"))["rows"]


UP = {"engine": {"device": "NVIDIA H200"}}


def test_a_row_that_fails_takes_no_other_with_it(monkeypatch, tmp_path):
    """Red when rows behind a failed one are lost, or it is tried for ever."""
    first, last = {"row": "decode-8b-1", "value": 4.0}, {"row": "decode-8b-32", "value": 5.0}
    children = Children([UP, first, "dies"], [UP, last])
    found = run_with(children, monkeypatch, tmp_path)
    assert children.asked[1] == ["decode-8b-32"]
    assert found["decode-8b-1"]["value"] == 4.0 and found["decode-8b-32"]["value"] == 5.0
    assert "CUDA error" in found["decode-8b-8"]["error"]
    assert found["decode-8b-8"]["trace"] == ["a trace"]


def test_an_engine_that_does_not_come_up_is_tried_once(monkeypatch, tmp_path):
    children = Children(["dies"])
    found = run_with(children, monkeypatch, tmp_path)
    assert len(children.asked) == 1
    assert ["CUDA error" in row["error"] for row in found.values()] == [True] * 3


def test_an_engine_that_does_not_come_up_again_ends_the_shape(monkeypatch, tmp_path):
    children = Children([UP, "dies"], ["dies"])
    found = run_with(children, monkeypatch, tmp_path)
    assert len(children.asked) == 2 and len(found) == 3


def test_a_process_that_fails_after_its_last_row_has_lost_nothing(monkeypatch, tmp_path):
    rows = [{"row": f"decode-8b-{batch}", "value": 4.0} for batch in (1, 8, 32)]
    found = run_with(Children([UP, *rows, "dies"]), monkeypatch, tmp_path)
    assert [row["value"] for row in found.values()] == [4.0] * 3


def test_what_a_process_said_last_is_kept():
    with pytest.raises(ChildFailed, match="can't open") as failure:
        list(child_records("json.tool", {}))
    assert failure.value.trace


def test_rows_that_come_too_late_are_not_begun(tmp_path):
    suite = rehearsal(h200_suite()).select(["decode-8b-1", "start"])
    late = replace(suite, rows=tuple(replace(row, need_s=1e6) for row in suite.rows))
    data = run_suite(late, RunOptions(tmp_path / "h200.json", engine=ENGINE))
    assert all("s left" in row["skipped"] for row in data["rows"].values())


def test_every_figure_is_on_disk_when_it_is_known_and_later_runs_add_to_it(tmp_path):
    path = tmp_path / "deep" / "h200.json"
    ResultFile(path).put("rows", "mixed-8b", {"value": 1.0})
    assert json.loads(path.read_text())["rows"] == {"mixed-8b": {"value": 1.0}}
    ResultFile(path).put("rows", "prefix-8b", {"value": 2.0})
    assert set(json.loads(path.read_text())["rows"]) == {"mixed-8b", "prefix-8b"}
    assert [p.name for p in path.parent.iterdir()] == ["h200.json"]
    (tmp_path / "other.json").write_text('{"what": "ladder"}')
    with pytest.raises(BadRequest, match="not a file of"):
        ResultFile(tmp_path / "other.json")


def test_a_later_figure_stands_and_lack_of_time_does_not_erase_one(tmp_path):
    paths = [tmp_path / f"{name}.json" for name in ("a", "b", "c")]
    for path, record in zip(
        paths, ({"value": 1.0}, {"value": 2.0}, {"skipped": "3 s left"}), strict=True
    ):
        ResultFile(path).put("rows", "mixed-8b", record)
    assert merged_results(paths)["rows"] == {"mixed-8b": {"value": 2.0}}
    ResultFile(paths[0]).put("rows", "mixed-8b", {"error": "out of memory"})
    assert merged_results(paths[:1])["rows"]["mixed-8b"] == {"error": "out of memory"}


# ---------------------------------------------------------------- the table


def results(**values: float) -> dict[str, object]:
    named = {name.replace("_", "-"): value for name, value in values.items()}
    found = {name: {"value": value, "limit": 2.0} for name, value in named.items()}
    return {"what": "h200", "rows": found, "engines": {}}


def test_ratios_are_of_speed_and_the_mean_is_geometric():
    data = results(decode_8b_1=4.0, mixed_8b=20000.0, start_8b_first=7.0)
    found = summary(data)
    ratios = {line["name"]: line["vs_vllm"] for line in found["rows"]}
    assert ratios["decode-8b-1"] == pytest.approx(4.92 / 4.0)
    assert ratios["mixed-8b"] == pytest.approx(20000 / 11857)
    assert ratios["start-8b-first"] == pytest.approx(10.0)
    assert found["num_compared"] == 2  # start-up stays out
    assert found["geomean_vs_vllm"] == pytest.approx(
        statistics.geometric_mean([ratios["decode-8b-1"], ratios["mixed-8b"]])
    )
    assert {line["name"]: line["of_limit"] for line in found["rows"]}["decode-8b-1"] == 0.5


def test_a_lost_row_is_shown_and_not_averaged():
    data = results(decode_8b_1=4.0)
    data["rows"]["decode-8b-8"] = {"error": "out of memory", "limit": 3.6}
    found = summary(data)
    assert found["num_compared"] == 1
    assert table_rows(found)[1][2] == "failed"
    assert "8B decode, batch 8: out of memory" in markdown(data)


def test_other_machines_are_named_in_the_table():
    data = results(decode_8b_1=4.0)
    data["engines"] = {"8b": {"engine": {"device": "NVIDIA A100"}}}
    assert "8b ran on NVIDIA A100: ratios here compare machines" in markdown(data)
    data["engines"] = {"8b": {"engine": {"device": "NVIDIA H200"}}}
    assert "compare machines" not in markdown(data)
