"""How far `--tp-reduce fast` moves log-probabilities from those of one rank.

    python benchmarks/split_sums.py                                  the table of docs/ranks.md
    python benchmarks/split_sums.py --model MODEL --ranks 2 --device cuda:0,cuda:0 --weights stored

One rank reads a text, then several do with their sums split. Compared are the tokens of the text
and the likeliest beside each, where both name them. The same numbers come out every time. One JSON
line for each form of the weights and number of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

TEXT = Path(__file__).parents[1] / "quire" / "compress" / "calibration.txt"
BESIDE = 5
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "stored": {},
    "rtn-int4-g32": {"quantization": "rtn-int4-g32"},
}

Said = list[dict[int, float]]  # log-probabilities at each token


def read(args: argparse.Namespace, form: str, **ranks: Any) -> Said:
    llm = LLM(
        args.model,
        max_model_len=args.tokens + 1,  # one is drawn behind them
        num_threads=args.threads,
        **FORMS[form] | ranks,
    )
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=BESIDE)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    found = [at for at in output.prompt_logprobs or () if at is not None]
    return [{token: its.logprob for token, its in at.items()} for at in found]


def compared(ours: Said, theirs: Said) -> dict[str, float]:
    pairs = list(zip(ours, theirs, strict=True))
    apart = [abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys()]
    same = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs)
    return {
        "largest": float(f"{max(apart):.2g}"),
        "mean": float(f"{math.fsum(apart) / len(apart):.2g}"),
        "compared": len(apart),
        "same_first_token": round(same / len(pairs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--weights", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--device", default="cpu", help="of ranks; one rank takes the first")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    for form in args.weights:
        one = read(args, form, device=args.device.split(",")[0])
        for count in args.ranks:
            split = {"tensor_parallel_size": count, "tp_reduce": "fast"}
            line = {"what": "split sums", "model": args.model, "device": args.device}
            line |= {"weights": form, "ranks": count, "tokens": args.tokens}
            made = compared(read(args, form, device=args.device, **split), one)
            print(json.dumps(line | made), flush=True)


if __name__ == "__main__":
    main()
