"""Arms: the ways of running a model that one evaluation sets beside each other.

A word is a dtype (`fp32`), `packed` for weights as the file holds them, a form that weights are
rounded to at load (`rtn-int4-g32`), or another model altogether.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import BadRequest
from quire.load.known import find_known
from quire.quant.form_name import WORDS, is_form

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES |= {name: name for name in DTYPES.values()} | {"packed": "auto"}


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)  # of `LLM`


def parse_arm(word: str, model: str) -> Arm:
    """`model` is the one that a form is asked of."""
    word = word.strip()
    if word in DTYPES:
        return Arm(word, model, {"dtype": DTYPES[word]})
    if is_form(word):
        return Arm(word, model, {"quantization": word})
    if word and (find_known(word) or "/" in word or Path(word).exists()):
        return Arm(Path(word).name, word)
    near = difflib.get_close_matches(word, [*DTYPES, *WORDS, "rtn-int8-g32", "rtn-int4-g32"], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise BadRequest(
        f"got {word!r}{hint}, want a dtype (fp32, bf16, fp16), packed, a form such as fp8"
        " or rtn-int4-g32, or a model by name or path"
    )


def parse_sweep(text: str, model: str) -> list[Arm]:
    arms = [parse_arm(word, model) for word in text.split(",")]
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise BadRequest(f"got --sweep {text}, in which a name is there twice")
    return arms
