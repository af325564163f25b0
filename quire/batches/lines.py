"""Lines of a batch's input file: one JSON object each, checked before any of them runs.

As in OpenAI's Batch API: {"custom_id": ..., "method": "POST", "url": ..., "body": {...}}. What is
wrong is reported with its line number, and then the whole batch fails: half a batch helps nobody.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MAX_LINES = 50_000
MAX_LINE_BYTES = 8 << 20
MAX_ERRORS = 100  # of one file that are told
MAX_CUSTOM_ID = 512


class InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Place(NamedTuple):
    """Where a line is in its file."""

    number: int  # from 0
    custom_id: str
    begin: int
    size: int


class LineError(NamedTuple):
    code: str
    line: int | None  # from 1, as editors count
    message: str
    param: str | None = None

    def shape(self) -> dict[str, Any]:
        return self._asdict()


class Checked(NamedTuple):
    places: list[Place]
    errors: list[LineError]


_decode = msgspec.json.Decoder(InputLine).decode


def check_lines(path: Path, endpoint: str) -> Checked:
    """Every line's place, or what is wrong with the file. Reads line by line."""
    places: list[Place] = []
    errors: list[LineError] = []
    seen: dict[str, int] = {}
    begin = 0
    with path.open("rb") as file:
        for at, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 2), b""), 1):
            size = len(raw)
            if size > MAX_LINE_BYTES + 1:
                text = f"line {at} has more than {MAX_LINE_BYTES} bytes"
                errors.append(LineError("line_too_long", at, text))
                break
            if raw.strip():
                error, line = _check(raw, at, endpoint, seen)
                if error is not None:
                    errors.append(error)
                elif line is not None:
                    seen[line.custom_id] = at
                    places.append(Place(len(places), line.custom_id, begin, size))
            if len(errors) >= MAX_ERRORS:
                break
            if at - len(places) - len(errors) > MAX_LINES:
                errors.append(LineError("blank_lines", at, f"more than {MAX_LINES} blank lines"))
                break
            if len(places) > MAX_LINES:
                text = f"got more than {MAX_LINES} requests in one file; split it"
                errors.append(LineError("too_many_requests", at, text))
                break
            begin += size
    if not places and not errors:
        errors.append(LineError("empty_file", None, "the file has no lines"))
    return Checked(places, errors)


def _check(
    raw: bytes, at: int, endpoint: str, seen: dict[str, int]
) -> tuple[LineError | None, InputLine | None]:
    try:
        line = _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return LineError("invalid_json_line", at, f"line {at}: {str(error)[:300]}"), None
    if line.method != "POST":
        text = f"line {at}: got method {line.method[:20]!r}, want 'POST'"
        return LineError("invalid_method", at, text, "method"), None
    if line.url != endpoint:
        text = f"line {at}: got url {line.url[:100]!r}, want the batch's endpoint {endpoint!r}"
        return LineError("mismatched_url", at, text, "url"), None
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        text = f"line {at}: custom_id has {len(line.custom_id)} characters, want 1-{MAX_CUSTOM_ID}"
        return LineError("invalid_custom_id", at, text, "custom_id"), None
    if line.custom_id in seen:
        text = (
            f"line {at}: custom_id {line.custom_id[:80]!r} is that of line {seen[line.custom_id]}"
        )
        return LineError("duplicate_custom_id", at, text, "custom_id"), None
    if line.body.get("stream"):
        text = f"line {at}: stream=true has no meaning in a batch; leave it out"
        return LineError("invalid_body", at, text, "body.stream"), None
    return None, line


def read_body(path: Path, begin: int, size: int) -> dict[str, Any]:
    """The body of one checked line."""
    with path.open("rb") as file:
        file.seek(begin)
        return _decode(file.read(size)).body
