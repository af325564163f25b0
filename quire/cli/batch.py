"""quire batch run: a file of requests through a server that lives as long as the file takes.

The same code as `/v1/batches`: a server on a free port of this machine, whose store lies beside the
output. So a run that is killed goes on where it was when it is called again, and the output is what
the server would have given.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from quire.cli.engine_flags import add_engine_flags, add_model
from quire.cli.parser import VerbParser
from quire.cli.show import note
from quire.errors import BadRequest

EXAMPLES = """
quire batch run lines.jsonl                        answers in lines.output.jsonl
quire batch run lines.jsonl --model ./my-model --output answers.jsonl
quire batch run lines.jsonl --threads 2            again after a kill: it goes on
"""


def build_parser() -> VerbParser:
    parser = VerbParser("batch", "Run a file of requests, one a line.", EXAMPLES, "run FILE")
    parser.add_argument("verb", choices=("run",))
    parser.add_argument("file", type=Path, metavar="FILE")
    add_model(parser, positional=False)
    parser.flag("--output", "answers (default: FILE with .output)", type=Path, metavar="FILE")
    add_engine_flags(parser)
    return parser


def run(args: Namespace) -> int:
    from quire.batches.lines import check_lines

    if not args.file.is_file():
        raise BadRequest(f"no such file: {args.file}")
    endpoint = _endpoint(args.file)
    if errors := check_lines(args.file, endpoint).errors:
        raise BadRequest(f"{args.file}: {errors[0].message}")
    output = args.output or args.file.with_suffix(f".output{args.file.suffix}")
    store = output.with_name(f".{output.name}.batch")
    code = _serve(args, endpoint, output, store)
    if code == 0:
        shutil.rmtree(store)
    return code


def _endpoint(path: Path) -> str:
    """Of all lines: that of the first."""
    import json

    with path.open("rb") as file:
        first = file.readline()
    try:
        return str(json.loads(first)["url"])
    except (ValueError, TypeError, KeyError):
        raise BadRequest(
            f"{path}: line 1 is no request, want"
            ' {"custom_id": ..., "method": "POST", "url": ..., "body": {...}}'
        ) from None


def _serve(args: Namespace, endpoint: str, output: Path, store: Path) -> int:
    """The supervisor has this thread, which signals come to; a second one is its client."""
    from quire.cli.batch_client import BatchClient, free_port
    from quire.cli.serve import build_parser as serve_parser
    from quire.cli.serve import settings_of
    from quire.obs.log import configure_logging
    from quire.server.supervisor import Supervisor

    words = ["--port", str(free_port()), "--store", str(store), "--no-page", "--log-format", "json"]
    words += ["--log-level", "error"]
    serving = serve_parser().parse_args(words)
    for name, value in vars(args).items():
        setattr(serving, name, value)
    # Its only client is this process; a key of the environment is for others.
    settings = replace(settings_of(serving, download=True), api_keys=(), admin_keys=())
    configure_logging(settings.log_format, settings.log_level, [])
    client = BatchClient(settings.port, args.file, endpoint, output, settings.engine.model)
    client.start()
    code = Supervisor(settings).run()
    if client.failure is not None:
        print(f"error: {client.failure}", file=sys.stderr)
        return 1
    if not client.is_done:
        note(f"not done; call it again to go on (state in {store})")
        return code or 130
    note(client.summary)
    return 0
