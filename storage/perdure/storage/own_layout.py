"""Where everything is in the namespace that belongs to the supervisor and to no workflow (`Store.open_own`).

1. Its prefixes begin at 64, above all prefixes of workflows' namespaces: a key says which of the two it belongs to.
2. A parser accepts exactly the keys its builder makes.

Every number here is stored on disk; never change or reuse.
"""

from __future__ import annotations

from typing import Final

from perdure.storage.keys import KeyDecodeError, pack, unpack

__all__ = [
    "RATE_PREFIX",
    "SCHEDULES_PREFIX",
    "SCHEDULE_CURSOR_PREFIX",
    "SCHEDULE_DEFINITION_PREFIX",
    "SCHEDULE_INPUT_PREFIX",
    "SCHEDULE_RUN_PREFIX",
    "parse_rate_key",
    "parse_schedule_key",
    "parse_schedule_run_key",
    "rate_key",
    "rates_prefix",
    "schedule_cursor_key",
    "schedule_definition_key",
    "schedule_input_key",
    "schedule_run_key",
    "schedule_runs_prefix",
]

# First parts of keys: stored on disk; never change or reuse.
_SCHEDULES: Final = 64
_RATES: Final = 65

# Second parts of the keys of schedules: stored on disk; never change or reuse.
_DEFINITION: Final = 1
_INPUT: Final = 2
_CURSOR: Final = 3
_RUN: Final = 4

SCHEDULES_PREFIX: Final = pack((_SCHEDULES,))
"""All that is kept of schedules."""

RATE_PREFIX: Final = pack((_RATES,))
"""When workflows of a type that has a rate limit were let begin, by type and number; values are u64s."""

SCHEDULE_DEFINITION_PREFIX: Final = pack((_SCHEDULES, _DEFINITION))
"""What schedules were asked to do, by name; values are CBOR maps."""

SCHEDULE_INPUT_PREFIX: Final = pack((_SCHEDULES, _INPUT))
"""What their workflows get, by name; values are CBOR."""

SCHEDULE_CURSOR_PREFIX: Final = pack((_SCHEDULES, _CURSOR))
"""How far they have got, by name; values are CBOR maps."""

SCHEDULE_RUN_PREFIX: Final = pack((_SCHEDULES, _RUN))
"""Their runs that have not ended, by name and occurrence; values are CBOR maps."""


def schedule_definition_key(name: str) -> bytes:
    """Key of what a schedule was asked to do."""
    return pack((_SCHEDULES, _DEFINITION, name))


def schedule_input_key(name: str) -> bytes:
    """Key of a schedule's input."""
    return pack((_SCHEDULES, _INPUT, name))


def schedule_cursor_key(name: str) -> bytes:
    """Key of how far a schedule has got."""
    return pack((_SCHEDULES, _CURSOR, name))


def schedule_runs_prefix(name: str) -> bytes:
    """Before the keys of a schedule's runs, and of no other's."""
    return pack((_SCHEDULES, _RUN, name))


def schedule_run_key(name: str, occurrence_ms: int) -> bytes:
    """Key of the run for an occurrence (milliseconds since the epoch)."""
    return pack((_SCHEDULES, _RUN, name, occurrence_ms))


def rates_prefix(workflow_type: str) -> bytes:
    """Before the keys of the recent beginnings of a type, and of no other's."""
    return pack((_RATES, workflow_type))


def rate_key(workflow_type: str, number: int) -> bytes:
    """Key of one of the recent beginnings of a type; they are numbered in their order, from 0."""
    return pack((_RATES, workflow_type, number))


def parse_schedule_key(key: bytes) -> str:
    """The name in a key of a definition, an input or a cursor.

    Raises:
        KeyDecodeError: It is another key.
    """
    match unpack(key):
        case (64, 1 | 2 | 3, str(name)):
            return name
        case _:
            raise KeyDecodeError(f"{key.hex()} is not the key of a schedule")


def parse_schedule_run_key(key: bytes) -> tuple[str, int]:
    """The schedule's name and the occurrence in the key of a run.

    Raises:
        KeyDecodeError: It is another key.
    """
    match unpack(key):
        case (64, 4, str(name), int(occurrence_ms)):
            return name, occurrence_ms
        case _:
            raise KeyDecodeError(f"{key.hex()} is not the key of a schedule's run")


def parse_rate_key(key: bytes) -> tuple[str, int]:
    """The type and the number in a key of recent beginnings.

    Raises:
        KeyDecodeError: It is another key.
    """
    match unpack(key):
        case (65, str(workflow_type), int(number)):
            return workflow_type, number
        case _:
            raise KeyDecodeError(f"{key.hex()} is not the key of a type's beginnings")
