"""quire chat: talk to a model. Lines from a pipe are answered one after the other."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.engine_flags import add_engine_flags, add_model, model_of, open_llm
from quire.cli.generate import add_sampling_flags, sampling_params
from quire.cli.parser import VerbParser
from quire.cli.show import dim, note, print_json
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.cli.session import ChatSession

EXAMPLES = """
quire chat                                      the default model
quire chat qwen2.5-0.5b-instruct --temperature 0.2
quire chat --system 'Answer in one sentence.'
printf 'Hi\\nAnd you?\\n' | quire chat --json     one answer per line
quire chat --demo                               two fixed questions, then leave
"""

COMMANDS = """\
/help             this list
/reset            forget the conversation
/system TEXT      set the system prompt and start over
/set NAME VALUE   change temperature, top_p, top_k, min_p, max_tokens, seed
/stats            what the engine has done so far
/exit             leave (or Ctrl-D); Ctrl-C stops an answer"""

DEMO_QUESTIONS = (
    "In two sentences: what does a KV cache do in a language model?",
    "Now say the same in one short sentence.",
)


def build_parser() -> VerbParser:
    parser = VerbParser("chat", "Talk to a model in the terminal.", EXAMPLES, "[MODEL]")
    add_model(parser)
    parser.flag("--system", "system prompt", default="", metavar="TEXT")
    parser.flag("--demo", "ask two fixed questions and leave", action="store_true")
    parser.flag("--json", "one JSON object per answer", action="store_true")
    add_sampling_flags(parser, max_tokens=512, temperature=0.7)
    add_engine_flags(parser)
    return parser


def run(args: Namespace) -> int:
    from quire.cli.session import ChatSession

    params = sampling_params(args)
    if args.demo:
        params = params.with_(temperature=0.0, max_tokens=min(args.max_tokens, 96))
    llm = open_llm(args, seed=args.engine_seed)
    llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "?"}])  # fails early
    session = ChatSession(llm, params, args.system)
    if args.demo:
        return _demo(session, args.json)
    is_live = sys.stdin.isatty() and not args.json
    if is_live:
        note(f"{Path(model_of(args)).name} · /help for commands, Ctrl-D to leave")
    for line in _lines(is_live):
        try:
            if line.startswith("/"):
                if not command(session, line):
                    break
            else:
                answer(session, line, args.json)
        except BadRequest as error:  # the chat goes on; a full context is left with /reset
            hint = "; /reset starts over" if session.turns else ""
            note(f"error: {error}{hint}")
    return 0


def _lines(is_live: bool) -> Iterator[str]:
    if is_live:
        import readline  # noqa: F401  # line editing and history for input()
    while True:
        try:
            line = input("> ") if is_live else sys.stdin.readline()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /exit to leave)")
            continue
        if not is_live and not line:
            return
        if line.strip():
            yield line.strip()


def answer(session: ChatSession, text: str, as_json: bool) -> None:
    """Ask, show the answer as it comes, then how it went."""
    from quire.cli.session import stop_on_ctrl_c

    pieces: list[str] = []
    with stop_on_ctrl_c() as is_stopped:
        for piece in session.ask(text, is_stopped):
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    stats = session.last
    assert stats is not None
    if as_json:
        print_json({"message": text, "answer": "".join(pieces), **stats.as_dict()})
    else:
        print(f"\n{dim(stats.describe())}\n", flush=True)


def command(session: ChatSession, line: str) -> bool:
    """Carry out a /command; False to leave."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word in ("/exit", "/quit"):
        return False
    if word == "/help":
        note(COMMANDS)
    elif word == "/reset":
        session.reset()
        note("(a new conversation)")
    elif word == "/system":
        session.system = rest
        session.reset()
        note("(system prompt set)" if rest else "(no system prompt)")
    elif word == "/set":
        name, _, value = rest.partition(" ")
        session.set(name, value.strip())
        note(f"({name} = {value.strip()})")
    elif word == "/stats":
        _print_stats(session)
    else:
        raise BadRequest(f"unknown command {word}; /help lists them")
    return True


def _print_stats(session: ChatSession) -> None:
    stats = session.llm.stats()
    note(
        f"{stats.num_finished} answers · {stats.num_output_tokens} tokens out · "
        f"{stats.num_fed_tokens} fed · {stats.prefix_hit_rate:.0%} of prompts from the cache · "
        f"{stats.pages_cached + stats.pages_live} of {stats.pages_total} pages in use"
    )


def _demo(session: ChatSession, as_json: bool) -> int:
    """The follow-up repeats the conversation, so most of its prompt comes from the cache."""
    for question in DEMO_QUESTIONS:
        if not as_json:
            print(f"> {question}")
        answer(session, question, as_json)
    if not as_json:
        _print_stats(session)
    return 0
