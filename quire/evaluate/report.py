"""Outcomes as records for machines and rows for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.evaluate.run import Outcome, Work
from quire.evaluate.stats import Estimate, Floats, item_mean, token_mean
from quire.evaluate.tasks import TaskScore

FIRST_BORDER = 128  # tokens of context; each further border is four times as far


def report(outcomes: Sequence[Outcome], work: Work) -> dict[str, Any]:
    windows = outcomes[0].windows
    reference = next((one for one in outcomes if one.is_reference), None)
    return {
        "what": "evaluate",
        "text": {
            "name": work.text.name,
            "sha256": work.text.sha256,
            "window": work.window,
            "windows": len(windows.ids),
        },
        "against": reference.arm.name if reference else None,
        "rows": [_record(outcome, reference) for outcome in outcomes],
    }


def _record(outcome: Outcome, reference: Outcome | None) -> dict[str, Any]:
    losses = -outcome.tokens.logprobs
    mean, num_bytes = token_mean(losses), outcome.windows.num_bytes
    perplexity = math.exp(mean.value)
    record: dict[str, Any] = {
        "name": outcome.arm.name,
        "model": outcome.arm.model,
        "options": outcome.arm.options,
        "tokens": outcome.windows.num_scored,
        "perplexity": _pair(Estimate(perplexity, _times(mean.error, perplexity))),
        "bits_per_byte": round(losses.sum() / math.log(2) / max(1, num_bytes), 6),
        "perplexity_by_context": _by_context(losses),
    }
    if reference is not None and not outcome.is_reference:
        record["against"] = _compared(outcome, reference)
    record["tasks"] = {name: _task(score) for name, score in outcome.tasks.items()}
    cost = outcome.cost
    record["size"] = {
        "disk_bytes": cost.disk_bytes,
        "weight_bytes": cost.weight_bytes,
        "peak_bytes": cost.peak_bytes,
    }
    record["decode_tok_s"] = round(cost.decode_tok_s, 2)
    return record


def _by_context(losses: Floats) -> dict[str, float]:
    """Perplexity of tokens by how many came before them."""
    found, low, longest = {}, 1, losses.shape[1]
    border = FIRST_BORDER
    while low <= longest:
        part = losses[:, low - 1 : border - 1]  # the token at index i has i + 1 before it
        found[f"{low}-{min(border - 1, longest)}"] = round(math.exp(part.mean()), 4)
        low, border = border, border * 4
    return found


def _compared(outcome: Outcome, reference: Outcome) -> dict[str, Any]:
    tokens = outcome.tokens
    assert tokens.divergence is not None and tokens.agrees is not None
    change = token_mean(reference.tokens.logprobs - tokens.logprobs)
    return {
        "perplexity_change_percent": _pair(
            Estimate(100 * math.expm1(change.value), _times(change.error, 100))
        ),
        "kl_mean": _pair(token_mean(tokens.divergence)),
        "kl_p99": _rounded(float(np.quantile(tokens.divergence, 0.99))),
        "kl_max": _rounded(float(tokens.divergence.max())),
        "top1_agreement": _pair(item_mean(tokens.agrees.ravel())),
    }


def _task(score: TaskScore) -> dict[str, Any]:
    return {
        "items": score.num_items,
        "accuracy": _pair(score.accuracy),
        "accuracy_by_length": _pair(score.normalised),
    }


def _pair(estimate: Estimate) -> dict[str, float | None]:
    error = None if estimate.error is None else _rounded(estimate.error)
    return {"value": _rounded(estimate.value), "error": error}


def _times(error: float | None, factor: float) -> float | None:
    """Errors of a logarithm are relative."""
    return None if error is None else error * factor


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


# ------------------------------------------------------------ the table


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; a number after ± is a standard error."""
    columns, has_reference = ["", "perplexity", "bits/byte"], found["against"] is not None
    if has_reference:
        columns += ["change, %", "KL", "KL p99", "top-1, %"]
    tasks = list(found["rows"][0]["tasks"])
    for task in tasks:
        columns += [f"{task}, %", "by length, %"]
    columns += ["weights, MB", "files, MB", "peak, MB", "decode tok/s"]
    return columns, [_row(record, has_reference) for record in found["rows"]]


def _row(record: dict[str, Any], has_reference: bool) -> list[str]:
    cells = [record["name"], _shown(record["perplexity"], 3), f"{record['bits_per_byte']:.4f}"]
    if has_reference:
        cells += _compared_cells(record.get("against"))
    for score in record["tasks"].values():
        cells += [_shown(score["accuracy"], 1, 100), _shown(score["accuracy_by_length"], 1, 100)]
    for name in ("weight_bytes", "disk_bytes", "peak_bytes"):
        size = record["size"][name]
        cells.append("-" if size is None else f"{size / 1e6:,.1f}")
    return [*cells, f"{record['decode_tok_s']:.1f}"]


def _compared_cells(against: dict[str, Any] | None) -> list[str]:
    if against is None:
        return ["-"] * 4
    return [
        _shown(against["perplexity_change_percent"], 2, sign="+"),
        _shown(against["kl_mean"], 5),
        f"{against['kl_p99']:.4f}",
        _shown(against["top1_agreement"], 1, 100),
    ]


def _shown(pair: dict[str, float | None], digits: int, factor: float = 1, sign: str = "") -> str:
    value, error = pair["value"], pair["error"]
    assert value is not None
    text = f"{value * factor:{sign}.{digits}f}"
    return text if error is None else f"{text} ± {error * factor:.{digits}f}"
