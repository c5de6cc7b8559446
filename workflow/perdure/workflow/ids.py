"""Ids of history entries and messages: UUIDs of version 7 (RFC 9562), monotonic within a workflow.

1. The order of ids is the order of creation, also across restarts: a generator starts above the largest id it is told of.
2. Randomness is injected, so that a simulated run can be repeated.
"""

from __future__ import annotations

import os
import random
from typing import Final, Protocol

from perdure.workflow.clock import Clock

__all__ = ["IdGenerator", "Uuid7Generator"]

_RANDOM_BITS: Final = 74


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
    """Version 7 UUIDs: 48 bits of milliseconds, then 74 bits that count up within a millisecond.

    Args:
        clock: Gives the time part.
        source: Gives the random part; seeded from the operating system unless given.
    """

    def __init__(self, clock: Clock, source: random.Random | None = None) -> None:
        self._clock = clock
        self._source = source or random.Random(os.urandom(16))
        self._last = 0

    def next_id(self) -> str:
        """A new id, larger as text than every earlier one, also when the clock was set back."""
        now_ms = self._clock.now_ms()
        if now_ms > self._last >> _RANDOM_BITS:
            # The top bit of the random part starts as 0, so that counting up within a millisecond does not overflow.
            value = (now_ms << _RANDOM_BITS) | self._source.getrandbits(_RANDOM_BITS - 1)
        else:
            value = self._last + 1
        self._last = value
        time_ms = value >> _RANDOM_BITS
        return "%08x-%04x-7%03x-%04x-%012x" % (  # noqa: UP031 - made for every entry, and this is quickest
            time_ms >> 16,
            time_ms & 0xFFFF,
            (value >> 62) & 0xFFF,
            0x8000 | ((value >> 48) & 0x3FFF),
            value & 0xFFFFFFFFFFFF,
        )

    def start_after(self, entry_id: str) -> None:
        """Make all further ids larger than this one, if it is a version 7 UUID; ignore it otherwise."""
        digits = entry_id.replace("-", "")
        if len(digits) != 32 or digits[12] != "7":
            return
        try:
            number = int(digits, 16)
        except ValueError:
            return
        value = ((number >> 80) << _RANDOM_BITS) | (((number >> 64) & 0xFFF) << 62) | (number & ((1 << 62) - 1))
        self._last = max(self._last, value)

    def random_bytes(self, count: int) -> bytes:
        """Random bytes from the same source."""
        return self._source.randbytes(count)
