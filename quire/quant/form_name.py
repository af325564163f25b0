"""Names of what weights are rounded to while they are loaded, as a user writes them."""

from __future__ import annotations

import re

from quire.errors import NotSupported

GROUPS = (32, 64, 128, 256)
INT8_ROWS = "int8"
# Where a device has such products, "fp8" and "int8" round inputs too; the others never do.
FP8_ROWS, ALONE = "fp8", "-weights"
SPARSE24 = "sparse24"  # two of every four weights, by their size alone
WORDS = (
    *(FP8_ROWS, INT8_ROWS, "nf4", "mxfp4", SPARSE24),
    *(FP8_ROWS + ALONE, INT8_ROWS + ALONE),  # and those that parse_rtn takes
)
_NAME = re.compile(r"rtn-int([48])-g([1-9][0-9]{1,2})(-asym)?", re.ASCII)


def parse_rtn(name: str) -> tuple[int, int, bool]:
    """Bits, inputs that share a scale, and whether groups have zeros of their own.

    >>> parse_rtn("rtn-int4-g32-asym")
    (4, 32, True)
    """
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None or int(found[2]) not in GROUPS:
        raise NotSupported(
            f"got quantization={name!r}, want {', '.join(WORDS)}, or rtn-int4-g32 or the like:"
            " int4 or int8, g32, g64, g128 or g256, and -asym at the end for zeros of their own;"
            " weights that are stored quantised need no such word"
        )
    return int(found[1]), int(found[2]), found[3] is not None


def check_form(name: str) -> None:
    """Raises NotSupported."""
    if name not in WORDS:
        parse_rtn(name)


def is_form(name: str) -> bool:
    """
    >>> is_form("fp8"), is_form("rtn-int4-g33")
    (True, False)
    """
    try:
        check_form(name)
    except NotSupported:
        return False
    return True
