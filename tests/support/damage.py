"""Damaged bytes, made from sound ones: what a bad sector, a bad cable, a wrong program or a hand with an editor leaves.

1. Arbitrary bytes hardly get past a decoder's first field, so nearly all that is made here is a sound value with something
   done to it: bits flipped, cut short, bytes put in or taken out, a piece of another value in its place.
2. Bytes that are sound but not what belongs there are damage too: another value's bytes, and CBOR of every other shape, also
   inside the structs that carry CBOR (`misshapen`).
3. Everything is drawn from the `random.Random` that is given, so that a seed names it.

Rejected: to leave all of it to Hypothesis. It shrinks better, but it draws far more slowly than a decoder of a few bytes
refuses, and whole namespaces are damaged value by value, of which none is to be left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from perdure.storage import DecodeError, decode_value, encode_value
from perdure.storage.schema import (
    Branch,
    Entry,
    EntryKind,
    JoinEntry,
    LoopEntry,
    MessageEntry,
    RaceEntry,
    SleepEntry,
    StepEntry,
    decode_entry,
    decode_message,
    decode_metadata,
    encode_entry,
    encode_message,
    encode_metadata,
)

__all__ = ["ODD_VALUES", "misshapen", "mutated"]

ODD_VALUES: Final[Sequence[object]] = (
    None,
    False,
    0,
    -1,
    2**32,
    2**62,
    -(2**64),
    2**70,
    1.5,
    math.nan,
    math.inf,
    "",
    "text",
    "\0",
    b"",
    b"\xff",
    [],
    [[]],
    [1],
    ["a", "b"],
    [["a", "b", "c"]],
    [[1, 2]],
    {},
    {1: 2},
    {"id": None},
    {"id": 1, "name": [], "body": {}, "createdAt": "now", "completed": 1},
    {"id": "m", "name": "go", "body": 1, "createdAt": math.nan, "completed": False},
    {"id": "m", "name": "go", "body": 1, "createdAt": -math.inf, "completed": False},
    {"id": "m", "name": "go", "body": 1, "createdAt": 1e300, "completed": False},
    {"name": 1, "message": [], "stack": {}, "metadata": 5},
    {"name": "x", "message": "y", "metadata": {1: 2}},
)
"""Plain values of every shape, none of which is what belongs anywhere in particular."""

_ODD: Final = tuple(encode_value(value) for value in ODD_VALUES)
_INTERESTING: Final = (0, 1, 0x7F, 0x80, 0xFF)


def mutated(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """The bytes with something done to them, once or a few times.

    Args:
        data: What to damage.
        others: Sound values, of which pieces may be taken.
        draw: Decides what.
    """
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place = draw.randrange(len(damaged) + 1)
        match draw.randrange(7):
            case 0 if damaged:
                damaged[place % len(damaged)] ^= 1 << draw.randrange(8)
            case 1 if damaged:
                damaged[place % len(damaged)] = draw.choice(_INTERESTING)
            case 2:
                del damaged[place:]
            case 3:
                damaged[place:place] = draw.randbytes(draw.randrange(1, 9))
            case 4:
                del damaged[place : place + draw.randrange(1, 9)]
            case 5:
                other = draw.choice(others)
                start = draw.randrange(len(other) + 1)
                damaged[place : place + draw.randrange(9)] = other[start : start + draw.randrange(24)]
            case _:
                damaged = bytearray(draw.choice((draw.choice(others), draw.choice(_ODD), draw.randbytes(12), data)))
    return bytes(damaged)


def misshapen(data: bytes) -> Iterator[bytes]:
    """Every sound value of another shape: the whole replaced, or the CBOR inside of a struct, or one item of a CBOR map."""
    yield from _ODD
    yield from _in_maps(data)
    try:
        entry = decode_entry(data)
    except DecodeError:
        pass
    else:
        yield from (encode_entry(Entry(entry.id, entry.location, kind)) for kind in _kinds(entry.kind))
    try:
        message = decode_message(data)
    except DecodeError:
        pass
    else:
        yield from (encode_message(replace(message, body=odd)) for odd in _ODD)
        yield from (encode_message(replace(message, id=text)) for text in ("", "\0", "x"))
    try:
        metadata = decode_metadata(data)
    except DecodeError:
        return
    for time_ms in (0, 2**53, 2**64 - 1):
        yield encode_metadata(
            replace(metadata, last_attempt_at_ms=time_ms, created_at_ms=time_ms, completed_at_ms=time_ms)
        )
    yield encode_metadata(replace(metadata, attempts=2**32 - 1))
    for status in type(metadata.status):
        yield encode_metadata(replace(metadata, status=status))


def _in_maps(data: bytes) -> Iterator[bytes]:
    try:
        value = decode_value(data)
    except DecodeError:
        return
    if isinstance(value, dict):
        for key in value:
            yield encode_value({other: item for other, item in value.items() if other != key})
            for odd in ODD_VALUES:
                yield encode_value({**value, key: odd})
    elif isinstance(value, list):
        for odd in ODD_VALUES:
            yield encode_value([odd, *value[1:]])
            yield encode_value([*value, odd])


def _kinds(kind: EntryKind) -> Iterator[EntryKind]:
    match kind:
        case StepEntry():
            yield from (StepEntry(odd) for odd in _ODD)
            yield from (StepEntry(None, text) for text in ("", ":", "StepError: ", "x" * 300))
        case LoopEntry(state, iteration, output):
            yield from (LoopEntry(odd, iteration, output) for odd in _ODD)
            yield from (LoopEntry(state, iteration, odd) for odd in _ODD)
            yield from (LoopEntry(state, number, output) for number in (0, 2**31, 2**32 - 1))
        case MessageEntry(name, body):
            yield from (MessageEntry(name, odd) for odd in _ODD)
            yield from (MessageEntry(text, body) for text in ("", ":", "*:count", "q:0", "\0"))
            yield from (MessageEntry(name, each) for each in _in_maps(body))
        case SleepEntry(_, state):
            yield from (SleepEntry(time_ms, state) for time_ms in (0, 2**53, 2**64 - 1))
            yield from (SleepEntry(kind.deadline_ms, other) for other in type(state))
        case JoinEntry(branches) | RaceEntry(branches=branches):
            for name, branch in branches.items():
                for changed in _branches(branch):
                    found = {**branches, name: changed}
                    yield JoinEntry(found) if isinstance(kind, JoinEntry) else RaceEntry(kind.winner, found)
            yield JoinEntry({}) if isinstance(kind, JoinEntry) else RaceEntry("nobody", branches)
        case _:
            return


def _branches(branch: Branch) -> Iterator[Branch]:
    yield from (replace(branch, output=odd) for odd in _ODD)
    yield from (replace(branch, error=text) for text in ("", ":", "JoinError: x"))
    yield from (replace(branch, status=status) for status in type(branch.status))
