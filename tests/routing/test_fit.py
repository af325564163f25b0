"""What is learned from examples: against chances that are known, and closed forms of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cli.main import main
from quire.errors import BadRequest
from quire.routing.ask import Ask, read_ask
from quire.routing.chance import Chance
from quire.routing.examples import read_examples
from quire.routing.fit import fit, isotonic, logistic, platt, sigmoid
from quire.routing.report import auc

TOPICS = {"sums": 0.9, "proofs": 0.15, "poems": 0.6}  # chance that the small model suffices


def lines(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Prompts whose topic alone decides, by a known chance."""
    draw = np.random.default_rng(seed)
    made = []
    for at in range(count):
        topic = list(TOPICS)[at % 3]
        suffices = bool(draw.random() < TOPICS[topic])
        prompt = f"{topic} number {draw.integers(10_000)} about {' '.join('abc'[: 1 + at % 3])}"
        made.append(
            {
                "prompt": prompt,
                "small": "right" if suffices else "wrong",
                "large": "right",
                "small_score": float(suffices),
                "large_score": 1.0,
                "small_mean_logprob": float(draw.normal(-0.4 if suffices else -1.6, 0.4)),
            }
        )
    return made


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("route")
    text = "\n".join(map(json.dumps, lines(600)))
    (folder / "examples.jsonl").write_text(text)
    out = folder / "route.json"
    assert main(["route", "fit", str(folder / "examples.jsonl"), "--out", str(out)]) == 0
    return out


def test_known_chances_are_found(route: Path) -> None:
    """Red when a chance that is told is not the chance there is."""
    chance = Chance.load(route)
    for topic, true in TOPICS.items():
        asks = [read_ask(row) for row in lines(300, seed=9) if row["prompt"].startswith(topic)]
        assert abs(np.mean([chance.of(ask) for ask in asks]) - true) < 0.1, topic
    about = chance.about or {}
    assert about["calibration_error"] < 1.6 * about["calibration_noise"] and about["auc"] > 0.75
    assert about["held_out"] + about["learned_from"] == 600
    assert route.with_suffix(".png").stat().st_size > 10_000


def test_the_curve_of_cost_and_quality(route: Path) -> None:
    """Red when the threshold does not keep what was asked, or the cascade is worth nothing."""
    about = Chance.load(route).about or {}
    points = about["points"]
    assert points[0]["recovered"] == 0.0 and points[-1]["recovered"] == 1.0
    assert points[0]["cost"] == 0.1 and points[-1]["cost"] == 1.0
    assert points[5]["recovered"] > 0.6  # half of the requests: a coin would recover 0.5
    assert about["chosen"]["recovered"] > 0.8 and about["chosen"]["cost"] < 0.95
    cascade = about["cascade"]
    assert cascade["quality"] > about["chosen"]["quality"] and -1.6 < cascade["mean_logprob"] < 0


def test_the_same_file_gives_the_same_route(tmp_path: Path) -> None:
    """Red when something is drawn at random."""
    path = tmp_path / "examples.jsonl"
    path.write_text("\n".join(map(json.dumps, lines(60))))
    made = [fit(read_examples(path, None, 0.0), 0.9) for _ in range(2)]
    assert made[0] == made[1]


def test_a_judge_gives_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a judge's number is taken for another answer's."""
    rows = [{k: row[k] for k in ("prompt", "small", "large")} for row in lines(80)]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    judge = tmp_path / "judge.py"
    judge.write_text(
        "import json, sys\n"
        "for line in sys.stdin: print(float(json.loads(line)['answer'] == 'right'))\n"
    )
    words = ["route", "fit", str(path), "--out", str(tmp_path / "r.json"), "--json"]
    assert main([*words, "--judge", f"python3 {judge}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["points"][-1]["quality"] == 1.0 and told["cascade"] is None
    assert main([*words, "--judge", "false"]) == 2
    assert main([*words, "--judge", "echo 1"]) == 2
    assert main(words) == 2  # neither scores nor a judge
    err = capsys.readouterr().err
    assert "ended with 1" in err and "1 numbers for 160" in err and "small_score" in err


def test_too_little_to_learn_from(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    for rows, why in (
        (lines(10), "at least 50"),
        ([row | {"small_score": 1.0} for row in lines(60)], "for all"),
        ([row | {"large_score": "good"} for row in lines(60)], "large_score"),
        ([{"question": "?"}] * 60, "prompt"),
    ):
        path.write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(BadRequest, match=why):
            read_examples(path, None, 0.0)


def test_a_route_that_was_changed_is_refused(route: Path, tmp_path: Path) -> None:
    data = json.loads(route.read_text())
    changed = tmp_path / "changed.json"
    for change in (
        {"format": "other"},
        {"features": ["length"]},
        {"weights": data["weights"][:-1]},
        {"scale": [0.0] * len(data["scale"])},
        {"weights": [float("nan")] * len(data["weights"])},
        {"curve": {"kind": "magic", "scores": [1.0], "chances": [1.0]}},
    ):
        changed.write_text(json.dumps(data | change))
        with pytest.raises(BadRequest):
            Chance.load(changed)


def test_the_pieces_against_their_definitions() -> None:
    """Red when the regression leaves its optimum, the steps are not the best that never fall, or
    the area under the curve is not a share of pairs."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(200, 3))
    labels = draw.random(200) < sigmoid(rows @ [1.0, -2.0, 0.0] + 0.5)
    found = logistic(rows, labels, 2.0)
    left = sigmoid(found(rows)) - labels
    assert np.abs(rows.T @ left + 2.0 * found.weights).max() < 1e-6 and abs(left.sum()) < 1e-6
    scores = draw.normal(size=60)
    truth = draw.random(60) < 0.5
    steps = isotonic(scores, truth)
    assert all(a <= b for a, b in zip(steps.chances, steps.chances[1:], strict=False))
    assert abs(np.mean(platt(scores, truth)(scores)) - truth.mean()) < 1e-3
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[truth] for b in scores[~truth]]
    assert abs(auc(scores, truth) - np.mean(pairs)) < 1e-12


@pytest.mark.parametrize(
    ("body", "ask"),
    [
        ({"prompt": "Hi"}, Ask("Hi")),
        ({"prompt": ["a", "b"]}, Ask("b", "a", 2, num_prompts=2)),
        ({"prompt": [1, 2]}, Ask("", num_messages=2)),
        ({"input": "Hi", "instructions": "Be brief"}, Ask("Hi", "Be brief")),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "See"},
                                                 {"type": "image_url", "image_url": {}}]},
                    {"role": "assistant", "content": "Yes"},
                ],
                "tools": [{}, {}],
                "response_format": {"type": "json_object"},
            },
            Ask("See", "Yes", 2, num_tools=2, num_images=1, has_schema=True),
        ),
        ({"messages": 5}, Ask("")),
    ],
)  # fmt: skip
def test_bodies_of_every_kind(body: dict[str, Any], ask: Ask) -> None:
    assert read_ask(body) == ask
