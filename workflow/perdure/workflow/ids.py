"""Ids of history entries and messages: UUIDs of version 7 (RFC 9562), monotonic within a workflow.

1. The order of ids is the order of creation, also across restarts: a generator starts above the largest id it is told of.
2. Randomness is injected, so that a simulated run can be repeated. Otherwise all generators of a process share one source:
   seeding one takes some 10 us and a call of the operating system, for each workflow that is opened.
3. `derived_uuid` gives the same id on every run: what services outside are handed to recognize a repetition. It depends on the
   workflow's seed, which is random but where a simulation wants the same workflow again (`repeatable_seeds`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Final, Protocol
from uuid import UUID

from perdure.workflow.clock import Clock

__all__ = ["IdGenerator", "Uuid7Generator", "derived_uuid", "is_ordered", "new_seed", "repeatable_seeds"]

_LOW_MAX: Final = (1 << 62) - 1
_NODE_MAX: Final = (1 << 48) - 1  # the last 12 digits

_process_source: Final = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process_source.seed)  # else both would make the same ids


def derived_uuid(seed: bytes, key: bytes) -> UUID:
    """A UUID that depends on a workflow's seed and on a key, and on nothing else."""
    digest = bytearray(sha256(seed + key).digest()[:16])
    digest[6] = 0x80 | (digest[6] & 0x0F)  # RFC 9562 version 8: made by a rule of our own
    digest[8] = 0x80 | (digest[8] & 0x3F)
    return UUID(bytes=bytes(digest))


def is_ordered(entry_id: str) -> bool:
    """Whether the order of this id among others of its kind is that of their creation: a UUID of version 7."""
    return len(entry_id) == 36 and entry_id[14] == "7"


class IdGenerator(Protocol):
    """Where the engine gets ids from."""

    def next_id(self) -> str:
        """A new id, larger as text than every earlier one."""
        ...

    def start_after(self, entry_id: str) -> None:
        """Make all further ids larger than this one, if it is a version 7 UUID; ignore it otherwise."""
        ...

    def random_bytes(self, count: int) -> bytes:
        """Random bytes from the same source."""
        ...


class Uuid7Generator:
    """Version 7 UUIDs: 48 bits of milliseconds, then 74 random bits; within a millisecond the last 62 of them count up.

    Args:
        clock: Gives the time part.
        source: Gives the random part; unless given, the one of the process, which the operating system has seeded.
    """

    def __init__(self, clock: Clock, source: random.Random | None = None) -> None:
        self._clock = clock
        self._source = source or _process_source
        self._set(0, 0, 0)

    def _set(self, time_ms: int, middle: int, low: int) -> None:
        self._time_ms = time_ms
        self._middle = middle
        self._low = low
        # All but the last 12 digits, made once in a millisecond: an id is made for every entry.
        self._prefix = f"{time_ms >> 16:08x}-{time_ms & 0xFFFF:04x}-7{middle:03x}-{0x8000 | (low >> 48):04x}-"

    def next_id(self) -> str:
        """A new id, larger as text than every earlier one, also when the clock was set back."""
        now_ms = self._clock.now_ms()
        if now_ms > self._time_ms:
            # The top bit of the counting part starts as 0, so that it does not overflow.
            self._set(now_ms, self._source.getrandbits(12), self._source.getrandbits(61))
        elif self._low == _LOW_MAX:
            self._set(self._time_ms + 1, 0, 0)
        elif self._low & _NODE_MAX == _NODE_MAX:
            self._set(self._time_ms, self._middle, self._low + 1)
        else:
            self._low += 1
        return self._prefix + (self._low & _NODE_MAX).to_bytes(6, "big").hex()

    def start_after(self, entry_id: str) -> None:
        """Make all further ids larger than this one, if it is a version 7 UUID; ignore it otherwise."""
        digits = entry_id.replace("-", "")
        if len(digits) != 32 or digits[12] != "7":
            return
        try:
            number = int(digits, 16)
        except ValueError:
            return
        given = (number >> 80, (number >> 64) & 0xFFF, number & _LOW_MAX)
        if given > (self._time_ms, self._middle, self._low):
            self._set(*given)

    def random_bytes(self, count: int) -> bytes:
        """Random bytes from the same source."""
        return self._source.randbytes(count)


_has_repeatable_seeds: Final[ContextVar[bool]] = ContextVar("perdure_repeatable_seeds", default=False)


@contextmanager
def repeatable_seeds() -> Generator[None]:
    """Inside, a workflow's seed depends on its id alone; for `perdure.testing`, which compares a workflow with itself.

    Not where an id is used again after a deletion: its children would have the ids of the children before.
    """
    token = _has_repeatable_seeds.set(True)
    try:
        yield
    finally:
        _has_repeatable_seeds.reset(token)


def new_seed(workflow_id: str, ids: IdGenerator) -> bytes:
    """The 16 bytes from which a new workflow's UUIDs, random numbers and keys derive."""
    if _has_repeatable_seeds.get():
        return sha256(workflow_id.encode()).digest()[:16]
    return ids.random_bytes(16)
