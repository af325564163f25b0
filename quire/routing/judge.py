"""A judge: a command of the user's that scores answers. It is started once, without a shell."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from quire.errors import BadRequest
from quire.routing.ask import read_ask
from quire.routing.examples import Scorer


def judged_by(command: str) -> Scorer:
    """A command that reads lines {"prompt", "answer"} and writes a number for each."""

    def score(asked: Sequence[tuple[dict[str, Any], str]]) -> list[float]:
        lines = [
            json.dumps({"prompt": read_ask(record).text, "request": record, "answer": answer})
            for record, answer in asked
        ]
        words = shlex.split(command)
        try:
            done = subprocess.run(
                words, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
            )
        except (OSError, IndexError) as error:
            raise BadRequest(f"--judge {command!r} cannot be run: {error}") from None
        if done.returncode:
            why = done.stderr.strip()[-300:]
            raise BadRequest(f"--judge {command!r} ended with {done.returncode}: {why}")
        try:
            found = [float(line) for line in done.stdout.split()]
        except ValueError as error:
            raise BadRequest(f"--judge {command!r} wants to write numbers: {error}") from None
        if len(found) != len(asked):
            raise BadRequest(f"--judge wrote {len(found)} numbers for {len(asked)} answers")
        return found

    return score
