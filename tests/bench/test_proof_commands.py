"""`quire bench h200`, `roofline` and `profile` as they are typed."""

from __future__ import annotations

import json

import pytest

from quire.cli.main import main
from quire.native.library import find_library
from tests.tiny_folder import write_tiny_folder

ENGINE = ["--kv-cache-memory", "8MiB", "--threads", "1"]


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_rehearse_then_draw_then_table_again(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--rehearse", "--rows", "decode-0.6b-1,nano-0.6b", "--out", str(out), *ENGINE]
    assert main(["bench", "h200", *words]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("| workload")
    assert "Qwen3-0.6B nano benchmark" in shown.err  # told as it happens
    found = json.loads(shown.out.splitlines()[-1])
    assert [line["name"] for line in found["rows"]] == ["decode-0.6b-1", "nano-0.6b"]
    assert (out / "h200.png").read_bytes().startswith(b"\x89PNG")
    assert "| Qwen3-0.6B decode, batch 1 | ms |" in (out / "h200.md").read_text()

    saved, picture = str(out / "h200.json"), tmp_path / "roof.png"
    assert main(["bench", "roofline", saved, "--out", str(picture)]) == 0
    assert last_json(capsys)["steps"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")

    again = tmp_path / "again"
    assert main(["bench", "h200", "--from", saved, "--out", str(again), "--json"]) == 0
    assert last_json(capsys) == found
    assert (again / "h200.md").read_text() == (out / "h200.md").read_text()


def test_a_lost_row_is_a_failure_with_the_rest_kept(tmp_path, capsys):
    data = {"what": "h200", "engines": {}, "rows": {"mixed-8b": {"error": "no memory"}}}
    (tmp_path / "h200.json").write_text(json.dumps(data))
    words = ["--from", str(tmp_path / "h200.json"), "--out", str(tmp_path)]
    assert main(["bench", "h200", *words]) == 1
    shown = capsys.readouterr()
    assert "no figure for mixed-8b" in shown.err and "no plot" in shown.err
    assert "no memory" in (tmp_path / "h200.md").read_text()


def test_rows_can_be_listed_and_mistyped(capsys):
    assert main(["bench", "h200", "--list", "--rows", "long-8b"]) == 0
    assert "long-8b-128k" in capsys.readouterr().out
    assert main(["bench", "h200", "--rows", "decode-8"]) == 2
    assert "did you mean 'decode-8b'" in capsys.readouterr().err


def test_a_native_step_cannot_be_profiled(tmp_path, capsys):
    """Red when a profile shows nothing and says nothing."""
    if find_library().library is None:
        pytest.skip(find_library().reason)
    folder = str(write_tiny_folder(tmp_path / "tiny", tokenizer=False))
    assert main(["bench", "profile", folder, *ENGINE, "--load-format", "dummy"]) == 2
    assert "set QUIRE_CPU_ISA=torch" in capsys.readouterr().err


def test_profile_of_a_folder(tmp_path, capsys, without_native_steps):
    folder = str(write_tiny_folder(tmp_path / "tiny", tokenizer=False))
    words = ["--load-format", "dummy", "--batches", "1,2", "--prefill", "16", "--context", "8"]
    saved = tmp_path / "profile.json"
    line = ["bench", "profile", folder, *ENGINE, *words, "--steps", "2"]
    assert main([*line, "--out", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "decode, batch 2:" in out and "| whole step" in out
    record = json.loads(out.splitlines()[-1])
    assert record == json.loads(saved.read_text())
    assert len(record["steps"]) == 3 and record["ceilings"]["bandwidth"] > 0
    assert main([*line, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("### decode, batch 1")


def test_profile_refuses_two_models_and_unknown_shapes(tmp_path, capsys):
    assert main(["bench", "profile", str(tmp_path), "--shape", "8b"]) == 2
    assert "give one" in capsys.readouterr().err
    assert main(["bench", "profile", "--shape", "9b"]) == 2
    assert "known: 8b, 0.6b, 14b" in capsys.readouterr().err
    assert main(["bench", "profile", "--batches", "1,x"]) == 2
    assert "want a whole number" in capsys.readouterr().err
