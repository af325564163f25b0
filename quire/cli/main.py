"""The command line: a table of verbs, each in a file of its own, imported when it is called.

This file owns what all verbs share: help, version, and what errors look like. A user's mistake is
one line on stderr and exit code 2, other failures 1, Ctrl-C 130; a reader that leaves ends it in
silence. Nothing here imports torch, so help is instant; see `engine_flags.py` for the options that
build an engine.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import NamedTuple

from quire.cli.streams import Output, open_closed_streams
from quire.errors import BadRequest, CheckpointError, NotSupported, QuireError

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141


class Verb(NamedTuple):
    """`module` has `build_parser() -> ArgumentParser` and `run(args) -> int`."""

    module: str
    purpose: str


VERBS = {
    "serve": Verb("quire.cli.serve", "serve a model over HTTP, with a page to watch it work"),
    "chat": Verb("quire.cli.chat", "talk to a model in the terminal"),
    "generate": Verb("quire.cli.generate", "continue prompts, or answer them with --chat"),
    "batch": Verb("quire.cli.batch", "run a file of requests, one a line; goes on after a kill"),
    "route": Verb("quire.cli.route", "learn when a small model suffices, from examples"),
    "join": Verb("quire.cli.join", "hold a part of a model that another machine serves"),
    "router": Verb("quire.cli.router", "one address in front of several servers"),
    "deploy": Verb("quire.cli.deploy", "replicas of a server on Ray Serve, as many as are needed"),
    "pull": Verb("quire.cli.pull", "download models, or list those known by name"),
    "inspect": Verb("quire.cli.inspect", "show what a model is and what the engine would decide"),
    "evaluate": Verb("quire.cli.evaluate", "judge a model: perplexity, distance, tasks, size"),
    "quantize": Verb("quire.cli.quantize", "make a smaller model: fewer bits a weight"),
    "prune": Verb("quire.cli.prune", "make a smaller model: zeros in the place of weights"),
    "shrink": Verb("quire.cli.shrink", "make a smaller model: fewer layers, heads or channels"),
    "compress": Verb("quire.cli.compress", "make a smaller model: several passes, as a file says"),
    "simulate": Verb("quire.cli.simulate", "predict latency, goodput and price under a load"),
    "distill": Verb("quire.cli.distill", "train a drafter or a student from a model's own answers"),
    "bench": Verb("quire.cli.bench", "measure speed, start-up, each technique, or each kernel"),
}

EXAMPLES = """\
  quire serve                                  OpenAI-compatible server and page on port 8000
  quire chat                                   talk to the default model
  quire generate 'The capital of France is'    continue a text
  echo 'Why is the sky blue?' | quire generate --chat
  quire inspect smollm2-135m-instruct          sizes, limits and decisions
  quire bench ladder --quick                   what each technique is worth
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    open_closed_streams()
    with redirect_stdout(Output(sys.stdout)) as output:
        try:
            code = _run(words)
            output.flush()  # here, where what goes wrong can still be told
        except OSError:
            if output.error is None:
                raise
    if output.error is None:
        return code
    output.abandon()
    if isinstance(output.error, BrokenPipeError):
        return BROKEN_PIPE
    print(f"error: cannot write the output: {output.error.strerror}", file=sys.stderr)
    return FAILED


def _run(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except SystemExit as stop:  # argparse's, after it printed its help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except QuireError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        is_input = isinstance(error, (BadRequest, CheckpointError, NotSupported))
        return BAD_INPUT if is_input else FAILED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version", "version"):
        from quire import __version__

        print(f"quire {__version__}")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        raise BadRequest(f"unknown command {words[0]!r}{did_you_mean(words[0], VERBS)}")
    module = importlib.import_module(verb.module)
    return int(module.run(module.build_parser().parse_args(words[1:])))


def did_you_mean(word: str, known: Sequence[str] | dict[str, Verb]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.purpose}" for name, verb in VERBS.items())
    return (
        f"Quire: an LLM inference engine.\n\nexamples:\n{EXAMPLES}\n"
        f"usage: quire COMMAND [options]; 'quire COMMAND --help' for its options\n\n"
        f"commands:\n{verbs}\n\noptions:\n  --version  print the version"
    )
