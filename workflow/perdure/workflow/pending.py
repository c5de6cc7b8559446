"""What a workflow has changed since its last commit: the dirty list.

1. A batch is what was true when it was taken, whatever happens meanwhile: a change is encoded when it is made or, where
   many changes meet in one value (the branches of a join), when the batch is taken.
2. Only what changed is here: the cost of a commit does not depend on the length of history.
3. `take` hands everything over as one batch; `put_back` returns a refused batch, under what was changed since.
4. Deletions of a batch apply before its puts, so a deletion also drops the pending puts that it covers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from perdure.storage import AlarmChange, Batch, layout

__all__ = ["Pending"]

_REMEMBERED: Final = (layout.DEDUP_PREFIX, layout.SENT_PREFIX)
"""Before the ids of messages that came."""

_MAIL: Final = (layout.MAILBOX_PREFIX, layout.REQUEST_OPEN_PREFIX, *_REMEMBERED)
"""Before what is put when a message comes."""


class Pending:
    """The puts and deletions that the next batch will carry.

    Attributes:
        version: Counts changes; a commit that took version `n` made all changes up to `n` durable.
    """

    __slots__ = (
        "_alarm",
        "_deletes",
        "_late",
        "_prefixes",
        "_puts",
        "_ranges",
        "_returned",
        "_taken_returned",
        "version",
    )

    def __init__(self) -> None:
        self.version: int = 0
        self._puts: dict[bytes, bytes] = {}
        self._late: dict[bytes, Callable[[], bytes]] = {}
        self._deletes: dict[bytes, None] = {}
        self._prefixes: list[bytes] = []
        self._ranges: list[tuple[bytes, bytes]] = []
        self._returned: set[bytes] = set()
        self._taken_returned: set[bytes] = set()
        self._alarm: AlarmChange | None = None

    def put(self, key: bytes, value: bytes) -> None:
        """Write one value."""
        self.version += 1
        self._puts[key] = value
        if self._late:
            self._late.pop(key, None)

    def put_late(self, key: bytes, encode: Callable[[], bytes]) -> None:
        """Write one value, encoded when the batch is taken; `encode` must not fail."""
        self.version += 1
        self._late[key] = encode

    def put_returned(self, key: bytes, value: bytes) -> None:
        """Write a message that the workflow's code gives back, which is not one on its way into the mailbox."""
        self.put(key, value)
        self._returned.add(key)

    def delete(self, key: bytes) -> None:
        """Remove one key."""
        self.version += 1
        self._puts.pop(key, None)
        self._late.pop(key, None)
        self._deletes[key] = None

    def delete_prefix(self, prefix: bytes) -> None:
        """Remove every key that starts with `prefix`."""
        self.version += 1
        self._encode_late()
        for key in [key for key in self._puts if key.startswith(prefix)]:
            del self._puts[key]
        self._prefixes.append(prefix)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Remove every key with `start <= key < end`."""
        self.version += 1
        self._encode_late()
        for key in [key for key in self._puts if start <= key < end]:
            del self._puts[key]
        self._ranges.append((start, end))

    def set_alarm(self, change: AlarmChange) -> None:
        """Arm or clear the alarm."""
        self.version += 1
        self._alarm = change

    def _encode_late(self) -> None:
        for key, encode in self._late.items():
            self._puts[key] = encode()
        self._late.clear()

    def keep_mail(self) -> None:
        """Drop everything but messages on their way into the mailbox: those were not recorded by the workflow's code."""
        self._puts = {key: value for key, value in self._puts.items() if _is_mail(key) and key not in self._returned}
        self._late.clear()
        self._deletes = {key: None for key in self._deletes if key.startswith(_REMEMBERED)}
        self._prefixes.clear()
        self._ranges.clear()
        self._alarm = None

    def holds_only(self, prefix: bytes) -> bool:
        """Whether nothing is pending but values whose keys start with `prefix`, if any."""
        if self._late or self._deletes or self._prefixes or self._ranges or self._alarm is not None:
            return False
        return all(key.startswith(prefix) for key in self._puts)

    def take(self) -> Batch:
        """Everything pending, as one batch; nothing is pending afterwards."""
        if self._late:
            self._encode_late()
        puts, self._puts = self._puts, {}
        if self._returned or self._taken_returned:
            self._taken_returned, self._returned = self._returned, set()
        if not (self._deletes or self._prefixes or self._ranges or self._alarm):
            return Batch(list(puts.items()), [], [], [], None)  # the usual case
        deletes, self._deletes = self._deletes, {}
        prefixes, self._prefixes = self._prefixes, []
        ranges, self._ranges = self._ranges, []
        alarm, self._alarm = self._alarm, None
        return Batch(
            list(puts.items()),
            [key for key in deletes if key not in puts] if deletes else [],
            prefixes,
            ranges,
            alarm,
        )

    def put_back(self, batch: Batch) -> None:
        """Return a batch of which nothing was written, as the oldest of what is pending."""
        returned = self._taken_returned
        later = self.take()
        returned = returned | self._taken_returned
        for part in (batch, later):
            for key in part.deletes:
                self.delete(key)
            for prefix in part.delete_prefixes:
                self.delete_prefix(prefix)
            for start, end in part.delete_ranges:
                self.delete_range(start, end)
            for key, value in part.puts:
                self.put(key, value)
            if part.alarm is not None:
                self.set_alarm(part.alarm)
        self._returned = returned


def _is_mail(key: bytes) -> bool:
    return key == layout.MAILBOX_SEQUENCE_KEY or key.startswith(_MAIL)
