"""A mistake is one line on stderr with a way out, and an exit code that says whose it was."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

from quire.cli import main as cli
from quire.errors import CheckpointError, NotSupported, OutOfMemory, QuireError
from quire.models.tiny import tiny_model
from tests.cli.conftest import ENGINE, ROOT, quire
from tests.e2e.harness import free_port


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["genrate"], "unknown command 'genrate': did you mean 'generate'?"),
        (["zzz"], "known: serve, chat, generate"),
        (["bench", "latencyy"], "did you mean 'latency'?"),
        (["bench"], "required: KIND"),
        (["generate", "--max-token", "3", "x"], "did you mean --max-tokens?"),
        (["generate", "--max-tokens", "none", "x"], "want a whole number >= 1"),
        (["generate", "--top-p", "1.5", "x"], "got top_p=1.5"),
        (["generate", "--chat", "--ids", "5"], "use one of them"),
        (["generate", "--ids", "5 x"], "want whole numbers"),
        (["chat", "a", "--model", "b"], "got two models, 'a' and --model 'b'"),
        (["inspect", "--kv-cache-memory", "4Gigs"], "want a size such as 4GiB"),
        (["inspect", "/nowhere/at-all"], "no model at /nowhere/at-all"),
        (["inspect", "smollm2-135m-instrct"], "Did you mean 'smollm2-135m-instruct'"),
        (["bench", "throughput", "--prompt-len", "9-3"], "want a number or a span"),
        (["pull"], "no model named"),
    ],
)
def test_bad_input_exits_2_with_one_line(words, told, capsys):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert told in shown.err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (QuireError("download failed\nthe second line"), 1),
        (OutOfMemory("too large"), 1),
        (NotSupported("no"), 2),
        (CheckpointError("damaged"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(raised, code, monkeypatch, capsys):
    def fail(args):
        raise raised

    parser = SimpleNamespace(parse_args=lambda words: None)
    module = SimpleNamespace(build_parser=lambda: parser, run=fail)
    monkeypatch.setitem(sys.modules, "quire.cli.broken", module)
    monkeypatch.setitem(cli.VERBS, "broken", cli.Verb("quire.cli.broken", ""))
    assert cli.main(["broken"]) == code
    assert "Traceback" not in (told := capsys.readouterr().err)
    assert told.count("\n") == 1


STRANGE = {
    "layers": ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
    "end": ("config.json", {"eos_token_id": "x"}, "eos_token_id='x'"),
    "theta": ("config.json", {"rope_theta": math.nan}, "rope_theta=nan"),
    "width": ("config.json", {"hidden_size": 10**12}, "from 1 to 16777216"),
    "ends": ("generation_config.json", {"eos_token_id": [1, "x"]}, "eos_token_id=[1, 'x']"),
    "begin": ("tokenizer_config.json", {"bos_token": 5}, "bos_token=5"),
}


def strange_model(name, folder):
    file, changes, told = STRANGE[name]
    tiny_model("llama", folder)
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**before, **changes}))
    return told


@pytest.mark.parametrize("verb", [["inspect"], ["generate", "hi", "--threads", "1", "-m"]])
@pytest.mark.parametrize("name", STRANGE)
def test_files_from_strangers_exit_2_with_one_line(name, verb, tmp_path, capsys):
    told = strange_model(name, tmp_path)
    assert cli.main([*verb, str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert told in shown.err


def test_a_server_of_files_from_strangers_exits_2_with_one_line(tmp_path):
    told = strange_model("theta", tmp_path)
    done = quire("serve", str(tmp_path), "--port", str(free_port()))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert told in done.stderr


def test_inspect_reads_how_the_makers_sample(tmp_path, run_json, capsys):
    file = tiny_model("llama", tmp_path) / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    (record,) = run_json("inspect", str(tmp_path))
    assert record["model"]["sampling"] == "temperature 0.6, top_k 20"
    file.write_text(json.dumps({"temperature": math.nan}))
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "generation_config.json: got temperature=nan" in capsys.readouterr().err


def test_empty_stdin_is_a_clear_error():
    done = quire("generate", stdin="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: got an empty prompt\n"


# Each prints in its own way: at once, at the end, through argparse, as JSON, piece by piece.
PRINTING = [
    ["--help"],
    ["--version"],
    ["generate", "--help"],
    ["pull", "--list"],
    ["pull", "--list", "--json"],
]
MODEL_VERBS = [
    ["inspect", "MODEL", "--load-format", "dummy"],
    ["generate", "hi", "-m", "MODEL", "--max-tokens", "2", *ENGINE],
    ["chat", "MODEL", "--demo", "--max-tokens", "2", *ENGINE],
]


def run_with(words, stdout, unbuffered):
    return subprocess.run(
        [sys.executable, *(["-u"] if unbuffered else []), "-m", "quire", *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        check=False,
        text=True,
    )


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_disk_is_told_in_one_line(words, unbuffered):
    with open("/dev/full", "w") as full:
        done = run_with(words, full, unbuffered)
    assert done.stderr == "error: cannot write the output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", MODEL_VERBS, ids=lambda words: words[0])
def test_a_full_disk_while_a_model_talks(words, tiny, capfd):
    words = [tiny if word == "MODEL" else word for word in words]
    with open("/dev/full", "w") as full, redirect_stdout(full):
        assert cli.main(words) == 1
    assert "cannot write the output: No space left on device\n" in capfd.readouterr().err


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_a_reader_that_leaves_is_no_error(words):
    read, write = os.pipe()
    os.close(read)
    try:
        done = run_with(words, write, unbuffered=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, "")


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("--version >&-", 1, "error: cannot write the output: Bad file descriptor\n"),
        ("generate --help >&-", 1, "error: cannot write the output: Bad file descriptor\n"),
        ("generate <&-", 2, "error: got an empty prompt\n"),
        ("pull nope 2>&-", 2, ""),
    ],
)
def test_closed_streams(command, code, told):
    line = f"{shlex.quote(sys.executable)} -m quire {command}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)
