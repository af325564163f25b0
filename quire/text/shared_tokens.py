"""Two vocabularies side by side: which tokens of one are, by their strings, tokens of the other.

For a drafter with a vocabulary of its own. What it guesses is taken over where the target has a
token of the same string; what it reads is, where it has no such token, the longest end of the
string that it has. So both count positions alike, and whatever is lost costs acceptance only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer

SPACE = "▁"  # how vocabularies that are not byte-level spell a space
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PROBES = 512  # tokens compared to tell whether two vocabularies of one size are the same


@dataclass(frozen=True, slots=True)
class SharedTokens:
    read_as: tuple[int, ...]  # by the target's ids: the drafter's
    pairs: tuple[tuple[int, int], ...]  # (the drafter's id, the target's) of the same string

    @staticmethod
    def of(drafter: Tokenizer, sizes: tuple[int, int], target: Tokenizer) -> SharedTokens:
        """`sizes` are numbers of rows: the drafter's embedding has, and the target's."""
        num_own, num_theirs = sizes
        own: dict[bytes, int] = {}
        for id in range(num_own):
            if string := token_string(drafter, id):
                own.setdefault(string, id)
        own |= _roles(drafter, target, num_own)
        unknown = drafter.unk_id or 0
        read_as = [unknown] * num_theirs
        pairs: dict[int, int] = {}
        for id in range(num_theirs):
            string = token_string(target, id)
            read_as[id] = next(_ends(string, own), unknown)
            if string in own:
                pairs.setdefault(own[string], id)
        return SharedTokens(tuple(read_as), tuple(sorted(pairs.items())))


def are_alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether both spell the same ids the same way, judged by some of them."""
    if one.largest_id != other.largest_id:
        return False
    ids = range(0, one.largest_id + 1, 1 + one.largest_id // PROBES)
    return all(one.id_to_token(id) == other.id_to_token(id) for id in ids)


def token_string(tokenizer: Tokenizer, id: int) -> bytes:
    """The bytes that a token stands for; none for ids that are no token."""
    if tokenizer.is_byte_level:
        return tokenizer.token_bytes(id)
    token = tokenizer.id_to_token(id)
    if token is None:
        return b""
    if byte := BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode("utf-8")


def _roles(drafter: Tokenizer, target: Tokenizer, num_own: int) -> Mapping[bytes, int]:
    """The drafter's beginning and end under the target's strings for them."""
    ends = next(iter(drafter.eos_ids), None)
    roles = [(target.bos_id, drafter.bos_id), *((id, ends) for id in target.eos_ids)]
    return {
        token_string(target, theirs): own
        for theirs, own in roles
        if theirs is not None and own is not None and own < num_own
    }


def _ends(string: bytes, own: Mapping[bytes, int]) -> Iterator[int]:
    """The drafter's tokens for ends of the string, the whole first."""
    for begin in range(len(string)):
        if (id := own.get(string[begin:])) is not None:
            yield id
