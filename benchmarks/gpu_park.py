"""A model that leaves its GPU's memory and comes back for a request, random weights, one GPU.

    python -m benchmarks.gpu_park                     # an 8B model in bf16, in this process
    python -m benchmarks.gpu_park --form fp8-weights
    python -m benchmarks.gpu_park --served            # through `quire serve`
    python -m benchmarks.gpu_park --served --turns    # and with a second model, see below
    python -m benchmarks.gpu_park --rehearse          # a tiny model that stays, on any machine

Tokens must be those of before (`equal`). Seconds count: to leave, to return, and from a request to
its first token, with the return in it. The first time to leave includes locking memory of the host.
`--served` parks an 8B model by hand and asks for it, three times; with `--turns` it and a model of
0.6B, each sized for nine tenths of the GPU, then take turns. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from quire.bench.shapes import SHAPES, shrunk, write_shape
from quire.engine.build import Engine, build_engine
from quire.engine.parking import Parking
from quire.flat_args import args_of
from quire.load.open import open_model
from quire.params import SamplingParams
from quire.request import Request

ROUNDS, NUM_PROMPT, NUM_OUTPUT, MANY = 3, 128, 64, 8
LONGEST = 8192  # tokens of a request: the pages of enough of them fill the GPU
GB = 1e9
EVENTS = (
    *("parked", "unparked", "parking_refused", "model_makes_room", "model_starts_anew"),
    *("model_parks_by_heir", "model_failed"),
)


class Stays:
    """For a machine without a GPU: nothing leaves."""

    weight_bytes = page_bytes = 0
    has_copy = True

    def leave(self) -> None: ...

    def take(self) -> None: ...


def requests(vocab_size: int) -> list[Request]:
    draw = random.Random(1)
    made = []
    for id in range(MANY):
        prompt = [draw.randrange(3, vocab_size) for _ in range(NUM_PROMPT)]
        sampled = 0.8 * (id % 2)
        params = SamplingParams(temperature=sampled, max_tokens=NUM_OUTPUT, ignore_eos=True)
        made.append(Request.new(id, prompt, params, seed=id, arrival=float(id)))
    return made


def run(engine: Engine, asked: list[Request]) -> list[list[int]]:
    for request in asked:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    return [request.output for request in asked]


def first_token(engine: Engine, begun: float) -> float:
    """Seconds until one request's first token; it ends there."""
    (request, *_) = requests(engine.spec.vocab_size)
    engine.core.add(request)
    while not request.output:
        engine.core.step()
    seconds = time.perf_counter() - begun
    run(engine, [])
    return seconds


def free_gb() -> float:
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return round(torch.cuda.mem_get_info()[0] / GB, 3)


def here(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    device = "cpu" if args.rehearse else "cuda"
    wanted: dict[str, Any] = {"model": folder, "load_format": "dummy", "device": device}
    wanted |= {"quantization": args.form, "skip_tokenizer_init": True}
    wanted["max_model_len"] = 1024 if args.rehearse else LONGEST
    if not args.rehearse:
        wanted["gpu_memory_utilization"] = args.share
    begun = time.perf_counter()
    made = args_of(wanted)
    engine = build_engine(made, open_model(made).checkpoint, parks=True)
    found: dict[str, Any] = {"load_s": time.perf_counter() - begun}
    found["parking"] = [f"{d.value}; {d.why}" for d in engine.decisions if d.what == "parking"]
    parking = Parking(Stays(), engine.core) if args.rehearse else engine.parking
    if parking is None:
        return found | {"error": "this engine cannot be parked"}
    vocab, place = engine.spec.vocab_size, parking._place
    want = run(engine, requests(vocab))
    engine.core.scheduler.kv.flush()
    found["warm_first_token_s"] = first_token(engine, time.perf_counter())
    found["weights_gb"], found["pages_gb"] = place.weight_bytes / GB, place.page_bytes / GB
    lists = ("park_s", "unpark_s", "first_token_s", "free_before_gb", "free_parked_gb", "equal")
    found |= {name: [] for name in (*lists, "free_after_gb", "captures")}
    for _ in range(ROUNDS):
        graphs = 0 if engine.runner.graphs is None else len(engine.runner.graphs.graphs)
        found["free_before_gb"].append(free_gb())
        begun = time.perf_counter()
        parking.park()
        found["park_s"].append(time.perf_counter() - begun)
        found["free_parked_gb"].append(free_gb())
        begun = time.perf_counter()
        parking.unpark()
        found["unpark_s"].append(time.perf_counter() - begun)
        found["first_token_s"].append(first_token(engine, begun))
        found["free_after_gb"].append(free_gb())
        found["equal"].append(run(engine, requests(vocab)) == want)
        now = 0 if engine.runner.graphs is None else len(engine.runner.graphs.graphs)
        found["captures"].append(now - graphs)
    return found


# ------------------------------------------------------------ through the server


class Asker:
    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        sent = urllib.request.Request(self.url + path, json.dumps(body).encode())
        sent.add_header("content-type", "application/json")
        with urllib.request.urlopen(sent, timeout=120) as answer:
            made: dict[str, Any] = json.load(answer)
        return made

    def states(self) -> dict[str, str]:
        with urllib.request.urlopen(self.url + "/v1/models", timeout=5) as answer:
            return {one["id"]: one["state"] for one in json.load(answer)["data"]}

    def tokens(self, model: str, count: int = 16) -> list[int]:
        asked = {"model": model, "prompt": "abcdefgh" * 8, "max_tokens": count, "temperature": 0}
        found = self.post("/v1/completions", asked | {"return_token_ids": True, "ignore_eos": True})
        ids: list[int] = found["choices"][0]["token_ids"]
        return ids

    def first(self, model: str) -> float:
        begun = time.perf_counter()
        self.tokens(model, 1)
        return time.perf_counter() - begun

    def await_state(self, model: str, state: str) -> float:
        begun = time.perf_counter()
        while self.states()[model] != state:
            if time.perf_counter() - begun > 60:
                raise SystemExit(f"{model} is {self.states()[model]}, want {state}")
            time.sleep(0.02)
        return time.perf_counter() - begun


def served(scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.gpu_served import Server, write_tokenizer

    shapes = {"large": SHAPES["8b"], "small": SHAPES["0.6b"]}
    lines = []
    for name, config in shapes.items():
        config = shrunk(config) if args.rehearse else config
        write_tokenizer(Path(write_shape(config, scratch / name)), int(config["vocab_size"]))
        lines += [f"[models.{name}]", f'model = "{scratch / name}"', 'load_format = "dummy"']
        lines += [f"max_model_len = {1024 if args.rehearse else LONGEST}"]
        lines += [f"at_start = {str(name == 'large').lower()}"]
    (scratch / "models.toml").write_text("\n".join(lines))
    server = Server(scratch / "models.toml", (), 8099, scratch / "log", is_file=True)
    ask, found = Asker(server.url), dict[str, Any]()
    try:
        found["ready_s"] = server.await_ready()
        ask.await_state("large", "ready")
        want = ask.tokens("large")
        found["warm_s"] = ask.first("large")
        found |= {"park_s": [], "back_s": [], "equal": [], "turns_s": []}
        for _ in range(ROUNDS):
            time.sleep(3.2)  # a model that was just named is not parked
            ask.post("/admin/models/park", {"model": "large"})
            found["park_s"].append(ask.await_state("large", "parked"))
            found["back_s"].append(ask.first("large"))
            found["equal"].append(ask.tokens("large") == want)
        if args.turns:
            for name in ("small", "large", "small", "large"):
                time.sleep(3.2)
                found["turns_s"].append([name, round(ask.first(name), 3)])
            found["equal"].append(ask.tokens("large") == want)
    finally:
        server.process.terminate()
        server.process.wait(30)
        lines = server.log.read_text().splitlines()
        found["log"] = [line for line in lines if any(f'"{word}"' in line for word in EVENTS)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="8b")
    parser.add_argument("--form", help="weights are rounded to it")
    parser.add_argument("--share", type=float, default=0.9, help="of the GPU")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    config = shrunk(SHAPES[args.shape]) if args.rehearse else SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as scratch:
        if args.served:
            found = served(Path(scratch), args)
        else:
            found = here(write_shape(config, Path(scratch) / "model"), args)
    print(json.dumps({"shape": args.shape, "form": args.form, **rounded(found)}))


def rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    if isinstance(found, list):
        return [rounded(value) for value in found]
    return round(found, 4) if isinstance(found, float) else found


if __name__ == "__main__":
    main()
