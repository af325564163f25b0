"""Byte-level BPE spells every byte as a visible character; this is that alphabet, both ways.

Bytes that are visible characters in Latin-1 stand for themselves; the other 68 take the characters
from U+0100 on, in order. GPT-2 began it, and every byte-level vocabulary since uses the same table.
"""

from __future__ import annotations

VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_chars() -> dict[int, str]:
    hidden = sorted(set(range(256)) - set(VISIBLE))
    return {b: chr(b) for b in VISIBLE} | {b: chr(0x100 + i) for i, b in enumerate(hidden)}


BYTE_TO_CHAR = _byte_chars()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def spelled_bytes(token: str) -> bytes:
    """The bytes a token stands for; added tokens, which are plain text, stand for themselves."""
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    except KeyError:
        return token.encode("utf-8")
