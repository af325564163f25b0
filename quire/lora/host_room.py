"""HostRoom: which adapters host memory has a copy of, within a limit of bytes and of copies.

A copy outlives its adapter's return to a slot, so the next time it makes room nothing is copied.
When the limits are passed, copies of adapters that have slots go first, then those that nobody has
used for longest. No tensors: `bank.py` holds them, and does what `adapters.py` tells it.
"""

from __future__ import annotations

from collections.abc import Container


class HostRoom:
    def __init__(self, max_bytes: int, max_copies: int | None = None) -> None:
        """None: as many as the bytes are enough for."""
        self.max_bytes, self.max_copies = max_bytes, max_copies
        self._sizes: dict[int, int] = {}  # bytes by number, used longest ago first

    def __contains__(self, number: int) -> bool:
        return number in self._sizes

    def fits(self, num_bytes: int) -> bool:
        """Whether a copy of so many bytes could stay, if all others went."""
        return num_bytes <= self.max_bytes

    def keep(self, number: int, num_bytes: int) -> None:
        """Behind all others; that may be too many, until `trim`."""
        self._sizes.pop(number, None)
        self._sizes[number] = num_bytes

    def forget(self, number: int) -> None:
        del self._sizes[number]

    def trim(self, have_slots: Container[int]) -> list[int]:
        """Whose copies went for the limits to hold.

        >>> room = HostRoom(max_bytes=100)
        >>> for number in (1, 2, 3):
        ...     room.keep(number, 40)
        >>> room.trim({2}), 2 in room, room.trim({2})
        ([2], False, [])
        """
        gone: list[int] = []
        # Those with slots first; sorting keeps the order of use.
        for number in sorted(self._sizes, key=lambda number: number not in have_slots):
            if not self._is_over():
                break
            self.forget(number)
            gone.append(number)
        return gone

    def _is_over(self) -> bool:
        has_too_many = self.max_copies is not None and len(self._sizes) > self.max_copies
        return has_too_many or sum(self._sizes.values()) > self.max_bytes
