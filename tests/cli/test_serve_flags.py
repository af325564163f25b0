"""Mistakes in flags are told before anything starts: one line, exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.cli.serve import build_parser, settings_of
from quire.errors import QuireError
from quire.server.settings import ServeSettings
from tests.e2e.harness import free_port


def settings(*words: str, download: bool = False) -> ServeSettings:
    made = settings_of(build_parser().parse_args(list(words)), download)
    assert isinstance(made, ServeSettings)
    return made


def test_a_server_takes_the_gap_that_suits_it() -> None:
    """Red when a flag is not heard, or several models keep to what programs do."""
    assert settings("m").engine.target_gap_ms is None
    assert settings("m", "--target-gap-ms", "0").engine.target_gap_ms == 0.0
    both = [model.engine.target_gap_ms for model in settings("a", "b").models]
    assert both == [None, None]


ENGINE_FLAGS = [
    (["--max-num-seqs", "100000000"], "got max_num_seqs=100000000, want a whole number from 1 to"),
    (["--threads", "99999"], "got num_threads=99999, want a whole number from 1 to"),
    (["--max-num-batched-tokens", "1000000000000"], "max_num_batched_tokens=1000000000000"),
    (["--max-model-len", "1000000000000000"], "max_model_len=1000000000000000"),
    (["--page-size", "1099511627776"], "page_size=1099511627776"),
    (["--page-size", "24"], "want a power of two"),
    (["--kv-cache-memory", "99999999TiB"], "got kv_cache_memory="),
    (["--gpu-memory-utilization", "nan"], "gpu_memory_utilization=nan"),
    (["--gpu-memory-utilization", "inf"], "gpu_memory_utilization=inf"),
    (["--seed", str(10**30)], f"got seed={10**30}"),
    (["--device", "tpu"], "got device='tpu', want 'auto', 'cpu', 'cuda' or a GPU"),
    (["--dtype", "int3"], "got dtype='int3'"),
    (["--load-format", "pickle"], "load_format='pickle'"),
    (["--scheduling-policy", "lifo"], "scheduling_policy='lifo'"),
]
SERVE_FLAGS = [
    (["--reasoning-parser", "nope"], "unknown reasoning parser 'nope'. Known: deepseek_r1"),
    (["--reasoning-parser", "qwen"], "did you mean 'qwen3'? Known: "),
    (["--tool-call-parser", "nope"], "unknown tool call parser 'nope'. Known: hermes"),
    (["--tool-call-parser", "hermess"], "did you mean 'hermes'?"),
    (["--otlp-traces-endpoint", "foo"], "got OTLP endpoint 'foo', want http://host:4318"),
    (["--otlp-traces-endpoint", "grpc://x:4317"], "got OTLP endpoint"),
    (["--otlp-traces-endpoint", "http://x:99999"], "got OTLP endpoint"),
    (["--otlp-traces-endpoint", "http://[x"], "got OTLP endpoint"),
    (["--port", "70000"], "got '70000', want a whole number from 1 to 65535"),
    (["--port", "0"], "want a whole number from 1 to 65535"),
    (["--max-queued-requests", str(10**30)], "want a whole number from 1 to 1000000"),
    (["--request-timeout", "inf"], "want seconds above 0"),
    (["--queue-timeout", "nan"], "want seconds above 0"),
    (["--drain-timeout", "1e300"], "want seconds above 0 and up to 31536000"),
    (["--log-level", "loud"], "invalid choice: 'loud'"),
    (["--allowed-origins", "app.example"], "got --allowed-origins 'app.example'"),
    (["--allowed-origins", "https://app.example/"], "want * or origins such as https://"),
    (["--allowed-origins", "*", "http://"], "got --allowed-origins 'http://'"),
    (["--served-model-name", " "], "empty --served-model-name"),
]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("something was started")

    for name in (
        "quire.server.supervisor.Supervisor.run",
        "quire.cli.download.fetch",
        "quire.llm.LLM.__init__",
    ):
        monkeypatch.setattr(name, started)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "words, told",
    [
        *((["serve", *words], told) for words, told in SERVE_FLAGS + ENGINE_FLAGS),
        *((["generate", "x", *words], told) for words, told in ENGINE_FLAGS[:2]),
        *((["inspect", *words], told) for words, told in ENGINE_FLAGS[:2]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_bad_flag_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a flag is looked at only after a download, by a child, or at the first request."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert told in shown.err


def test_replicas_without_gpus_are_told_early(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a model is downloaded for replicas that have no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    words = ["serve", "who/nobody", "--device", "cuda", "--replicas", "2"]
    assert main([*words, "--port", str(free_port())]) == 2
    assert "got 2 replicas of 1 GPUs each and found 1" in capsys.readouterr().err


def test_good_flags_pass() -> None:
    made = settings(
        *("--port", "65535", "--log-level", "DEBUG", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", "qwen3", "--otlp-traces-endpoint", "http://127.0.0.1:4318"),
        *("--allowed-origins", "*", "https://app.example", "app://obsidian.md"),
        *("--threads", "1", "--max-num-seqs", "512", "--page-size", "128", "--seed", "7"),
        *("--request-timeout", "0.5", "--max-queued-requests", "5000"),
    )
    assert (made.port, made.log_level, made.engine.max_num_seqs) == (65535, "debug", 512)
    assert made.limits.request_timeout_s == 0.5


def test_only_a_given_seed_makes_a_server_repeat_itself(tmp_path: Path) -> None:
    """Red when two servers started alike answer alike, or --seed does not reach the engine."""
    assert settings(str(tmp_path), download=True).engine.seed is None
    assert settings(str(tmp_path), "--seed", "0", download=True).engine.seed == 0


def test_a_folder_is_served_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("./my-model", "./my-model/", str(folder)):
        assert settings(path, download=True).served_model_names == ("my-model",)


def test_several_models(tmp_path: Path) -> None:
    """Red when words are taken for one model, or a table's fields for another's."""
    made = settings("a=/m/one", "/m/two/", "--max-num-seqs", "4", "--memory", "2GiB", "--on-demand")
    assert [(m.name, m.engine.model, m.at_start) for m in made.models] == [
        ("a", "/m/one", False),
        ("two", "/m/two/", False),
    ]
    assert made.memory == 2 << 30 and made.api_processes == 1
    assert all(m.engine.max_num_seqs == 4 for m in made.models)
    file = tmp_path / "models.toml"
    file.write_text(
        '[models.x]\nmodel = "/m/x"\npark_after_s = 9\nmax_num_seqs = 2\nlora = {s = "/s"}\n'
        '[models.y]\nmodel = "/m/y"\n'
    )
    x, y = settings(str(file), "--max-num-seqs", "4", "--park-after", "5").models
    assert (x.park_after_s, x.engine.max_num_seqs, x.engine.lora) == (9, 2, {"s": "/s"})
    assert (y.park_after_s, y.engine.max_num_seqs, y.engine.lora) == (5.0, 4, None)
    assert settings("one").models == () and settings("one").served_model_names == ("one",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "want tables"),
        ("[models.x]\nport = 1", "wants model"),
        ('[models.x]\nmodel = "m"\nport = 1', "has port, want"),
        ('[models.x]\nmodel = "m"\nat_start = 1', "at_start = true or false"),
        ('[models.x]\nmodel = "m"\npark_after_s = -1', "wants park_after_s"),
        ('[models.x]\nmodel = "m"\ndevice = "tpu"', "device='tpu'"),
        ("[models", "models.toml: "),
    ],
)
def test_files_of_models_that_cannot_be(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(QuireError, match=message):
        settings(str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=x", "a=y"], "two models called 'a'"),
        (["=x"], "want NAME=MODEL"),
        (["a=x", "b=y", "--lora", "s=/s"], "several models with"),
        (["m", "--lora", "m=/s"], "that name is taken"),
        (["m", "--lora", "s=/s", "--lora", "s=/t"], "that name is taken"),
    ],
)
def test_names_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(QuireError, match=message):
        settings(*words)
