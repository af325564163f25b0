"""Who is let in: keys, their spellings, and where they come from."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from quire.cli.serve import build_parser, settings_of
from quire.errors import BadRequest
from quire.server.keys import Caller, KeyRing, presented_key
from quire.server.settings import ServeSettings


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_right_key_in_each_spelling() -> None:
    ring = KeyRing(["one", "two"], [])
    for headers in (
        bearer("one"),
        {"authorization": "bearer one"},
        {"authorization": "BEARER   two "},
        {"x-api-key": "two"},
        {"authorization": "Basic abc", "x-api-key": "one"},
    ):
        assert ring.caller(headers) is not None, headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer(" "),
        bearer("on"),
        bearer("onee"),
        bearer("One"),
        bearer("one\x00"),
        bearer("one two"),
        bearer("ｏｎｅ"),
        bearer("\ud800"),
        {"authorization": "one"},
        {"authorization": "Basic one"},
        {"x-api-key": ""},
        {"x_api_key": "one"},
    ],
)
def test_everything_else_is_nobody(headers: dict[str, str]) -> None:
    """Red when a prefix, a lookalike or an empty key is let in."""
    assert KeyRing(["one", "two"], ["boss"]).caller(headers) is None


def test_admin_needs_an_admin_key() -> None:
    """Red when holding some key is enough to run the server."""
    ring = KeyRing(["user"], ["boss"])
    assert ring.caller(bearer("user")) == Caller(ring.caller(bearer("user")).salt, False)  # type: ignore[union-attr]
    assert ring.caller(bearer("boss")).is_admin  # type: ignore[union-attr]
    assert not KeyRing(["user"], []).caller(bearer("user")).is_admin  # type: ignore[union-attr]
    assert KeyRing([], []).caller({}) == Caller("", is_admin=True)
    assert KeyRing([], ["boss"]).caller({}) is None


def test_keys_have_their_own_salt_and_it_is_not_the_key() -> None:
    """Red when two keys could share cached prefixes, or a salt gives its key away."""
    ring = KeyRing(["one", "two"], [])
    salts = {ring.caller(bearer(key)).salt for key in ("one", "two")}  # type: ignore[union-attr]
    assert len(salts) == 2
    assert not any("one" in salt or "two" in salt for salt in salts)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the comparison ends at the first match, or compares the keys themselves."""
    seen: list[tuple[bytes, bytes]] = []
    true_compare = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        seen.append((left, right))
        return true_compare(left, right)

    monkeypatch.setattr("quire.server.keys.hmac.compare_digest", compare)
    ring = KeyRing(["first", "second", "third"], ["boss"])
    for key in ("first", "third", "wrong", "x" * 100_000):
        seen.clear()
        ring.caller(bearer(key))
        assert len(seen) == 4
        assert all(len(side) == 32 for pair in seen for side in pair)


def test_an_empty_key_cannot_be_configured() -> None:
    """Red when `--admin-api-key ''` makes an admin of everyone who sends no key."""
    with pytest.raises(AssertionError):
        KeyRing(["user"], [""])
    for words in (
        ["--api-key", ""],
        ["--admin-api-key", ""],
        ["--admin-api-key", "  "],
        ["--api-key", "schlüssel"],
        ["--api-key", " a"],
    ):
        with pytest.raises(BadRequest, match="ASCII"):
            parsed(*words)


def parsed(*words: str) -> ServeSettings:
    made = settings_of(build_parser().parse_args(list(words)))
    assert isinstance(made, ServeSettings)
    return made


def test_keys_come_from_flag_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# ours\nfrom-file\n\n  spaced  \n")
    monkeypatch.setenv("QUIRE_API_KEY", "from-env")
    made = parsed("--api-key", "from-flag", "--api-key-file", str(file))
    assert made.api_keys == ("from-flag", "from-file", "spaced", "from-env")
    monkeypatch.delenv("QUIRE_API_KEY")
    file.write_text("# nothing\n")
    with pytest.raises(BadRequest, match="holds no key"):
        parsed("--api-key-file", str(file))
    with pytest.raises(BadRequest, match="--api-key-file"):
        parsed("--api-key-file", str(tmp_path / "absent"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_no_key_no_listening_beyond_this_machine(host: str) -> None:
    with pytest.raises(BadRequest, match="without an API key"):
        parsed("--host", host)
    assert parsed("--host", host, "--api-key", "k").api_keys == ("k",)
    assert not parsed("--host", host, "--allow-unauthenticated").is_local
    assert parsed("--host", "127.0.0.1").is_local and parsed("--host", "::1").is_local


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_limits_in_seconds_are_checked(text: str) -> None:
    for flag in ("--request-timeout", "--queue-timeout", "--drain-timeout", "--stall-timeout"):
        with pytest.raises(BadRequest, match="seconds above 0"):
            parsed(flag, text)


def test_bearer_wins_over_x_api_key() -> None:
    assert presented_key(bearer("a") | {"x-api-key": "b"}) == "a"


def test_weights_stand_behind_their_keys(tmp_path: Path) -> None:
    """Red when a weight is taken for a part of the key, or does not reach the caller."""
    file = tmp_path / "keys.txt"
    file.write_text("plain\nheavy  weight=3\n")
    made = parsed("--api-key-file", str(file), "--api-key", "light weight=0.5")
    assert made.api_keys == ("light", "plain", "heavy")
    ring = KeyRing(made.api_keys, ["boss"], made.key_weights)
    weights = {key: ring.caller(bearer(key)).weight for key in (*made.api_keys, "boss")}  # type: ignore[union-attr]
    assert weights == {"light": 0.5, "plain": 1.0, "heavy": 3.0, "boss": 1.0}
    for bad in ("0", "-1", "nan", "inf", "much"):
        with pytest.raises(BadRequest, match=f"weight={bad} behind an API key"):
            parsed("--api-key", f"k weight={bad}")
