"""The parked branches that wait for messages: who of them is woken for a message that has come.

1. They are woken in the order in which they parked, one for each message that waits. So a message costs what it costs,
   however many branches wait for its name; to wake them all, as would be simpler, was quadratic.
2. Whoever is woken may not take the message: its branch has lost a race or is cancelled, or it takes an older one of another
   name. So each of them, once it has taken what it takes or has gone, passes on what is left (`wake`). In between, for each
   name, at least as many are woken as messages wait, or all who want it.
3. Whoever wants several names, or any, counts for each of them while it is on its way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from perdure.workflow.waits import Parking

__all__ = ["Readers"]


class Readers:
    """Parked branches by the names of the messages that they wait for."""

    def __init__(self) -> None:
        self._number = 0
        self._by_name: dict[str | None, OrderedDict[Parking, int]] = {}
        self._woken: dict[Parking, None] = {}
        self._coming: Counter[str | None] = Counter()

    def __bool__(self) -> bool:
        """Whether somebody waits that is not woken."""
        return bool(self._by_name)

    def add(self, parking: Parking) -> None:
        """A branch parks."""
        self._number += 1
        for name in _names(parking):
            self._by_name.setdefault(name, OrderedDict())[parking] = self._number

    def discard(self, parking: Parking) -> None:
        """It goes on, or is gone."""
        if parking in self._woken:
            del self._woken[parking]
            for name in _names(parking):
                self._coming[name] -= 1
        else:
            self._remove(parking)

    def wake(self, name: str, waiting: int) -> None:
        """Wake as many as there are messages of this name, those included that are on their way already."""
        due = waiting - self._coming[name] - self._coming[None]
        while due > 0 and (parking := self._first(name)) is not None:
            self._remove(parking)
            self._woken[parking] = None
            for wanted in _names(parking):
                self._coming[wanted] += 1
            parking.wake()
            due -= 1

    def _first(self, name: str) -> Parking | None:
        named, of_any = self._by_name.get(name), self._by_name.get(None)
        heads = [next(iter(line.items())) for line in (named, of_any) if line]
        return min(heads, key=lambda head: head[1])[0] if heads else None

    def _remove(self, parking: Parking) -> None:
        for name in _names(parking):
            line = self._by_name.get(name)
            if line is not None and line.pop(parking, None) is not None and not line:
                del self._by_name[name]


def _names(parking: Parking) -> frozenset[str] | tuple[None]:
    names = parking.wait.names
    return (None,) if names is None else names
