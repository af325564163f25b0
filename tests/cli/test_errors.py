"""A mistake is one line on stderr with a way out, and an exit code that says whose it was."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest

from quire.cli import main as cli
from quire.errors import CheckpointError, NotSupported, OutOfMemory, QuireError
from quire.models.tiny import tiny_model
from tests.cli.conftest import ROOT, quire
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
    "ends": ("generation_config.json", {"eos_token_id": [1, 10**6]}, "token 1000000 ends"),
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


def test_a_reader_that_leaves_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "quire", "pull", "--list", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        told = child.stderr.read()
    assert told == b""
    assert child.returncode == cli.BROKEN_PIPE
