"""Output files of a batch: a JSON line for each request, in the order of the input file.

Answers of 2xx go to the output file, all others to the error file; lines that were never run, in a
batch that expired or was cancelled, are in the error file of an expired one alone. Written anew
from the database as often as it takes, so a crash while writing costs nothing.
"""

from __future__ import annotations

import json
import secrets
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from quire.batches.files import FileStore, NewFile
from quire.batches.store import NEVER_RAN, Batch, BatchStore, Result

PAGE = 500
PURPOSE = "batch_output"


class OutputFiles(NamedTuple):
    output: str | None
    errors: str | None


async def write_outputs(batch: Batch, store: BatchStore, files: FileStore) -> OutputFiles:
    """Returns the ids of both files; None for one that would be empty."""
    good, bad = files.new_spool(), files.new_spool()
    after = -1
    try:
        with good.open("wb") as output, bad.open("wb") as errors:
            while results := await store.results(batch.id, after, PAGE):
                after = results[-1].number
                await store.database.in_thread(partial(_write, results, output, errors))
        return OutputFiles(
            await _kept(good, batch, files, "output"), await _kept(bad, batch, files, "errors")
        )
    finally:  # a full disk is not made fuller by every try
        for spool in (good, bad):
            spool.unlink(missing_ok=True)


def _write(results: list[Result], output: BinaryIO, errors: BinaryIO) -> None:
    for result in results:
        is_good = 200 <= result.status < 300
        (output if is_good else errors).write(line_of(result) + b"\n")


def line_of(result: Result) -> bytes:
    """One line, as OpenAI writes it. The body is the endpoint's own answer, byte for byte."""
    head = json.dumps({"id": f"batch_req_{secrets.token_hex(8)}", "custom_id": result.custom_id})
    if result.status == NEVER_RAN:
        tail = b', "response": null, "error": ' + result.answer
    else:
        about = json.dumps({"status_code": result.status, "request_id": secrets.token_hex(8)})
        body = b', "body": ' + result.answer
        tail = b', "response": ' + about[:-1].encode() + body + b'}, "error": null'
    return head[:-1].encode() + tail + b"}"


async def _kept(spool: Path, batch: Batch, files: FileStore, kind: str) -> str | None:
    if not spool.stat().st_size:
        spool.unlink()
        return None
    name = f"{batch.id}_{kind}"
    wish = NewFile(
        batch.tenant, PURPOSE, f"{name}.jsonl", batch.output_expires_in, id=f"file-{name}"
    )
    return (await files.keep(spool, wish)).id
