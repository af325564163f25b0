"""An engine that prefills on this GPU until it is killed: a prompt on stdin, a ticket on stdout."""

from __future__ import annotations

import json
import sys

from quire.disagg.sockets import SocketConnector
from quire.request import Request
from tests.gpu.test_engine_gpu import engine_of, make, model_of
from tests.tiers.test_apart import compute


def main() -> None:
    family, secret, transport = sys.argv[1:]
    lends = {"kv_role": "prefill", "kv_listen": "127.0.0.1:0", "kv_transport": transport}
    engine = engine_of(model_of(family), kv_secret=secret, **lends)
    assert engine.tiers is not None and isinstance(engine.tiers.remote, SocketConnector)
    print("ready", engine.tiers.remote.address, flush=True)
    for number, line in enumerate(sys.stdin):
        request: Request = make(number, json.loads(line), 1)
        print("ticket", compute(engine, request), flush=True)


if __name__ == "__main__":
    main()
