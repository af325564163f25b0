"""Route keys: short names of cached prefixes that a router can make from tokens alone.

The tree's own keys hold a secret, so that nobody can ask what was cached by guessing. A router must
be able to make its keys itself. They are told to administrators alone, and begin with the caller's
salt, which is as secret as the caller's key.
"""

from __future__ import annotations

from hashlib import blake2b

KEY_BYTES = 8


def root_route_key(salt: str) -> bytes:
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def child_route_key(parent: bytes, tokens: bytes) -> bytes:
    """`tokens`: int32 ids of one page."""
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()
