"""Beside: a smaller model judged next to the one it was, and to quantisation at the same bytes.

Perplexity, divergence, bytes and speed are `quire evaluate`'s. Forms that weights are rounded to
while they load need no file, so of four of them the one with the most bits that is no larger has a
row, or the smallest where none is. Better quantisations take a pass of their own: their folders,
which a user names, count as much. What the rows mean is said in a sentence each, also where the
smaller model loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import EngineArgs
from quire.evaluate.arms import Arm
from quire.evaluate.report import report
from quire.evaluate.run import Say, Work, run
from quire.load.open import open_model
from quire.models.registry import spec_of

JUDGED, PICTURE = "report.json", "report.png"  # in the folder that was written
# Forms by their bits a weight, scales included; embeddings and heads have eight bits or more.
FORMS = {"rtn-int8-g32": 8.5, "fp8": 8.1, "rtn-int4-g32": 4.5, "mxfp4": 4.25}
SMALL_FORM = "rtn-int4-g32"  # shown too where it fits: what far fewer bytes would do
TOLERANCE = 1.02  # of bytes that count as the same


@dataclass(frozen=True, slots=True)
class Beside:
    model: str  # as it was
    out: Path
    others: tuple[str, ...] = ()  # more models to set beside it

    def judge(self, work: Work, say: Say) -> dict[str, Any]:
        """What `quire evaluate` reports, and what it means. Raises QuireError."""
        original = Arm("original", self.model)
        arms = [Arm(self.out.name, str(self.out))]
        arms += [Arm(form, self.model, {"quantization": form}) for form in self._forms()]
        arms += [Arm(Path(other).name, other) for other in self.others]
        found = report(run(arms, original, work, say), work)
        return {**found, "what": "compress", "meaning": meanings(found["rows"])}

    def _forms(self) -> list[str]:
        """The most bits that fit the files' bytes, and four; the fewest where none fit."""
        size = sum(file.stat().st_size for file in self.out.glob("*.safetensors"))
        size = size or sum(file.stat().st_size for file in self.out.glob("*.gguf"))
        weights = spec_of(open_model(EngineArgs(model=self.model)).checkpoint.config).num_params
        fitting = [form for form, bits in FORMS.items() if weights * bits / 8 <= size * TOLERANCE]
        small = [form for form in fitting if form == SMALL_FORM]
        return list(dict.fromkeys([*fitting[:1], *small])) or [min(FORMS, key=FORMS.__getitem__)]


def meanings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The first row is the original, the second the smaller model, the others stand beside it."""
    original, made, *others = rows
    size, divergence = _size(made), _divergence(made)
    change = made["against"]["perplexity_change_percent"]["value"]
    found = [
        f"{made['name']} has {100 * size / _size(original):.0f} % of the original's bytes,"
        f" {100 * made['decode_tok_s'] / original['decode_tok_s']:.0f} % of its speed and"
        f" {change:+.1f} % perplexity"
    ]
    if size >= _size(original):
        found.append("it is no smaller than the original as it was stored: nothing is gained")
    same = [row for row in others if _size(row) <= size * TOLERANCE]
    if not same:
        return [*found, _alone(made, others)]
    best = min(same, key=_divergence)
    loses = _divergence(best) < divergence
    verb, pair = ("loses to", (best, made)) if loses else ("beats", (made, best))
    found.append(f"it {verb} {_kind(best)}: {_told(pair[0])}, {_told(pair[1])}")
    if not any(_is_folder(row) for row in others):
        found.append(
            "only forms that are rounded at load stand beside it; `quire quantize` writes better"
            " ones, and `--beside DIR` weighs them too"
        )
    return found


def _alone(made: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """Where nothing is as small."""
    forms = [row for row in others if not _is_folder(row)]
    if not forms:
        return "nothing beside it has as few bytes; `--beside` takes more models"
    return (
        f"no form rounded at load is as small as its {_size(made) / 1e6:.0f} MB: the smallest,"
        f" {_told(min(forms, key=_size))}; `quire quantize --bits` writes smaller ones"
    )


def _is_folder(row: dict[str, Any]) -> bool:
    """Another model, not a form of the original."""
    return "quantization" not in row["options"]


def _kind(row: dict[str, Any]) -> str:
    name = "the model beside it" if _is_folder(row) else "the best form rounded at load"
    return f"{name} at the same bytes"


def _told(row: dict[str, Any]) -> str:
    return f"{row['name']} has KL {_divergence(row):.4f} in {_size(row) / 1e6:.0f} MB"


def _size(row: dict[str, Any]) -> float:
    return float(row["size"]["weight_bytes"])


def _divergence(row: dict[str, Any]) -> float:
    return float(row["against"]["kl_mean"]["value"])
