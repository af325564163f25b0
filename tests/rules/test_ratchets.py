"""Ratchets: what must not grow. Every list here may only get shorter."""

from __future__ import annotations

import ast
import importlib
import re

from tests.rules.source import FUNCTIONS, PACKAGE, ROOT, TESTS, dotted, nodes, trees

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_PROTOCOL_METHODS = 5

LONG_FILES: set[str] = set()
LONG_FUNCTIONS = {
    "quire/kernels/merge_splits.py:_merge_kernel",
    "quire/kernels/paged_prefill.py:_prefill_kernel",
    "quire/kernels/paged_shared.py:_shared_kernel",
    "quire/kernels/paged_split.py:_split_kernel",
    "quire/kernels/rope_kv_write.py:_rope_kv_write_kernel",
    "quire/resolve.py:resolve",
}
LARGE_PROTOCOLS: set[str] = set()
BROAD_HANDLERS = {
    "quire/server/app.py",  # the server boundary: any bug is a 500, and the log has it
    "quire/server/batch_runner.py",  # the same boundary, for lines of a batch
}
TYPE_IGNORES = {
    "quire/cli/parser.py",
    "quire/cli/session.py",
    "quire/kernels/merge_splits.py",
    "quire/params.py",
    "quire/text/bounded.py",
}

# Here every value has a type; `Any` is for the edges (files, arguments, JSON).
FREE_OF_ANY = ("kv", "memory", "nn", "sample", "sched")
FREE_OF_ANY_FILES = ("config", "errors", "outputs", "params", "request", "resolve", "step")


def assert_shrinks(found: set[str], listed: set[str]) -> None:
    assert found - listed == set(), "new offenders"
    assert listed - found == set(), "fixed: take these off the list"


def test_files_are_short() -> None:
    """Red when a file outgrows one idea."""
    long = {
        path for path in trees() if len((ROOT / path).read_text().splitlines()) > MAX_FILE_LINES
    }
    assert_shrinks(long, LONG_FILES)


def test_functions_are_short() -> None:
    """Red when a function outgrows one screen."""
    long = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                    long.add(f"{path}:{node.name}")
    assert_shrinks(long, LONG_FUNCTIONS)


def test_protocols_are_small() -> None:
    """Red when a seam grows a sixth method."""
    large = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            if not any(dotted(base).split(".")[-1] == "Protocol" for base in node.bases):
                continue
            methods = [
                item
                for item in node.body
                if isinstance(item, FUNCTIONS)
                and not any(dotted(d) == "property" for d in item.decorator_list)
            ]
            if len(methods) > MAX_PROTOCOL_METHODS:
                large.add(f"{path}:{node.name}")
    assert_shrinks(large, LARGE_PROTOCOLS)


def test_no_global_state() -> None:
    """Red when a function writes a module's variable."""
    found = [where for where, node in nodes() if isinstance(node, ast.Global)]
    assert found == []


def test_environment_is_read_in_one_place() -> None:
    """Red when a setting hides in an environment variable nobody listed."""
    names = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    found = [
        where
        for where, node in nodes()
        if (isinstance(node, ast.Attribute) and dotted(node) in names)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {alias.name for alias in node.names} & {"environ", "getenv"}
        )
    ]
    assert [where for where in found if not where.startswith("quire/env.py:")] == []


def test_environment_variables_are_few_and_listed() -> None:
    """Red when env.py reads a variable it does not list, or the eleventh arrives."""
    env = importlib.import_module("quire.env")
    listed = {variable.name for variable in env.VARIABLES}
    assert len(listed) == len(env.VARIABLES) <= 10
    read = set()
    for node in ast.walk(trees()["quire/env.py"]):
        if isinstance(node, ast.Call) and dotted(node.func) in ("os.environ.get", "os.getenv"):
            name = node.args[0]
            assert isinstance(name, ast.Constant)
            read.add(name.value)
    assert read == listed


UNSAFE_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"torch.load", "eval", "exec", "os.system", "os.popen", "yaml.load", "np.load"}


def test_nothing_runs_what_a_file_says() -> None:
    """Red when a model file, a config or a request could make us run code."""
    found = []
    for where, node in nodes():
        if isinstance(node, ast.Import):
            found += [where for a in node.names if a.name.split(".")[0] in UNSAFE_IMPORTS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            UNSAFE_IMPORTS
        ):
            found.append(where)
        elif isinstance(node, ast.Call):
            if dotted(node.func) in UNSAFE_CALLS:
                found.append(where)
            for keyword in node.keywords:
                says_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("trust_remote_code", "shell", "allow_pickle") and says_true:
                    found.append(where)
    assert found == []


def test_no_drawers_for_everything() -> None:
    """Red when a file is named after nothing in particular."""
    names = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    for folder in (PACKAGE, TESTS):
        assert [p for p in trees(folder) if p.rsplit("/", 1)[-1] in names] == []


def test_public_names_are_listed() -> None:
    """Red when `quire` offers a name it does not list, or lists one it does not have."""
    quire = importlib.import_module("quire")
    assert sorted(set(quire.__all__)) == sorted(quire.__all__)
    assert all(hasattr(quire, name) for name in quire.__all__)
    tree = trees()["quire/__init__.py"]
    bound = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not (alias.asname or "").startswith("_")
    }
    assert bound == set(quire.__all__)


def test_doubles_are_real_classes() -> None:
    """Red when a test checks calls on a mock instead of behaviour."""
    found = [
        where
        for where, node in nodes(TESTS)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unittest"))
        or (
            isinstance(node, ast.Import)
            and any(a.name.startswith(("unittest", "mock")) for a in node.names)
        )
        or (isinstance(node, ast.Name) and node.id in ("MagicMock", "Mock", "AsyncMock", "mocker"))
    ]
    assert found == []


def test_exceptions_are_caught_by_name() -> None:
    """Red when an `except:` or `except Exception` that swallows what it caught hides a bug."""
    found = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or dotted(node.type) in ("Exception", "BaseException")
            if broad and not any(isinstance(n, ast.Raise) for n in ast.walk(node)):
                found.add(path)
    assert_shrinks(found, BROAD_HANDLERS)


def test_the_core_is_typed() -> None:
    """Red when `Any` gets into policy, memory or the vocabulary."""
    prefixes = tuple(f"quire/{folder}/" for folder in FREE_OF_ANY) + tuple(
        f"quire/{name}.py" for name in FREE_OF_ANY_FILES
    )
    found = [
        where
        for where, node in nodes()
        if where.startswith(prefixes) and isinstance(node, ast.Name) and node.id == "Any"
    ]
    assert found == []


def test_type_ignores_do_not_spread() -> None:
    """Red when another file silences the checker."""
    pattern = re.compile(r"#\s*type:\s*ignore")
    found = {path for path in trees() if pattern.search((ROOT / path).read_text())}
    assert_shrinks(found, TYPE_IGNORES)


def test_modules_say_what_they_are() -> None:
    """Red when a module arrives without its sentence."""
    silent = [
        path for path, tree in trees().items() if tree.body and ast.get_docstring(tree) is None
    ]
    assert silent == []
