"""Recipes: several passes, one after the other, read from a file and taken up after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.compress.chain import Chain
from quire.compress.passes.recipe import OPTIONS, Recipe
from quire.compress.pipeline import Progress
from quire.compress.recipe_file import FIELDS, read_plan
from quire.errors import BadRequest
from tests.compress.models import CPU, job, run, small

STEPS = """
[calibration]
file = "calibration.txt"
samples = 6
length = 32
[[step]]
method = "wanda"
pattern = "2:4"
[[step]]
method = "rtn"
bits = 8
group-size = 32
keep = ["lm_head"]
"""


def written(folder: Path, text: str = STEPS) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_every_field_has_a_key() -> None:
    """Red when a recipe gets a field that no option and no file can set."""
    names = set(Recipe("rtn").__dataclass_fields__) - {"method"}
    assert names == set(OPTIONS) == set(FIELDS.values())


def test_steps_are_as_if_run_by_hand(tmp_path: Path) -> None:
    """Red when a step reads another model than the one before wrote, or an option is lost."""
    model = small(tmp_path)
    job(model, tmp_path, "wanda")  # writes the text
    out = tmp_path / "out"
    words = ["compress", str(model), "--recipe", str(written(tmp_path)), "--out", str(out)]
    words += ["--no-report"]
    assert main(words) == 0
    run(model, tmp_path / "one", "wanda", pattern="2:4")
    run(tmp_path / "one", tmp_path / "two", "rtn", bits=8)
    for file in (tmp_path / "two").glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes()
    assert not (tmp_path / "out.steps").exists()
    assert main(words) == 2  # it is there already


def test_it_goes_on_where_it_died(tmp_path: Path) -> None:
    """Red when a step that was done is done again, or another recipe goes on with it."""
    model = small(tmp_path)
    job(model, tmp_path, "wanda")
    chain = Chain(str(model), tmp_path / "out", read_plan(written(tmp_path)), CPU)
    seen: list[str] = []

    def die(made: Progress) -> None:
        seen.append(made.what)
        if made.what == "step 2 of 2, block 0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chain.run(die)
    other = read_plan(written(tmp_path, STEPS.replace("2:4", "1:4")))
    with pytest.raises(BadRequest, match="another model, recipe"):
        Chain(str(model), tmp_path / "out", other, CPU).run(lambda made: None)
    again: list[Progress] = []
    chain.run(again.append)
    assert [(made.what, made.is_resumed) for made in again] == [
        ("step 2 of 2, block 0", True),
        ("step 2 of 2, block 1", False),
    ]
    report = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert report["method"] == "rtn" and report["zeros"] >= 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "is no TOML"),
        ("", "at least one"),
        ("[[step]]\nbits = 4", "got method=None"),
        ('[[step]]\nmethod = "gtpq"', "did you mean 'gptq'"),
        ('[[step]]\nmethod = "rtn"\nbit = 4', "unknown key 'bit'; did you mean 'bits'"),
        ('[[step]]\nmethod = "rtn"\nbits = "4"', "got bits='4', want int"),
        ('[[step]]\nmethod = "rtn"\nbits = true', "got bits=True, want int"),
        ('[[step]]\nmethod = "rtn"\nkeep = "a"', "want a list of names"),
        ('calibration = 3\n[[step]]\nmethod = "rtn"', "want a table"),
        ('[calibration]\nlength = 0\n[[step]]\nmethod = "rtn"', "want 1 or more"),
    ],
)
def test_what_a_file_may_not_say(text: str, message: str, tmp_path: Path, capsys: Any) -> None:
    """Red when a typing error is ignored, or told as a trace."""
    words = ["compress", "MODEL", "--recipe", str(written(tmp_path, text)), "--out", "x"]
    assert main(words) == 2
    assert message in capsys.readouterr().err
