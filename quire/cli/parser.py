"""VerbParser: argparse with examples before options, one-line errors and a guess at typos."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from quire.errors import BadRequest


class VerbParser(argparse.ArgumentParser):
    passes_on = False  # words that it does not know are another verb's, and kept in `words`

    def __init__(self, verb: str, purpose: str, examples: str, words: str = "") -> None:
        """`words` are the positional arguments as the usage line shows them."""
        lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
        super().__init__(
            prog=f"quire {verb}",
            usage=f"quire {verb} [options] {words}".rstrip(),
            description=f"{purpose}\n\nexamples:\n{lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an option added later must not change what a script means
        )

    def format_help(self) -> str:
        """argparse puts the usage line first; a reader wants something to copy first."""
        usage, description = self.format_usage(), self.description or ""
        rest = super().format_help().removeprefix(usage).replace(description, "", 1)
        return f"{description}\n\n{usage}\n{rest.lstrip()}"

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace or argparse.Namespace())
        if unknown and not self.passes_on:
            options = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].split("=")[0], options, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            self.error(f"unknown argument {unknown[0]!r}{hint}")
        # As they were given: a verb may start others with them.
        found.words = unknown if self.passes_on else list(args or ())
        return found

    def error(self, message: str) -> NoReturn:
        raise BadRequest(f"{message} (see '{self.prog} --help')")

    def flag(self, name: str, help: str, **options: Any) -> None:
        """An option whose help ends in its default, when it has one worth showing."""
        default = options.get("default")
        if default is not None and default is not False:
            help = f"{help} (default: {default})"
        self.add_argument(name, help=help, **options)


def size_bytes(text: str) -> int:
    """'4GiB', '512MiB', '1.5GB' or a number of bytes.

    >>> size_bytes("2KiB"), size_bytes("1.5kB"), size_bytes("77")
    (2048, 1500, 77)
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {letter: 1024**power, f"{letter}ib": 1024**power, f"{letter}b": 1000**power}
    number = text.strip().rstrip("kKmMgGtTiIbB")
    unit = text.strip()[len(number) :].lower()
    try:
        value = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a size such as 4GiB or 512MiB")
    return value


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a whole number within bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, want a whole number from {least} to {most}"
            )
        return value

    return read


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, want a JSON object")
    return value


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a whole number >= 1")
    return value
