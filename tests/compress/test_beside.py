"""The report of a pass: what it names best, and that it says so where a smaller model loses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.cli.main import main
from quire.compress.beside import meanings
from quire.compress.calibration import BUILT_IN
from tests.compress.models import job, small


def row(name: str, size: float, divergence: float | None, speed: float = 100.0) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "size": {"weight_bytes": size}, "decode_tok_s": speed}
    if divergence is not None:
        made["against"] = {
            "kl_mean": {"value": divergence},
            "perplexity_change_percent": {"value": 3.0},
        }
    return made


def test_it_says_who_wins_at_the_same_bytes() -> None:
    """Red when a larger model counts as one of the same bytes, or a loss is told as a win."""
    original, made = row("original", 100e6, None), row("pruned", 60e6, 0.5)
    lost = meanings([original, made, row("int8", 55e6, 0.01), row("big", 70e6, 0.001)])
    assert "loses to quantisation: int8 has KL 0.0100 in 55 MB" in lost[-1]
    won = meanings([original, made, row("int4", 40e6, 0.7)])
    assert "beats the best quantisation" in won[-1]
    assert "60 % of the original's bytes" in won[0]
    assert "nothing beside it" in meanings([original, made])[-1]
    larger = meanings([row("original", 50e6, None), made])
    assert any("nothing is gained" in sentence for sentence in larger)


def test_the_report_of_a_command(tmp_path: Path, capsys: Any) -> None:
    """Red when table, JSON or picture are missing, or the best quantisation is not beside it."""
    model = small(tmp_path, dtype="bfloat16")
    text = job(model, tmp_path, "wanda").calibration.file
    held_out = tmp_path / "held-out.txt"
    held_out.write_text(BUILT_IN.read_text(encoding="utf-8")[1000:1600], encoding="utf-8")
    words = ["prune", str(model), "--method", "wanda", "--pattern", "2:4", "--samples", "4"]
    words += ["--length", "32", "--calibration", str(text), "--text", str(held_out)]
    words += ["--tokens", "256", "--window", "64", "--device", "cpu", "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "| rtn-int8-g32" in said.out and "KL" in said.out
    assert "of the original's bytes" in said.err
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    names = [record["name"] for record in found["rows"]]
    assert names == ["original", "out", "rtn-int8-g32", "rtn-int4-g32"]
    assert (tmp_path / "out" / "report.png").stat().st_size > 1000
    words[words.index(str(held_out))] = str(text)  # it was calibrated on
    assert main([*words, str(tmp_path / "other")]) == 0
    assert "could not be judged" in capsys.readouterr().err
