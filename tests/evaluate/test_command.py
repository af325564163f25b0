"""quire evaluate as a user runs it, on tiny models: tables, JSON, a picture, mistakes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import BAD_INPUT, main
from quire.errors import BadRequest
from quire.evaluate.arms import parse_arm, parse_sweep
from quire.evaluate.report import _by_context
from quire.evaluate.stats import SPAN, token_mean
from tests.evaluate.conftest import TEXT, Tiny

ENGINE = ["--threads", "1", "--kv-cache-memory", "4MiB", "--window", "96", "--tasks", "none"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "held.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["evaluate", *words, *ENGINE, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_sweep(
    capsys: pytest.CaptureFixture[str], tiny: Tiny, shaken: Tiny, text: str, tmp_path: Path
) -> None:
    """Red when an arm loads another form than it says, or the first is not the reference."""
    folder, other, picture = str(tiny.folder), str(shaken.folder), tmp_path / "q.png"
    words = (folder, "--sweep", f"fp32,bf16,{other}", "--text", text, "--tokens", "192")
    found = evaluate(capsys, *words, "--plot", str(picture))
    first, second, third = found["rows"]
    assert found["against"] == "fp32" and "against" not in first
    assert (first["options"], second["options"]) == ({"dtype": "float32"}, {"dtype": "bfloat16"})
    assert second["size"]["weight_bytes"] < 0.6 * first["size"]["weight_bytes"]
    assert 0 < second["against"]["kl_mean"]["value"] < 0.01 < third["against"]["kl_mean"]["value"]
    assert third["model"] == other
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = evaluate(capsys, *words)
    for one, two in zip(found["rows"], again["rows"], strict=True):
        for key in ("perplexity", "bits_per_byte", "perplexity_by_context", "against", "tokens"):
            assert one.get(key) == two.get(key), key


def test_table(capsys: pytest.CaptureFixture[str], tiny: Tiny, text: str) -> None:
    words = (str(tiny.folder), "--text", text, "--tokens", "96", "--against", "bf16")
    assert main(["evaluate", *words, *ENGINE]) == 0
    header, _, reference, row = capsys.readouterr().out.splitlines()
    assert "KL p99" in header and "weights, MB" in header
    assert reference.startswith("| bf16") and tiny.folder.name in row


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--window", "9999"), "less than a window of 9999"),
        (("--window", "300", "--max-model-len", "301"), "give a smaller --window"),
        (("--sweep", "fp32,rtn-int4-g33"), "rtn-int4-g33"),
        (("--sweep", "fp32,fp32"), "twice"),
        (("--tasks", "arc"), "arc-easy"),
        (("--text", "/no/where.txt"), "/no/where.txt"),
        (("--against", "fp31"), "did you mean 'fp32'"),
    ],
)
def test_mistakes(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tiny: Tiny,
    text: str,
) -> None:
    """One line that names what was wrong, and exit code 2."""
    given = ["evaluate", str(tiny.folder), "--text", text, *ENGINE, "--max-model-len", "128"]
    assert main([*given, *words]) == BAD_INPUT
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_calibration_text_is_refused(
    capsys: pytest.CaptureFixture[str], tiny: Tiny, text: str, tmp_path: Path
) -> None:
    """Red when weights can be judged by the text they were calibrated on."""
    for file in tiny.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    sha256 = hashlib.sha256(Path(text).read_bytes()).hexdigest()
    (tmp_path / "compress.json").write_text(json.dumps({"calibration": [sha256, 4, 64]}))
    assert main(["evaluate", str(tmp_path), "--text", text, *ENGINE]) == BAD_INPUT
    assert "calibrated" in capsys.readouterr().err


def test_arms() -> None:
    assert parse_arm("packed", "m").options == {"dtype": "auto"}
    assert parse_arm("rtn-int8-g64-asym", "m").options == {"quantization": "rtn-int8-g64-asym"}
    assert parse_arm("gemma-3-270m", "m").model == "gemma-3-270m"
    assert parse_arm("org/model", "m").name == "model"
    with pytest.raises(BadRequest, match="want a dtype"):
        parse_sweep("fp32,", "m")


def test_errors_come_from_spans() -> None:
    """Red when neighbouring tokens are taken for independent: the error would be too small."""
    import numpy as np

    values = np.repeat(np.random.default_rng(0).normal(size=(4, 8)), SPAN, axis=1)
    found = token_mean(values)
    spans = values[:, ::SPAN]
    assert found.value == pytest.approx(spans.mean())
    assert found.error == pytest.approx(spans.std(ddof=1) / np.sqrt(32))


def test_contexts_are_counted_from_one() -> None:
    import numpy as np

    losses = np.zeros((1, 600))
    losses[0, 127:511] = np.log(2)  # those with 128 to 511 tokens before them
    assert _by_context(losses) == {"1-127": 1.0, "128-511": 2.0, "512-600": 1.0}
