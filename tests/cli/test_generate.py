from __future__ import annotations

import json

import pytest

from quire.cli.main import main
from quire.cli.parser import size_bytes
from tests.cli.conftest import ENGINE, quire


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
