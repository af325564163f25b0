from __future__ import annotations

import json

import pytest

from quire.cli.main import main
from quire.cli.parser import size_bytes
from tests.cli.conftest import ENGINE, quire
from tests.tiny_folder import write_tiny_folder


def test_stdin_prompt_as_a_user_runs_it(tiny):
    done = quire(
        "generate", "-m", tiny, *ENGINE, "--max-tokens", "5", "--json", stdin="Hello there\n"
    )
    assert done.returncode == 0, done.stderr
    (record,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert record["prompt"] == "Hello there"  # the line's end is not part of it
    (answer,) = record["outputs"]
    assert len(answer["token_ids"]) == 5 and answer["finish_reason"] == "length"
    metrics = record["metrics"]
    assert 0 <= metrics["queue_s"] <= metrics["ttft_s"] <= metrics["total_s"]


def test_several_prompts_in_order(tiny, run_json):
    words = ["generate", "one", "another", "-m", tiny, *ENGINE, "--max-tokens", "3"]
    records = run_json(*words)
    assert [r["prompt"] for r in records] == ["one", "another"]
    assert records == [
        {**r, "metrics": a["metrics"]} for a, r in zip(records, run_json(*words), strict=True)
    ]


def test_ids_need_no_tokenizer(mute, run_json):
    (record,) = run_json("generate", "--ids", "5, 6 7", "-m", mute, *ENGINE, "--max-tokens", "4")
    assert record["prompt_token_ids"] == [5, 6, 7]
    assert len(record["outputs"][0]["token_ids"]) == 4


def test_a_text_without_a_tokenizer_is_refused(mute, capsys):
    assert main(["generate", "hi", "-m", mute, *ENGINE]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_seed_makes_samples_repeat(tiny, run_json):
    words = ["generate", "x", "-m", tiny, *ENGINE, "--temperature", "1", "--n", "3", "--seed", "9"]

    def texts():
        (record,) = run_json(*words, "--max-tokens", "6")
        return [answer["token_ids"] for answer in record["outputs"]]

    first = texts()
    assert first == texts()
    assert len({tuple(ids) for ids in first}) == 3


def test_without_a_seed_samples_differ(tiny, run_json):
    """Red when every start draws the same: an engine's own seed is for the offline API."""
    words = ["generate", "x", "-m", tiny, *ENGINE, "--temperature", "1", "--max-tokens", "16"]
    first, again = (run_json(*words)[0]["outputs"][0]["token_ids"] for _ in range(2))
    assert first != again


def test_chat_uses_the_template(tiny, run_json):
    (record,) = run_json("generate", "--chat", "hi", "-m", tiny, *ENGINE, "--max-tokens", "2")
    assert record["prompt"] == "<user>hi<assistant>"


def test_logprobs(tiny, run_json):
    words = ["generate", "hi", "-m", tiny, *ENGINE, "--max-tokens", "2", "--logprobs", "3"]
    (record,) = run_json(*words)
    (answer,) = record["outputs"]
    assert [len(position) for position in answer["logprobs"]] == [3, 3]
    assert answer["logprobs"][0][0]["id"] == answer["token_ids"][0]
    total = sum(position[0]["logprob"] for position in answer["logprobs"])
    assert answer["cumulative_logprob"] == pytest.approx(total)


def test_plain_output_is_the_answer_alone(mute, capsys):
    words = ["generate", "--ids", "5 6", "-m", mute, *ENGINE, "--max-tokens", "3"]
    assert main(words) == 0
    assert len(capsys.readouterr().out.split()) == 3


def test_what_was_not_said_is_as_the_makers_recommend(tmp_path, run_json):
    """Red when a folder's generation_config.json is read by `serve` alone, or beats a flag."""
    folder = write_tiny_folder(tmp_path)
    words = ["generate", "hi", "-m", str(folder), *ENGINE, "--max-tokens", "8", "--seed", "3"]

    def drawn(*more):
        (record,) = run_json(*words, *more)
        return record["outputs"][0]["token_ids"]

    greedy, hot = drawn(), drawn("--temperature", "5")
    assert greedy == drawn("--temperature", "0") != hot
    (folder / "generation_config.json").write_text('{"temperature": 5.0}')
    assert drawn() == hot
    assert drawn("--temperature", "0") == greedy


def test_an_answer_that_failed_is_an_error(tiny, monkeypatch, capsys):
    """Red when half an answer passes for a whole one."""

    def lost(*args):
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("quire.sample.sampler.Sampler.__call__", lost)
    words = ["generate", "hi", "-m", tiny, *ENGINE]
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda shown=is_terminal: shown)
        assert main(words) == 1
        assert "cut short: the engine failed" in capsys.readouterr().err


def test_an_empty_answer_is_printed_as_such(tiny, run_json, capsys):
    """Red when the ids of what a stop string cut away stand in for the text."""
    words = ["generate", "-m", tiny, *ENGINE, "--max-tokens", "1"]
    records = run_json(*words, "hi", "one", "two", "yes", "no")
    prompt, said = next(
        (r["prompt"], text) for r in records if (text := r["outputs"][0]["text"]).strip()
    )
    assert main([*words, prompt, "--stop", said]) == 0
    assert capsys.readouterr().out == "\n"


def test_streams_to_a_terminal(tiny, monkeypatch, capsys):
    words = ["generate", "hi", "-m", tiny, *ENGINE, "--max-tokens", "6"]
    assert main(words) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(words) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("512MiB", 512 << 20), ("2k", 2048), ("1.5GB", 15 * 10**8)],
)
def test_sizes(text, size):
    assert size_bytes(text) == size
