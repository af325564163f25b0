"""quire quantize: make a smaller model of a model, and say what it cost."""

from __future__ import annotations

from argparse import Namespace

from quire.cli.judging import add_report_flags, run_and_judge
from quire.cli.parser import VerbParser, whole
from quire.cli.passes import add_keep, add_pass_flags, check_method, kept_of

EXAMPLES = """
quire quantize qwen2.5-coder-0.5b-instruct --method gptq --out qwen-gptq
quire quantize MODEL --method awq --group-size 64 --calibration mine.txt --out DIR
quire quantize MODEL --method rtn --bits 8 --out DIR         needs no text, takes seconds
quire quantize MODEL --method gguf --type Q4_K --out DIR     a file for llama.cpp too
quire generate --model DIR 'The capital of France is'
"""


def build_parser() -> VerbParser:
    from quire.compress.methods import METHODS

    purpose = "Quantise a model: fewer bits a weight, in a layout that vLLM and transformers read."
    parser = VerbParser("quantize", purpose, EXAMPLES, "MODEL --method METHOD --out DIR")
    parser.flag("--method", ", ".join(METHODS), metavar="METHOD", required=True)
    parser.flag("--bits", "of a weight; default: what is usual", type=whole(2, 8), metavar="N")
    parser.flag(
        "--group-size",
        "inputs that share a scale, 0 for a whole row; default: what is usual",
        type=whole(0, 1 << 20),
        metavar="N",
    )
    parser.flag("--asymmetric", "groups have zeros of their own", action="store_true")
    add_keep(parser, "quantised", "lm_head; gguf: none")
    parser.flag("--no-act-order", "gptq: round inputs in their order", action="store_true")
    parser.flag(
        "--no-static-groups", "gptq: groups follow the act order (g_idx)", action="store_true"
    )
    parser.flag("--static-inputs", "fp8: one input scale, from calibration", action="store_true")
    parser.flag("--type", "gguf: type of most tensors", default="Q4_K")
    add_pass_flags(parser)
    add_report_flags(parser)
    return parser


def run(args: Namespace) -> int:
    from quire.compress.methods import METHODS

    check_method(args.method, METHODS)
    from quire.compress.passes.recipe import Recipe

    recipe = Recipe(
        method=args.method,
        bits=args.bits,
        group=args.group_size,
        asymmetric=args.asymmetric,
        act_order=not args.no_act_order,
        static_groups=not args.no_static_groups,
        static_inputs=args.static_inputs,
        storage=args.type,
    )
    return run_and_judge(args, recipe, kept_of(args.keep, args.method), "quantising")
