"""Logs that stay one line an event, whatever a client puts into them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import NotSupported
from quire.obs.log import (
    MAX_VALUE,
    REDACTED,
    AccessRecord,
    configure_logging,
    log_access,
    log_event,
)

KEY = 'sk-"secret"\n1234'

ATTACKS = [
    "line\nlevel=error event=fake",
    "carriage\rreturn",
    "\r\n\r\n{}",
    "\x1b[2J\x1b[31mred\x1b[0m",
    "\x9b31m",  # the one-byte form of ESC [
    "back\x08\x08space",
    "null\x00byte",
    "separators\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e",
    "right-to-left\u202egnp.exe",
    "percent %s %d %n %(levelname)s {event} {0}",
    'quote" , "level": "critical',
    "lone surrogate \ud800",
    "delete\x7f",
    "a=b c=d",
]


@pytest.fixture(autouse=True)
def restore_logger() -> Iterator[None]:
    logger = logging.getLogger("quire")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def capture(format: str, level: str = "info", secrets: tuple[str, ...] = ()) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(format, level, secrets, stream)  # type: ignore[arg-type]
    return stream


def only_line(stream: io.StringIO) -> str:
    text = stream.getvalue()
    assert text.endswith("\n")
    line = text[:-1]
    assert all(" " <= character <= "~" for character in line), f"not plain ASCII: {line!r}"
    return line


@pytest.mark.parametrize("attack", ATTACKS)
def test_json_keeps_one_line_and_every_character(attack: str) -> None:
    """Red when a value can end the line, speak to the terminal or be lost."""
    stream = capture("json")
    log_event("request_failed", user=attack, **{attack: 1})
    record = json.loads(only_line(stream))
    assert record["user"] == attack and record[attack] == 1
    assert (record["event"], record["level"]) == ("request_failed", "info")


@pytest.mark.parametrize("attack", ATTACKS)
def test_text_keeps_one_line_and_its_fields(attack: str) -> None:
    """Red when a value can begin a new line or pass for another field."""
    stream = capture("text")
    log_event("request_failed", user=attack, status=500)
    line = only_line(stream)
    _, level, event, rest = line.split(maxsplit=3)
    assert (level, event) == ("INFO", "request_failed")
    assert rest.startswith('user="') and rest.endswith('" status=500')
    quoted = rest.removeprefix("user=").removesuffix(" status=500")
    assert json.loads(quoted) == attack


@given(st.text(), st.sampled_from(["json", "text"]))
def test_one_line_for_any_text(value: str, format: str) -> None:
    """Red when some character nobody thought of gets through."""
    stream = capture(format)
    log_event("event", value=value)
    logging.getLogger("quire.somewhere").warning("message %s", value)
    lines = stream.getvalue().split("\n")
    assert len(lines) == 3 and lines[2] == ""
    assert all(" " <= character <= "~" for line in lines for character in line)


def test_a_field_cannot_take_the_place_of_time_level_or_event() -> None:
    """Red when a field named `level` forges the record's own."""
    stream = capture("json")
    log_event("real", level="critical", time="never", event="fake")
    record = json.loads(only_line(stream))
    assert (record["level"], record["event"]) == ("info", "real")
    assert record["time"].startswith("20") and record["time"].endswith("Z")


@pytest.mark.parametrize("format", ["json", "text"])
def test_keys_never_reach_the_log(format: str) -> None:
    """Red when a key shows in a message, a field, a field's name or a traceback."""
    stream = capture(format, secrets=(KEY, "short", ""))
    logger = logging.getLogger("quire")
    log_event(f"got {KEY}", header=f"Bearer {KEY}", **{KEY: "shortcut"})
    logger.warning("refused %s", KEY)
    try:
        raise ValueError(f"no such key {KEY}")
    except ValueError:
        logger.exception("lookup failed")
    text = stream.getvalue()
    assert len(text.splitlines()) == 3
    assert "secret" not in text and "short" not in text
    assert text.count(REDACTED) >= 6
    assert "ValueError" in text


def test_authorization_headers_are_hidden_without_being_told() -> None:
    """Red when a wrong key, which is in no list, is written down for all to see."""
    stream = capture("json")
    log_event("unauthorized", header="Authorization: Bearer hf_0123456789")
    record = json.loads(only_line(stream))
    assert record["header"] == f"Authorization: Bearer {REDACTED}"


def test_peoples_words_are_not_logged() -> None:
    """Red when an event carries what somebody wrote."""
    stream = capture("json")
    log_event("oops", prompt="my diary", messages=[{"role": "user"}], prompt_tokens=3, text=None)  # type: ignore[arg-type]
    record = json.loads(only_line(stream))
    assert record["prompt"] == "[8 characters]" and "user" not in record["messages"]
    assert (record["prompt_tokens"], record["text"]) == (3, None)


def test_the_access_line() -> None:
    """Red when a field of the access line is renamed or dropped."""
    stream = capture("json")
    log_access(AccessRecord("req-1", "POST", "/v1/completions", 200, 0.1234567891, 12, 34, "stop"))
    log_access(AccessRecord("req-2", "GET", "/health", 200, 0.5))
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first == {
        "time": first["time"],
        "level": "info",
        "event": "access",
        "request_id": "req-1",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "seconds": 0.123457,
        "prompt_tokens": 12,
        "output_tokens": 34,
        "finish_reason": "stop",
    }
    assert "output_tokens" not in second


def test_auto_is_text_on_a_terminal_and_json_elsewhere() -> None:
    """Red when a service's log is not machine-readable, or a person gets JSON."""
    terminal = Terminal()
    configure_logging("auto", "info", stream=terminal)
    log_event("hello", ready=True, load=0.5, nothing=None, odd=float("nan"))
    assert terminal.getvalue().endswith("INFO    hello ready=true load=0.5 nothing=null odd=nan\n")
    pipe = capture("auto")
    log_event("hello", odd=float("inf"))
    assert json.loads(only_line(pipe))["odd"] == "inf"


def test_levels_and_configuring_again() -> None:
    """Red when a quiet log talks, or a second configuration writes every line twice."""
    first = capture("json", "debug")
    second = capture("json", "WARNING")
    log_event("quiet")
    log_event("loud", severity=logging.ERROR)
    assert first.getvalue() == ""
    assert json.loads(only_line(second))["level"] == "error"


def test_a_traceback_keeps_its_end() -> None:
    """Red when the line that says what went wrong is the one that is cut."""
    stream = capture("json")
    log_event("bug", traceback="frame\n" * 50_000 + "ValueError: this")
    record = json.loads(only_line(stream))
    assert record["traceback"].endswith("frame\nValueError: this")
    assert 10_000 < len(record["traceback"]) < 30_000


def test_long_values_are_cut() -> None:
    """Red when one header can fill the disk."""
    stream = capture("json")
    log_event("x" * 10_000, value="y" * 100_000)
    assert len(only_line(stream)) < 2 * MAX_VALUE + 300


@pytest.mark.parametrize(("format", "level"), [("xml", "info"), ("json", "loud")])
def test_unknown_settings_are_named(format: str, level: str) -> None:
    """Red when a typo in a flag is ignored, or the message does not say what would do."""
    with pytest.raises(NotSupported, match=r"got log (format 'xml'|level 'loud'), want one of"):
        configure_logging(format, level)  # type: ignore[arg-type]
