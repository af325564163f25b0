"""The report of a pass: what it names best, and that it says so where a smaller model loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.compress.beside import Beside, meanings
from quire.compress.source import Source
from tests.compress.models import small


def row(name: str, size: float, divergence: float | None, folder: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "size": {"weight_bytes": size}, "decode_tok_s": 100.0}
    made["options"] = {} if folder else {"quantization": name}
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
    want = (
        "it loses to the best form rounded at load at the same bytes: int8 has KL 0.0100 in 55 MB"
    )
    assert want in lost[1] and "`--beside DIR` weighs them too" in lost[2]
    won = meanings([original, made, row("int4", 40e6, 0.7)])
    assert "it beats the best form rounded at load at the same bytes: pruned" in won[1]
    folders = [row("int8", 55e6, 0.01), row("awq", 50e6, 0.002, folder=True)]
    lost = meanings([original, made, *folders])
    assert "it loses to the model beside it at the same bytes: awq has KL 0.0020" in lost[-1]
    alone = meanings([original, made, row("mxfp4", 80e6, 0.3)])[-1]
    assert "no form rounded at load is as small as its 60 MB: the smallest, mxfp4" in alone
    assert "60 % of the original's bytes" in won[0]
    assert "nothing beside it" in meanings([original, made])[-1]
    larger = meanings([row("original", 50e6, None), made])
    assert any("nothing is gained" in sentence for sentence in larger)


def test_forms_that_fit(tmp_path: Path) -> None:
    """Red when a form that is larger stands for one of the same bytes, or nothing stands beside a
    model that is smaller than any."""
    model, out = small(tmp_path), tmp_path / "out"
    num_bytes = Source.open(str(model)).spec.num_params * 4
    out.mkdir()
    want = {
        num_bytes: ["rtn-int8-g32", "rtn-int4-g32"],
        num_bytes // 6: ["rtn-int4-g32"],
        num_bytes // 9: ["mxfp4"],
    }
    for size, forms in want.items():
        (out / "model.safetensors").write_bytes(bytes(size))
        assert Beside(str(model), out)._forms() == forms
