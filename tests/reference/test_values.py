"""Values that one engine stored, in the hands of the other, and what is left of them when they come back."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from engines import START_MS, Mail, Position, ReferenceEngine, run_ours
from harness import Namespace
from trio.testing import MockClock
from vectors import give

from perdure.storage import ErrorValue, TaggedValue, encode_value
from perdure.workflow import Break, Context, Continue

PLUS_2 = timezone(timedelta(hours=2))
AN_ID = UUID("01234567-89ab-4def-8123-456789abcdef")
SAME = object()

CROSSING: dict[str, tuple[Any, str, Any]] = {
    # name: (what a step of ours returns, what it is there, what comes back after it was the state of a loop there)
    "None": (None, "undefined", SAME),
    "true": (True, "boolean true", SAME),
    "2**32 - 1": (2**32 - 1, "number 4294967295", SAME),
    "-2**32": (-(2**32), "number -4294967296", SAME),
    "2**32": (2**32, "bigint 4294967296", SAME),
    "2**53": (2**53, "bigint 9007199254740992", SAME),
    "2**64": (2**64, f"bigint {2**64}", SAME),
    "-2**70": (-(2**70), f"bigint -{2**70}", SAME),
    "1.5": (1.5, "number 1.5", SAME),
    # A JavaScript number does not say whether it is an integer, and loses a zero's sign when it is stored.
    "1.0": (1.0, "number 1", 1),
    "1e300": (1e300, "number 1e+300", SAME),
    "-0.0": (-0.0, "number -0", 0),
    "nan": (math.nan, "number NaN", SAME),
    "-inf": (-math.inf, "number -Infinity", SAME),
    "text": ("héllo ✓ 漢字 🎉", "string héllo ✓ 漢字 🎉", SAME),
    "bytes": (b"\x00\xff", "bytes 00ff", SAME),
    "no bytes": (b"", "bytes ", SAME),
    "list": ([1, [2, []]], "[number 1, [number 2, []]]", SAME),
    "tuple": ((1, None), "[number 1, null]", [1, None]),
    "dict": ({"a": {"b": None}, "": 1}, "{a: {b: null}, : number 1}", SAME),
    "int keys": ({1: "a", 2**40: "b"}, f"Map [[number 1, string a], [bigint {2**40}, string b]]", SAME),
    "mixed keys": (
        {"a": 1, None: 2, (1, 2): 3},
        "Map [[string a, number 1], [null, number 2], [[number 1, number 2], number 3]]",
        SAME,
    ),
    "int keys within": ([{"a": {b"\x01": 1}}], "[{a: Map [[bytes 01, number 1]]}]", SAME),
    "set": ({1, 2}, "Set [number 1, number 2]", SAME),
    "empty set": (set(), "Set []", SAME),
    "set of tuples": ({(1, "a")}, "Set [[number 1, string a]]", SAME),
    "datetime": (datetime(2023, 11, 14, 22, 13, 20, 123000, UTC), "Date 2023-11-14T22:13:20.123Z", SAME),
    "whole second": (datetime(1970, 1, 2, tzinfo=UTC), "Date 1970-01-02T00:00:00.000Z", SAME),
    "before 1970": (datetime(1969, 12, 31, 23, 59, 59, 999000, UTC), "Date 1969-12-31T23:59:59.999Z", SAME),
    # A JavaScript date is a number of milliseconds: it has no offset and no microseconds.
    "offset": (
        datetime(2023, 11, 14, 22, tzinfo=PLUS_2),
        "Date 2023-11-14T20:00:00.000Z",
        datetime(2023, 11, 14, 20, tzinfo=UTC),
    ),
    "microsecond": (
        datetime(2023, 11, 14, 22, 0, 0, 123456, UTC),
        "Date 2023-11-14T22:00:00.123Z",
        datetime(2023, 11, 14, 22, 0, 0, 123000, UTC),
    ),
    "date": (date(2023, 11, 14), "tag 1004 string 2023-11-14", SAME),
    # A decimal becomes the nearest double; one that is no number is taken for an error.
    "decimal": (Decimal("12.50"), "number 12.5", 12.5),
    "large decimal": (Decimal(2**80 + 1), f"number {float(2**80):.17g}", float(2**80)),
    "no number": (Decimal("NaN"), "Error NaN", ErrorValue("Error", "NaN")),
    "fraction": (Fraction(1, 3), "tag 30 [number 1, number 3]", SAME),
    "uuid": (AN_ID, f"tag 37 bytes {AN_ID.hex}", SAME),
    # Only the message of an error is kept, and this name is never a field's.
    "error": (ErrorValue("TypeError", "wrong"), "Error wrong", ErrorValue("Error", "wrong")),
    "a name of JavaScript's": ({"__proto__": 1}, "{__proto_: number 1}", {"__proto_": 1}),
    "tag": (TaggedValue(40, [1]), "tag 40 [number 1]", SAME),
}


def alike(value: Any) -> Any:
    """A value with its types, and equal to itself; sets and dicts in no order."""
    match value:
        case dict():
            return dict, {repr(alike(key)): alike(item) for key, item in value.items()}
        case list() | tuple():
            return type(value), [alike(item) for item in value]
        case set() | frozenset():
            return type(value), sorted(repr(alike(item)) for item in value)
        case TaggedValue():
            return TaggedValue, value.tag, alike(value.value)
        case datetime():
            return value.isoformat()
        case _:
            return type(value), repr(value)


@pytest.fixture
def ours(tmp_path: Path) -> Namespace:
    """An empty namespace."""
    return Namespace("memory", tmp_path)


async def test_what_steps_of_ours_returned_is_there_what_it_should_be(
    ours: Namespace, autojump_clock: MockClock, theirs: ReferenceEngine
) -> None:
    """S8, S16: every kind of value is read, integers as the documentation says."""

    async def workflow(ctx: Context, names: list[str]) -> None:
        for name in names:
            await ctx.step(name, give, name, CROSSING[name][0])
        await ctx.queue.next("next")

    position = await run_ours(ours, "yield", Position({}, now_ms=START_MS), workflow, list(CROSSING))
    assert position.state == "sleeping"
    seen = theirs.run(position, "describe", None)
    assert seen.state == "completed"
    assert seen.result == {name: text for name, (_, text, _) in CROSSING.items()}


@pytest.mark.parametrize("name", CROSSING)
async def test_a_loop_state_of_ours_comes_back_from_there(
    tmp_path: Path, autojump_clock: MockClock, theirs: ReferenceEngine, name: str
) -> None:
    """S8, S16: the reference engine writes it again as it understands it; what that loses is in the table above."""
    value, _, back = CROSSING[name]

    async def workflow(ctx: Context, _: object) -> Any:
        async def body(inner: Context, state: Any) -> Continue[Any] | Break[Any]:
            message = await inner.queue.next("next")
            return Break(state) if message.body == "end" else Continue(state)

        return await ctx.loop("carry", body, value)

    def send(position: Position, body: str) -> Position:
        return replace(position, mail=(Mail(f"to {body}", "next", encode_value(body), START_MS),))

    before = Namespace("memory", tmp_path)
    position = await run_ours(before, "yield", Position({}, now_ms=START_MS), workflow, None)
    position = theirs.run(send(position, "on"), "carry", None)
    assert position.state == "sleeping"
    after = Namespace("memory", tmp_path)
    position = await run_ours(after, "yield", send(position, "end"), workflow, None)
    assert position.state == "completed"
    assert alike(position.result) == alike(value if back is SAME else back)


JAVASCRIPT: dict[str, Any] = {
    "undefined within": [None, {"a": None}],
    "2 ** 53": 9007199254740992.0,
    "bigint 5": 5,
    "bigint -(2 ** 64)": -(2**64),
    "bigint 2 ** 200": 2**200,
    "-0": 0,
    "date": datetime(1969, 12, 31, 23, 59, 59, 999000, UTC),
    "no date": TaggedValue(1, math.nan),
    "bytes": b"\x00\xff",
    "floats": [0.5, -2.0],
    "shorts": [-1, 256],
    "set": {1, "a"},
    "map": {(1, 2): "list", None: 1},
    "empty map": {},
    "error": ErrorValue("TypeError", "wrong"),
    "half a character": "\N{REPLACEMENT CHARACTER}",
}


async def test_what_steps_there_returned_is_here_what_it_should_be(
    ours: Namespace, autojump_clock: MockClock, theirs: ReferenceEngine
) -> None:
    """S8, S16: JavaScript's types come as Python's."""
    seen: dict[str, Any] = {}

    async def workflow(ctx: Context, _: object) -> int:
        for name in (*JAVASCRIPT, "nested"):
            seen[name] = await ctx.step(name, give, name, "not recorded")
        await ctx.queue.next("next")
        return len(seen)

    position = theirs.run(Position({}, now_ms=START_MS), "give", None)
    mail = (Mail("1", "next", encode_value(None), START_MS),)
    position = await run_ours(ours, "yield", replace(position, mail=mail), workflow, None)
    assert position.result == len(seen)
    nested = seen.pop("nested")
    assert {name: alike(value) for name, value in seen.items()} == {
        name: alike(value) for name, value in JAVASCRIPT.items()
    }
    (inner,) = nested["a"][0]["b"][0]
    assert dict(inner) == {1: datetime(1970, 1, 1, tzinfo=UTC)}
