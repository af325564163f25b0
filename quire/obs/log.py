"""Logs: one event, one line, whatever is in it.

Events have a name and fields (`log_event`), and are written as JSON for machines or as
`name key=value` for people. Every value is escaped, so nothing a client sends can begin a new line,
move a terminal's cursor or pass for another field. Keys are blotted out wherever they turn up, and
fields that would hold somebody's text are replaced by their length. Standard library only.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import IO, Literal, NamedTuple

from quire.errors import NotSupported

LogFormat = Literal["auto", "text", "json"]
Field = str | int | float | bool | None

LOGGER = "quire"
FORMATS = ("auto", "text", "json")
LEVELS = ("debug", "info", "warning", "error", "critical")
REDACTED = "[redacted]"
MAX_VALUE = 2000  # characters of one value; a client's header may be longer
MAX_TRACEBACK = 20_000
TRACEBACK_FIELDS = frozenset({"exception", "traceback"})

# What people write and models answer has no place in a log, even if a caller passes it.
PRIVATE_FIELDS = frozenset(
    {"body", "completion", "content", "input", "messages", "output", "prompt", "prompts", "text"}
)

_BARE = re.compile(r"[A-Za-z0-9_.:/@+\-]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
_FIELDS = "quire_fields"  # where a record carries the fields of its event


class AccessRecord(NamedTuple):
    """One HTTP exchange."""

    request_id: str
    method: str
    route: str
    status: int
    seconds: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None


def configure_logging(
    format: LogFormat,
    level: str,
    secrets: Iterable[str] = (),
    stream: IO[str] | None = None,
) -> None:
    """Send our events to `stream` (default: stderr); a later call replaces the settings."""
    if format not in FORMATS:
        raise NotSupported(f"got log format {format!r}, want one of {', '.join(FORMATS)}")
    if level.lower() not in LEVELS:
        raise NotSupported(f"got log level {level!r}, want one of {', '.join(LEVELS)}")
    stream = stream or sys.stderr
    if format == "auto":
        format = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.addFilter(Redaction(secrets))
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    logger = logging.getLogger(LOGGER)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def log_event(event: str, /, *, severity: int = logging.INFO, **fields: Field) -> None:
    """Log one event with its fields; `severity` is a level of `logging`.

    >>> log_event("engine_restarted", pid=77, exit_code=-9)
    """
    logger = logging.getLogger(LOGGER)
    if logger.isEnabledFor(severity):
        safe = {key: _hidden(key, value) for key, value in fields.items()}
        logger.log(severity, event, extra={_FIELDS: safe})


def log_access(record: AccessRecord, severity: int = logging.INFO) -> None:
    """The access line; fields that do not apply are left out."""
    fields = record._asdict() | {"seconds": round(record.seconds, 6)}
    told = {key: value for key, value in fields.items() if value is not None}
    log_event("access", severity=severity, **told)


def _hidden(key: str, value: Field) -> Field:
    if key in PRIVATE_FIELDS and not isinstance(value, (int, float, type(None))):
        return f"[{len(str(value))} characters]"
    return value


class Redaction(logging.Filter):
    """Blots out the given keys and anything that looks like an Authorization header."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        # Longest first: one key may be the beginning of another.
        words = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, words))) if words else None

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self.clean(record.getMessage()), ()
        if record.exc_info:
            trace = logging.Formatter().formatException(record.exc_info)
            record.exc_text = self.clean(trace)
        fields = _fields_of(record)
        setattr(record, _FIELDS, {self.clean(k): self._clean_value(v) for k, v in fields.items()})
        return True

    def _clean_value(self, value: Field) -> Field:
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return self.clean(str(value))

    def clean(self, text: str) -> str:
        if self._secrets is not None:
            text = self._secrets.sub(REDACTED, text)
        return _BEARER.sub(lambda match: f"{match[1]} {REDACTED}", text)


def _fields_of(record: logging.LogRecord) -> Mapping[str, Field]:
    fields: Mapping[str, Field] = record.__dict__.get(_FIELDS, {})
    return fields


def _all_fields(record: logging.LogRecord) -> dict[str, Field]:
    """Time, level and event first; a field cannot take their place."""
    when = datetime.fromtimestamp(record.created, UTC)
    own: dict[str, Field] = {
        "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": _short(record.getMessage(), MAX_VALUE),
    }
    given = {**_fields_of(record), **({"exception": record.exc_text} if record.exc_text else {})}
    return own | {
        _short(key, MAX_VALUE): _fitted(key, value)
        for key, value in given.items()
        if key not in own
    }


def _fitted(key: str, value: Field) -> Field:
    if not isinstance(value, str):
        return value
    if key in TRACEBACK_FIELDS:  # the end is what one wants to see
        return value if len(value) <= MAX_TRACEBACK else f"... {value[-MAX_TRACEBACK:]}"
    return _short(value, MAX_VALUE)


def _short(value: str, limit: int) -> str:
    return value if len(value) <= limit else f"{value[:limit]}... {len(value)} characters"


class JsonLines(logging.Formatter):
    """One JSON object a line; ASCII only, so no character can act as a control character."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _all_fields(record)
        return json.dumps({key: _json_value(value) for key, value in fields.items()})


def _json_value(value: Field) -> Field:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return value


class TextLines(logging.Formatter):
    """`time LEVEL event key=value ...` for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _all_fields(record)
        when, level, event = (str(fields.pop(key)) for key in ("time", "level", "event"))
        pairs = [f"{_text(key)}={_text(value)}" for key, value in fields.items()]
        return " ".join([when, f"{level.upper():<7}", _text(event), *pairs])


def _text(value: Field) -> str:
    """Bare when nothing in it could be misread, otherwise quoted and escaped as in JSON."""
    text = value if isinstance(value, str) else json.dumps(_json_value(value)).strip('"')
    return text if _BARE.fullmatch(text) else json.dumps(text)
