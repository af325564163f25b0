"""The pages in docs/, against the code they speak of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.load import gguf_checkpoint
from quire.load.gguf_types import GGML_TYPES
from quire.models.families_doc import with_parts
from quire.models.registry import FAMILIES, spec_of
from quire.models.sequence_head import SUFFIX, language_model_of
from quire.models.tiny_configs import NUM_LABELS, tiny_config
from quire.server.routes import routes
from quire.server.settings import ServeSettings
from tests.rules.source import FUNCTIONS, PACKAGE, ROOT, trees

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
MODELS = PAGES["docs/models.md"]
MAX_COMMITS = 3
MAX_FIGURE_LINES = 150


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """(words, lines of output) of every `quire inspect` in docs/models.md."""
    for block in re.findall(r"```\n\$ quire (.*?)```", MODELS, re.DOTALL):
        command, *lines = block.splitlines()
        yield command, [line for line in lines if line]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Red when a file is moved or renamed and a page still points at its old place."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page])
    folder = (ROOT / page).parent
    lost = [t for t in targets if "://" not in t and not (folder / t).exists()]
    assert lost == []


def lost_files(text: str, folder: Path) -> list[str]:
    """Files named in backticks, alone or in a command, that are in none of the usual places."""
    named = re.findall(r"`(?:python )?((?:[\w.-]+/)+[\w.-]+\.\w+|[\w-]+\.py)\b[^`]*`", text)
    places = (folder, ROOT, PACKAGE)
    return sorted({name for name in named if not any((at / name).exists() for at in places)})


@pytest.mark.parametrize("page", PAGES)
def test_files_named_are_there(page: str) -> None:
    """Red when a page names a source file, in words and not as a link, that is gone."""
    assert lost_files(PAGES[page], (ROOT / page).parent) == []


def test_files_named_in_docstrings_are_there() -> None:
    """Red when a file moves and a docstring still sends its reader to the old place."""
    lost = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
                text = ast.get_docstring(node) or ""
                lost += [f"{path}: {name}" for name in lost_files(text, (ROOT / path).parent)]
    assert lost == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_present(page: str) -> None:
    """Red when a page becomes a notebook: what was measured at which commit is git's to keep."""
    words = re.findall(r"\b[0-9a-f]{7,40}\b", PAGES[page])
    commits = [word for word in words if not word.isdigit() and not word.isalpha()]
    assert len(commits) <= MAX_COMMITS, commits


@pytest.mark.parametrize("page", ("docs/benchmarks.md", "docs/performance.md"))
def test_figures_fit_a_short_page(page: str) -> None:
    """Red when figures are added and older ones stay."""
    assert len(PAGES[page].splitlines()) < MAX_FIGURE_LINES


def test_every_endpoint_is_on_its_page() -> None:
    """Red when a path comes or goes and docs/api.md says nothing of it."""
    told = set()
    for row in re.findall(r"^\| (`(?:GET|POST) .*?) \|", PAGES["docs/api.md"], re.MULTILINE):
        for path in re.findall(r"(?:`|`GET |`POST )(/[^`?]*)[^`]*`", row):
            stem, _, names = path.partition("{")
            several = names.rstrip("}").split(",")
            told |= {stem + name for name in several} if len(several) > 1 else {path}
    told = {re.sub(r"\{\w+\}", "{}", path) for path in told}
    assert told == {r.path for r in routes(ServeSettings()) if not r.path.startswith("/page")}


def test_the_page_of_models_is_fresh() -> None:
    """Red when a family comes, goes or changes and docs/models.md does not."""
    assert with_parts(MODELS) == MODELS, "run: python -m quire.models.families_doc docs/models.md"


@pytest.mark.parametrize("words, lines", shown_commands())
def test_inspect_says_what_the_page_shows(
    words: str,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red when groups, pages or bytes are counted otherwise, or a table changes its form."""
    monkeypatch.chdir(ROOT)
    assert len(lines) > 8 and main(words.split()) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line not in said] == []


def test_forms_of_gguf_on_the_page_are_those_that_load() -> None:
    """Red when a storage type or an architecture is added, or named without being there."""
    (row,) = (line for line in MODELS.splitlines() if line.startswith("| GGUF"))
    types, architectures, *_ = (re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:])
    known = {t.name for t in GGML_TYPES.values()}
    assert set(types) == known - {"F64", "I8", "I16", "I32", "I64"}  # nobody has weights of these
    assert set(architectures) == set(gguf_checkpoint._NAMINGS)


@pytest.mark.parametrize("family", FAMILIES.entries)
def test_every_family_classifies(family: str) -> None:
    """Red when the page's `...ForSequenceClassification of every family` is not so."""
    if family == "Gemma3ForConditionalGeneration":
        return  # its text model's is Gemma3TextForSequenceClassification
    base = family.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    name = ("Gemma3Text" if base == "Gemma3" else base) + SUFFIX
    assert language_model_of(name) == family
    assert spec_of(tiny_config(name)).num_labels == NUM_LABELS
