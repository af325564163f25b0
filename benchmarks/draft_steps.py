"""Drafts of texts, counted: steps that they save, whatever the machine is busy with.

The model answers once without drafts. Its answers are then played (`tests/spec/played.py`) to the
real policy with a fixed table of step times, so the numbers are the same in every run. Beside them
are two bounds: what the same guesses would bring if it was known how many of each are right, and if
whatever stood anywhere before could be copied from the best place. A line of JSON for each set.

    python -m benchmarks.draft_steps
    python -m benchmarks.draft_steps --method suffix
"""

from __future__ import annotations

import argparse
import json
import statistics
from array import array
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.gateway_draft import CODE, DOCUMENT, FAMILIES
from benchmarks.speculation import PROMPTS
from quire import LLM, SamplingParams
from quire.engine.speculate import _proposer
from quire.request import Request
from quire.spec.in_turn import InTurn
from quire.spec.proposer import Proposer
from quire.spec.verify import num_right
from quire.speculative import SpecConfig, parse_speculative
from tests.spec.played import CPU, Asked, played

QUESTIONS = [
    "What are the main differences between a violin and a cello?",
    "How do I boil an egg so that the yolk stays soft?",
    "Why is the sky blue in the morning?",
    "Write a short letter to Anna that thanks for a book about the sea.",
]
# What a hint or a prompt says, and what the answer says instead.
EDITS = {
    "edits: a name": (DOCUMENT, [("harbour", "river"), ("harbour", "Port of Rotterdam")]),
    "edits: a variable": (CODE, [("prices", "item_costs"), ("price", "amount"), ("prices", "p")]),
    "edits: words put in": (
        CODE,
        [("    return", "    # the result\n    return"), ("(prices", "(prices: list[float]")],
    ),
}


def collected(llm: LLM) -> dict[str, list[Asked]]:
    def answer(text: str, num: int, whole: bool) -> tuple[list[int], list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=whole)
        (output,) = llm.chat([[{"role": "user", "content": text}]], params, use_tqdm=False)
        return list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)

    sets: dict[str, list[Asked]] = defaultdict(list)
    for family in FAMILIES:
        _, hint = answer(family.base, 160, False)
        for text in family.variants:
            sets[f"hint: {family.kind}"].append(Asked(*answer(text, 160, False), hint))
    encode = llm.get_tokenizer().encode
    for name, (text, edits) in EDITS.items():
        for old, new in edits:
            changed = encode(text.replace(old, new))
            sets[f"hint: {name}"].append(Asked([1, 2, 3], changed, encode(text)))
            sets[f"prompt: {name}"].append(Asked([*encode(text), 1, 2, 3], changed))
    for name, text in PROMPTS.items():
        sets[name].append(Asked(*answer(text, 120, True)))
    for text in QUESTIONS:
        sets["questions"].append(Asked(*answer(text, 120, True)))
    return sets


# ------------------------------------------------------------ bounds


def depth_known(proposer: Proposer, depth: int, asked: Asked) -> float:
    """The shortest time that these guesses allow."""
    params = SamplingParams(max_tokens=len(asked.answer), temperature=0.0)
    request = Request.new(1, asked.prompt, params)
    request.hint = tuple(asked.hint)
    right = []
    for at, token in enumerate(asked.answer, 1):
        request.tokens.append(token)
        guess = proposer.propose(request, depth)
        right.append(num_right(asked.answer[at:], guess.tokens))
    return shortest(right)


def place_known(asked: Asked) -> float:
    """The same where any run of tokens that was there before may be guessed."""
    before = array("i", [*asked.hint, -1, *asked.prompt])
    right = []
    for at, token in enumerate(asked.answer, 1):
        before.append(token)
        rest, count = array("i", asked.answer[at:]), 0
        while count < len(rest) and is_in(rest[: count + 1], before):
            count += 1
        right.append(count)
    return shortest(right)


def is_in(run: array[int], text: array[int]) -> bool:
    pattern, whole, at = run.tobytes(), text.tobytes(), -1
    while (at := whole.find(pattern, at + 1)) >= 0:
        if at % text.itemsize == 0:
            return True
    return False


def shortest(right: Sequence[int]) -> float:
    """Time to the end, where behind each token so many guesses are right."""
    last = len(right) - 1
    times = [0.0] * (last + 1)
    for at in range(last - 1, -1, -1):
        most = min(right[at], last - 1 - at)
        times[at] = min(CPU.step.seconds(1 + n) + times[at + 1 + n] for n in range(most + 1))
    return times[0]


# ------------------------------------------------------------ counting


def counted(config: SpecConfig, asked: Sequence[Asked]) -> dict[str, object]:
    def proposer() -> Proposer:
        return InTurn([_proposer(part, config) for part in config.parts])

    rows: dict[str, list[float]] = defaultdict(list)
    steps = plain_steps = drafted = accepted = 0
    for one in asked:
        case = played(proposer(), config.depth, one)
        counts = case.core.drafts.counts  # type: ignore[union-attr]
        plain = (len(one.answer) - 1) * CPU.step.seconds(1)
        rows["times"].append(plain / case.time)
        rows["depth_known"].append(plain / depth_known(proposer(), config.depth, one))
        rows["place_known"].append(plain / place_known(one))
        steps, plain_steps = steps + case.num_steps, plain_steps + len(one.answer) - 1
        drafted, accepted = drafted + sum(counts.drafted_at), accepted + sum(counts.accepted_at)
    means = {name: round(statistics.geometric_mean(found), 2) for name, found in rows.items()}
    counts_of = {"steps": [plain_steps, steps], "drafted": drafted, "accepted": accepted}
    return {**counts_of, **means, "each": [round(gain, 2) for gain in rows["times"]]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="default")
    parser.add_argument("--method", default=None, help="default: hint, and suffix without one")
    options = parser.parse_args()
    llm = LLM(options.model, device="cpu", max_model_len=2048, max_num_seqs=4, num_threads=1)
    for name, asked in collected(llm).items():
        method = options.method or ("hint" if name.startswith("hint") else "suffix")
        given: dict[str, object] = {"method": method}
        if "suffix" in method:  # answers of other sets are not to help
            given["suffix_decoding_max_cached_requests"] = 0
        made = counted(parse_speculative(given), asked)
        print(json.dumps({"set": name, "method": method, **made}), flush=True)


if __name__ == "__main__":
    main()
