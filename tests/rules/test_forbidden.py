"""What the package may not contain, whatever it is for: ways to run what a file or a client says,
templates outside the sandbox, and comparisons that take their time to tell a key."""

from __future__ import annotations

import ast

from tests.rules.source import dotted, imports, nodes, trees

# `test_ratchets.py` has the imports and calls that every part of the package is free of; here is
# what a server adds.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.jit.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "os.execv",
    "os.execvp",
}
METHODS = {"recv_pyobj", "send_pyobj"}
SANDBOX = "quire/text/template.py"
SPAWNERS = {
    "quire/bench/cpu/llama_server_peer.py",
    "quire/bench/startup.py",
    "quire/dist/launch.py",
    "quire/grammar/worker_link.py",
    "quire/load/wheels.py",
    "quire/native/build.py",
    "quire/router/replicas.py",
    "quire/routing/judge.py",
    "quire/server/child.py",
}


def test_no_code_comes_from_data() -> None:
    """SEC-01. Red when bytes from a file, a socket or a client could become code."""
    found = [
        f"{path}: import {module}"
        for path, tree in trees().items()
        for module, _ in imports(tree)
        if module.split(".")[0] in MODULES
    ]
    for where, node in nodes():
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in CALLS:
            found.append(f"{where}: {dotted(node.func)}")
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            found.append(f"{where}: {node.func.attr}")
        for keyword in node.keywords:
            is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and is_true:
                found.append(f"{where}: {keyword.arg}=True")
    assert found == []


def test_templates_are_made_in_one_place_and_in_the_sandbox() -> None:
    """Red when a chat template could be rendered by an environment that lets it run Python."""
    makers = []
    for where, node in nodes():
        name = dotted(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        if name.endswith("Environment") or name == "from_string":
            assert name != "Environment", where
            makers.append(where.rsplit(":", 1)[0])
    assert set(makers) <= {SANDBOX}


def test_processes_are_started_in_few_places() -> None:
    """Red when a new way to start programs arrives without anybody looking at its arguments."""
    names = {"subprocess.Popen", "subprocess.run", "subprocess.check_output", "subprocess.call"}
    found = {
        where.rsplit(":", 1)[0]
        for where, node in nodes()
        if isinstance(node, ast.Call)
        and (dotted(node.func) in names or dotted(node.func).endswith("create_subprocess_exec"))
    }
    assert found <= SPAWNERS
    assert not [
        where
        for where, node in nodes()
        if isinstance(node, ast.Call) and dotted(node.func).endswith("create_subprocess_shell")
    ]


def test_the_server_never_fetches_what_a_client_names() -> None:
    """Red when a handler gains a way to open URLs: images and schemas are never fetched."""
    clients = {"urllib.request", "http.client", "httpx", "requests", "aiohttp", "httpx2", "ftplib"}
    found = [
        path
        for path, tree in trees().items()
        if path.startswith(("quire/server/", "quire/engine/", "quire/grammar/", "quire/text/"))
        for module, _ in imports(tree)
        if module in clients or module.split(".")[0] in clients
    ]
    assert found == []


def test_paths_come_from_the_scope_and_keys_are_compared_in_constant_time() -> None:
    """Red when a path is rebuilt from the Host header, or a key compared with ==."""
    for where, node in nodes():
        if not where.startswith("quire/server/"):
            continue
        if isinstance(node, ast.Attribute):
            assert dotted(node) != "request.url.path", where
        if isinstance(node, ast.Compare) and where.startswith("quire/server/keys.py"):
            assert not any(isinstance(op, (ast.Eq, ast.In)) for op in node.ops) or any(
                isinstance(c, ast.Constant) for c in node.comparators
            ), where
