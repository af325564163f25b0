"""`quire bench cpu` without its peers: turns, ratios, refusals, and what is printed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quire.bench.cpu import child
from quire.bench.cpu.children import Children
from quire.bench.cpu.engines import OURS, PEERS
from quire.bench.cpu.figures import figures_of, table_rows
from quire.bench.cpu.rounds import Turn, run_rounds, turns
from quire.bench.cpu.this_cpu import cpu_of
from quire.bench.cpu.work import WORKLOADS, Prompter, Setup, Sizes
from quire.bench.startup import ChildFailed
from quire.cli.main import main

SIZES = Sizes.quick()


def silent(text: str) -> None:
    pass


class StepPeer:
    """Takes a second for each token in and ten for each step out; requests share their steps."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[int]]] = []

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        self.asked.append((prompts, lengths))
        return sum(map(len, prompts)) + 10.0 * max(lengths)


def test_workloads_count_what_they_say():
    """Red when a prompt's time gets into decode, or padding into the tokens of many requests."""
    figures = {
        name: run(StepPeer(), SIZES, Prompter(1))
        for name, run in WORKLOADS.items()
        if name != "cold"
    }
    assert figures["decode"] == {"decode_tok_s": pytest.approx(0.1)}
    assert figures["prefill"] == {"prefill_tok_s": pytest.approx(32 / (32 + 10))}
    many = StepPeer()
    found = WORKLOADS["throughput"](many, SIZES, Prompter(1))["output_tok_s"]
    prompts, lengths = many.asked[-1]
    assert len(prompts) == SIZES.requests and len(set(lengths)) > 1
    seconds = sum(map(len, prompts)) + 10 * max(lengths)
    assert found == pytest.approx(sum(lengths) / seconds)


def test_every_prompt_is_new_and_the_same_for_all():
    """Red when a prefix cache could help, or two engines get different work."""
    first, second = StepPeer(), StepPeer()
    for peer in (first, second):
        WORKLOADS["decode"](peer, SIZES, Prompter(7))
    assert first.asked == second.asked
    assert len({tuple(prompts[0]) for prompts, _ in first.asked}) == len(first.asked)


def test_peak_memory_is_of_this_process():
    assert 5 < WORKLOADS["cold"](StepPeer(), SIZES, Prompter(1))["peak_mb"] < 100_000


def test_engines_take_turns_within_a_round():
    """Red when one engine runs all its rounds before the next begins."""
    found = list(turns(["quire", "llama-server", "llama.cpp"], ["decode", "throughput"], 2))
    one_round = [
        ("decode", "quire"),
        ("decode", "llama.cpp"),  # llama-server is for many requests
        ("throughput", "quire"),
        ("throughput", "llama-server"),
        ("throughput", "llama.cpp"),
    ]
    assert found == [Turn(number, *rest) for number in (1, 2) for rest in one_round]


def test_a_peer_that_fails_is_left_out_and_quire_may_not():
    asked = []

    def measure(turn: Turn) -> dict[str, float]:
        asked.append(turn)
        if turn.engine == broken:
            raise ChildFailed("no such tensor", [])
        return {"decode_tok_s": 1.0}

    broken = "llama.cpp"
    measured = run_rounds(turns(["quire", "llama.cpp"], ["decode"], 2), measure, silent)
    assert measured.failed == {"llama.cpp decode": "no such tensor"}
    assert [turn.engine for turn in asked] == ["quire", "llama.cpp", "quire"]
    assert measured.values == {"decode_tok_s": {"quire": {1: 1.0, 2: 1.0}}}
    broken = "quire"
    with pytest.raises(ChildFailed, match="no such tensor"):
        run_rounds(turns(["quire", "llama.cpp"], ["decode"], 2), measure, silent)


def test_ratios_are_of_one_round():
    """Red when engines are compared across rounds: here the machine halves its speed each round."""
    values = {
        "decode_tok_s": {
            "quire": {1: 80.0, 2: 40.0, 3: 22.0},
            "llama.cpp": {1: 40.0, 2: 20.0, 3: 10.0},
        },
        "first_token_s": {"quire": {1: 2.0}, "quire-fp32": {1: 3.0}, "llama.cpp": {1: 0.5}},
    }
    found = {(figure.metric, figure.engine): figure for figure in figures_of(values)}
    theirs = found["decode_tok_s", "llama.cpp"]
    assert (theirs.best, theirs.median, theirs.ratios) == (40.0, 20.0, {"quire": 2.0})
    started = found["first_token_s", "llama.cpp"]
    assert started.best == 0.5 and started.ratios == {"quire": 0.25, "quire-fp32": 0.167}
    rows = table_rows(list(found.values()))
    assert rows[1] == ("decode, batch 1", "llama.cpp", "40", "20", "tok/s", "2.00x", "-")


def test_a_round_that_a_peer_missed_is_not_compared():
    values = {"prefill_tok_s": {"quire": {1: 10.0, 2: 90.0}, "llama.cpp": {2: 30.0}}}
    assert figures_of(values)[1].ratios == {"quire": 3.0}


def test_the_cpu_and_its_flags():
    info = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu amx_tile avx512f sse2 avx2\n\n"
    cpu = cpu_of(info + info.replace("Some", "Other"))
    assert cpu == ("Some Xeon", ("avx2", "avx512f", "amx_tile"))
    assert cpu_of("Features : asimd i8mm\n").flags == ("asimd", "i8mm")


def test_another_python_sees_our_package_and_nothing_beside_it(tmp_path):
    """Red when what is installed here gets into a peer's own environment."""
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"version": "'$PYTHONPATH'"}'\n""")
    python.chmod(0o755)
    children = Children(1, SIZES)
    seen = Path(children.version("llama.cpp", str(python)) or "")
    assert [path.name for path in seen.iterdir()] == ["quire"]
    children.close()
    assert not seen.exists()


def test_a_child_opens_its_engine_for_the_workload(monkeypatch):
    """Red when an engine of one request is opened for many, or the other way round."""
    opened: list[Setup] = []

    class Opened:
        workloads = tuple(WORKLOADS)

        def open(self, setup: Setup) -> StepPeer:
            opened.append(setup)
            return StepPeer()

    monkeypatch.setitem(child.ENGINES, "llama.cpp", Opened())
    sizes = {"requests": 3, "prompt_high": 70, "output_high": 80}
    task = {"engine": "llama.cpp", "model": "m", "threads": 2, "seed": 1, "sizes": sizes}
    assert child.measure({**task, "workload": "decode"}) == {"decode_tok_s": pytest.approx(0.1)}
    assert "output_tok_s" in child.measure({**task, "workload": "throughput"})
    assert opened == [Setup("m", 2, 1, 2048), Setup("m", 2, 3, 150)]


def test_what_is_not_installed_has_no_version(monkeypatch):
    assert child.look("transformers")["version"]  # other tests need it
    absent = replace(PEERS["llama.cpp"], package="no-such-package")
    monkeypatch.setitem(child.ENGINES, "llama.cpp", absent)
    monkeypatch.setitem(child.ENGINES, "openvino", replace(absent, program="no-such-program"))
    assert child.look("llama.cpp") == child.look("openvino") == {}


# ---------------------------------------------------------------- as it is typed


class FakeChildren:
    """Every engine but llama-server is there; Quire is twice as fast as the others."""

    def __init__(self, threads: int, sizes: Sizes) -> None:
        self.threads = threads

    def version(self, engine: str, python: str | None) -> str | None:
        return None if engine == "llama-server" else f"of {python}"

    def measure(
        self, engine: str, workload: str, model: str, seed: int, python: str | None
    ) -> dict[str, float]:
        if engine == "openvino":
            raise ChildFailed("an unknown format", [])
        assert Path(model).exists()
        return {"decode_tok_s": 200.0 if engine in OURS else 100.0}

    def close(self) -> None:
        pass


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("quire.bench.cpu.children.Children", FakeChildren)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_the_table_and_the_line(model, capsys):
    words = ["--against", "llama.cpp,llama-server,openvino", "--workloads", "decode"]
    python = ["--python-of", f"llama.cpp={sys.executable}", "--rounds", "2"]
    assert main(["bench", "cpu", str(model), *words, *python]) == 0
    shown = capsys.readouterr()
    assert "llama-server: not installed: build the target" in shown.err
    assert "| decode, batch 1 | llama.cpp" in shown.out and "2.00x" in shown.out
    record = json.loads(shown.out.splitlines()[-1])
    assert record["what"] == "cpu" and record["threads"] == 2 and record["cpu"]["name"]
    assert record["failed"] == {"openvino decode": "an unknown format"}
    assert list(record["missing"]) == ["llama-server"]
    assert record["engines"]["llama.cpp"]["version"] == f"of {sys.executable}"
    (theirs,) = (line for line in record["figures"] if line["engine"] == "llama.cpp")
    assert theirs["rounds"] == [100.0, 100.0]
    assert theirs["ratios"] == {"quire": 2.0, "quire-fp32": 2.0}


def test_a_folder_is_not_for_those_that_read_gguf(model, capsys):
    words = ["--against", "llama.cpp,transformers", "--workloads", "decode", "--json"]
    (model.parent / "config.json").write_text("{}")
    assert main(["bench", "cpu", str(model.parent), *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "--model-of llama.cpp=FILE" in record["missing"]["llama.cpp"]
    assert record["engines"]["transformers"]["model"] == str(model.parent)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--against", "llamacpp"], "did you mean 'llama.cpp'?"),
        (["--against", "ollama,xyz"], "got --against"),
        (["--workloads", "decod"], "did you mean 'decode'?"),
        (["--workloads", ","], "want some of decode, prefill"),
        (["--python-of", "llama.cpp"], "want PEER=PATH"),
        (["--python-of", "quire=/bin/sh"], "want PEER=PATH"),
        (["--model-of", "openvino=/no/such"], "there is no /no/such"),
        (["--rounds", "0"], "0"),
    ],
)
def test_refusals(model, words, said, capsys):
    assert main(["bench", "cpu", str(model), *words]) == 2
    assert said in capsys.readouterr().err
