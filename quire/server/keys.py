"""Keys: who is calling, decided in constant time.

Keys are kept as SHA-256 digests; a presented key is hashed and compared with all of them, always
all, so that neither length nor position leaks through timing. Without any key configured everyone
may call everything. With keys, the admin verbs need an admin key: none configured, nobody has one.
A key may have a weight, which is its share where keys compete (`sched/fair.py`).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from quire.errors import BadRequest

MAX_WEIGHT = 1000.0
_WEIGHTED = re.compile(r"(.*\S)\s+weight=(\S+)")


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller we let in. `salt` separates the cached prefixes of different keys."""

    salt: str
    is_admin: bool
    weight: float = 1.0


class KeyRing:
    def __init__(
        self,
        keys: Sequence[str],
        admin_keys: Sequence[str],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        assert all([*keys, *admin_keys]), "an empty key would let in whoever sends none"
        self._keys = [sha256(key.encode()).digest() for key in keys]
        self._admin = [sha256(key.encode()).digest() for key in admin_keys]
        self._weights = {
            sha256(key.encode()).digest(): weight for key, weight in (weights or {}).items()
        }

    @property
    def is_open(self) -> bool:
        """No keys at all: a server for its own machine."""
        return not self._keys and not self._admin

    @property
    def salts(self) -> list[str]:
        """Of every caller there can be."""
        return ["", *(_salt(digest) for digest in dict.fromkeys([*self._keys, *self._admin]))]

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """None when the key is missing or wrong."""
        if self.is_open:
            return Caller("", is_admin=True)
        digest = sha256(presented_key(headers).encode("utf-8", "surrogatepass")).digest()
        is_admin = _is_among(digest, self._admin)
        is_known = _is_among(digest, self._keys)
        if not (is_admin or is_known):
            return None
        return Caller(_salt(digest), is_admin, self._weights.get(digest, 1.0))


def _salt(digest: bytes) -> str:
    return digest.hex()[:32]


def _is_among(digest: bytes, known: Sequence[bytes]) -> bool:
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found


def presented_key(headers: Mapping[str, str]) -> str:
    """`Authorization: Bearer KEY`, or Anthropic's older `x-api-key: KEY`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()


def read_key(text: str) -> tuple[str, float]:
    """A key as it is given, with a weight behind it or not.

    >>> read_key("sk-123 weight=2.5"), read_key("sk-123")
    (('sk-123', 2.5), ('sk-123', 1.0))
    """
    found = _WEIGHTED.fullmatch(text)
    if found is None:
        return text, 1.0
    try:
        weight = float(found[2])
    except ValueError:
        weight = 0.0
    if not 0 < weight <= MAX_WEIGHT:
        raise BadRequest(
            f"got weight={found[2]} behind an API key, want a number above 0 and up to"
            f" {MAX_WEIGHT:g}"
        )
    return found[1], weight
