"""The package's source as syntax trees, for the rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "quire"
TESTS = ROOT / "tests"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def trees(folder: Path = PACKAGE) -> dict[str, ast.Module]:
    """Path relative to the repository -> tree."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    }


def nodes(folder: Path = PACKAGE) -> Iterator[tuple[str, ast.AST]]:
    """(path:line, node) of everything in every file."""
    for path, tree in trees(folder).items():
        for node in ast.walk(tree):
            yield f"{path}:{getattr(node, 'lineno', 0)}", node


def dotted(node: ast.AST) -> str:
    """`os.environ.get` for the expression of that name, "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([node.id, *reversed(parts)])
    return ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).split(".")[-1] == "TYPE_CHECKING"


def imports(node: ast.AST, is_lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether inside a function) of every import that happens when code runs."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, is_lazy
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            module = child.module or ""
            if module == "quire":
                for alias in child.names:
                    yield f"quire.{alias.name}", is_lazy
            else:
                yield module, is_lazy
        yield from imports(child, is_lazy or isinstance(child, FUNCTIONS))
