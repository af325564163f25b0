"""GroupBank: adapters of a model that several ranks hold; each rank has its share of an adapter.

The first rank decides; the others do what it did, with copies on the host as well, so none of them
ever reads a folder at another time than the first.
"""

from __future__ import annotations

from quire.engine import rank_messages as msg
from quire.engine.rank_group import RankGroup
from quire.lora.adapters import Facts
from quire.lora.bank import AdapterBank


class GroupBank:
    """`lora.adapters.Bank`."""

    def __init__(self, own: AdapterBank, group: RankGroup) -> None:
        self._own, self._group = own, group

    def put(self, number: int, path: str) -> Facts:
        facts = self._own.put(number, path)  # what is wrong with a folder is found here
        self._group.tell(msg.PutAdapter(number, path))
        return facts

    def drop(self, number: int) -> None:
        self._own.drop(number)
        self._group.tell(msg.DropAdapter(number))

    def save(self, number: int) -> None:
        self._own.save(number)
        self._group.tell(msg.SaveAdapter(number))

    def restore(self, number: int) -> None:
        self._own.restore(number)
        self._group.tell(msg.RestoreAdapter(number))

    def forget(self, number: int) -> None:
        self._own.forget(number)
        self._group.tell(msg.ForgetAdapter(number))
