"""Each measurement runs on a tiny model and ends in one line of JSON."""

from __future__ import annotations

import builtins
import json
import sys

import pytest

from quire.cli.main import main
from tests.cli.conftest import ENGINE


def test_throughput(mute, run_json):
    words = ["--requests", "5", "--prompt-len", "4-9", "--output-len", "2-6"]
    (record,) = run_json("bench", "throughput", mute, *ENGINE, *words)
    assert record["what"] == "throughput" and record["requests"] == 5
    assert 20 <= record["prompt_tokens"] <= 45
    assert record["output_tok_s"] == pytest.approx(
        record["output_tokens"] / record["seconds"], rel=0.01
    )


@pytest.mark.parametrize("what", ["latency", "throughput"])
def test_a_request_that_failed_gives_no_figure(mute, what, monkeypatch, capsys):
    """Red when the time of a request that was cut short is reported as a measurement."""

    def lost(*args):
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("quire.sample.sampler.Sampler.__call__", lost)
    assert main(["bench", what, mute, *ENGINE]) == 1
    assert "a kernel failed" in capsys.readouterr().err


def test_latency_table_ends_in_json(mute, capsys):
    words = ["--prompt-len", "8", "--output-len", "4", "--repeats", "1"]
    assert main(["bench", "latency", mute, *ENGINE, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| latency")
    assert json.loads(lines[-1])["decode_tok_s"] > 0


def test_startup_is_a_fresh_process(mute, run_json):
    (record,) = run_json("bench", "startup", mute, *ENGINE, "--repeats", "1")
    parts = record["importing"] + record["building"] + record["first_token"]
    assert 0 < parts < record["total"]


def test_startup_tells_why_it_failed(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert (
        main(["bench", "startup", str(tmp_path), "--load-format", "dummy", "--repeats", "1"]) == 1
    )
    assert "architectures" in capsys.readouterr().err


def test_ladder(mute, run_json, tmp_path):
    (record,) = run_json("bench", "ladder", mute, *ENGINE, "--quick", "--out", str(tmp_path))
    assert record["outputs_identical"] is True
    assert [r["name"] for r in record["rungs"]][:2] == ["no cache", "KV cache"]
    assert json.loads((tmp_path / "ladder.json").read_text()) == record
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_ladder_without_matplotlib_says_so(mute, tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def no_plots(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    for name in [n for n in sys.modules if n.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_plots)
    words = ["--quick", "--requests", "2", "--out", str(tmp_path)]
    assert main(["bench", "ladder", mute, *ENGINE, *words]) == 0
    shown = capsys.readouterr()
    assert "no plot: plots need matplotlib" in shown.err
    assert "outputs identical: yes" in shown.out
    assert not (tmp_path / "ladder.png").exists() and (tmp_path / "ladder.json").exists()
