"""User values: what comes back as what, what is refused and how, and all that the reference engine can have stored."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import math
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time as clock
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from typing import Any, NamedTuple
from unittest.mock import Mock
from uuid import UUID
from zoneinfo import ZoneInfo

import cbor2
import pytest

from perdure.storage.errors import DecodeError, EncodeError
from perdure.storage.value_encoder import _Encoding
from perdure.storage.values import (
    NESTING_MAX,
    UNDEFINED,
    VALUE_BYTES_MAX,
    ErrorValue,
    OversizedValueError,
    TaggedValue,
    ValueDecodeError,
    ValueEncodeError,
    ValueTooDeepError,
    decode_value,
    encode_value,
    round_trip,
)


class Colour(StrEnum):
    RED = "red"


class Old(str, Enum):  # noqa: UP042  # still common, and not a StrEnum
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Plain(Enum):
    A = 1


class Pair(NamedTuple):
    left: int
    right: object


@dataclasses.dataclass
class Order:
    sku: str


def same(left: object, right: object) -> bool:
    """Equal in value and type, all the way down; NaN equals NaN and the sign of zero counts."""
    if type(left) is not type(right):
        return False
    match left:
        case dict() | cbor2.frozendict():
            assert isinstance(right, dict | cbor2.frozendict)
            return same(list(left.items()), list(right.items()))
        case list() | tuple():
            assert isinstance(right, list | tuple)
            return len(left) == len(right) and all(map(same, left, right))
        case set() | frozenset():
            assert isinstance(right, set | frozenset)
            return left == right and same(sorted(left, key=repr), sorted(right, key=repr))
        case float() | Decimal() | datetime():
            return repr(left) == repr(right)
        case ErrorValue() | TaggedValue():
            return same(dataclasses.astuple(left), dataclasses.astuple(right))  # type: ignore[call-overload]
        case _:
            return left == right


DAY = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)

EXACT: list[tuple[object, str | None]] = [
    (None, "f6"),
    (True, "f5"),
    (False, "f4"),
    (0, "00"),
    (-1, "20"),
    (2**32 - 1, "1affffffff"),
    (2**63, "1b8000000000000000"),
    (2**64, "c249010000000000000000"),
    (-(2**64) - 1, "c349010000000000000000"),
    (3**5000, None),
    (1.5, "fb3ff8000000000000"),
    (0.0, "fb0000000000000000"),
    (-0.0, "fb8000000000000000"),
    (math.inf, "fb7ff0000000000000"),
    (-math.inf, "fbfff0000000000000"),
    (math.nan, "fb7ff8000000000000"),
    ("", "60"),
    ("a" * 23, "77" + "61" * 23),
    ("a" * 24, "7818" + "61" * 24),
    ("héllo ✓ 漢字 🎉", None),
    (b"", "40"),
    (b"\x00\xff", "4200ff"),
    ([], "80"),
    ([1, [2, [3]]], "8201820281" + "03"),
    ({}, "a0"),
    ({"a": None, "b": {"c": []}}, "a26161f66162a1616380"),
    ({1: 2}, "d90103a10102"),
    ({"a": {1: {"b": {2: 3}}}}, "a16161d90103a101a16162d90103a10203"),
    ({(1, "x"): 2, None: 3, True: 4, 2.5: 5, b"k": 6}, None),
    ({frozenset({1}): {(1, (2,)): [3]}}, None),
    ({DAY: 1, Decimal("1.0"): 2, UUID(int=7): 3, date(2020, 1, 1): 4}, None),
    ({3, 1, 2}, "d9010283010203"),
    (set(), "d9010280"),
    ({("a", 1), frozenset({2})}, None),
    ([{1}, {"s": {2}}, math.nan], None),
    (DAY, "c11a5e0d5da5"),
    (DAY.replace(microsecond=500_000), "c1fb41d7835769600000"),
    (DAY.replace(microsecond=1), None),
    (DAY.replace(year=1969), None),
    (DAY.replace(year=9999, microsecond=999_000), None),
    (datetime.max.replace(tzinfo=UTC), None),
    (datetime.min.replace(tzinfo=UTC), None),
    (datetime.max.replace(tzinfo=timezone(timedelta(hours=-23, minutes=-59))), None),
    (datetime.min.replace(tzinfo=timezone(timedelta(hours=23, minutes=59))), None),
    (datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30))), None),
    (datetime(2020, 1, 1, tzinfo=timezone(timedelta(seconds=3208))), None),
    (date(2020, 1, 1), "d903ec6a323032302d30312d3031"),
    (date.min, None),
    (Decimal("1.10"), "c48221186e"),
    (Decimal("-1E+30"), "c482181e20"),
    (Decimal("0E-7"), "c4822600"),
    (Decimal("1." + "1" * 60), None),
    (Decimal("7" * 6000), None),
    (Decimal("1E+999999"), None),
    (Decimal("-0.00"), "d81b826f646563696d616c2e446563696d616c652d302e3030"),
    (Decimal("NaN"), None),
    (Decimal("-NaN123"), None),
    (Decimal("sNaN"), None),
    (Decimal("Infinity"), None),
    (Decimal("-Infinity"), None),
    (Fraction(-1, 3), "d81e822003"),
    (Fraction(2**70, 3), None),
    (UUID(int=5), "d82550" + "00" * 15 + "05"),
    (ErrorValue("TypeError", "no"), "d81b836954797065" + "4572726f72626e6ff7"),
    (ErrorValue("E", "m", [1, {2: {3}}]), None),
    (TaggedValue(999, [1, {"a": [2]}, {3}]), "d903e78301a161618102d901028103"),
    ({TaggedValue(999, (1,)): TaggedValue(2**64 - 1, None)}, None),
]


@pytest.mark.parametrize(
    ("value", "encoded"), EXACT, ids=[f"{type(value).__name__}-{number}" for number, (value, _) in enumerate(EXACT)]
)
def test_values_come_back_equal_in_value_and_type(value: object, encoded: str | None) -> None:
    """S8: what a step returns and what its replay returns are the same value of the same type."""
    data, returned = round_trip(value)
    assert same(returned, value)
    assert same(decode_value(data), value)
    assert encode_value(returned) == data
    if encoded is not None:
        assert data.hex() == encoded


PLAINER: list[tuple[object, object]] = [
    ((1, (2, 3)), [1, [2, 3]]),
    ({"a": (1,)}, {"a": [1]}),
    (frozenset({1}), {1}),
    (bytearray(b"ab"), b"ab"),
    (Colour.RED, "red"),
    (Old.RED, "red"),
    (Level.LOW, 1),
    ({Colour.RED: Level.LOW, "b": Old.RED}, {"red": 1, "b": "red"}),
    ({Level.LOW: 2}, {1: 2}),
    (Pair(1, (2,)), [1, [2]]),
    ({Pair(1, (2,)): 3}, {(1, (2,)): 3}),
    (OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}),
    (defaultdict(list, {"a": [1]}), {"a": [1]}),
    (Counter("aab"), {"a": 2, "b": 1}),
    (cbor2.frozendict({1: [2]}), {1: [2]}),
    (datetime(2020, 7, 1, tzinfo=ZoneInfo("UTC")), datetime(2020, 7, 1, tzinfo=UTC)),
]


@pytest.mark.parametrize(
    ("value", "plain"), PLAINER, ids=[f"{type(value).__name__}-{number}" for number, (value, _) in enumerate(PLAINER)]
)
def test_richer_types_come_back_as_the_plain_one_from_the_first_run_on(value: object, plain: object) -> None:
    """S8: the first run is handed the plain value already, so that replay changes nothing."""
    data, returned = round_trip(value)
    assert same(returned, plain)
    assert same(decode_value(data), plain)


def test_zone_comes_back_as_its_offset() -> None:
    """S8: the instant and the offset stay, the zone's name does not."""

    class Berlin(tzinfo):
        def utcoffset(self, when: datetime | None) -> timedelta:
            return timedelta(hours=2)

    moment = datetime(2020, 7, 1, 12, tzinfo=Berlin())
    _, returned = round_trip(moment)
    assert returned == moment
    assert returned.tzinfo == timezone(timedelta(hours=2))


def test_what_is_returned_shares_nothing_with_what_was_given_or_stored() -> None:
    """S8: changing a value afterwards changes no history."""
    inner: dict[Any, Any] = {"list": [1], "map": {1: [2]}, "set": {3}, "tagged": TaggedValue(999, [4])}
    value = [inner, inner]
    data, first = round_trip(value)
    first[0]["list"].append("x")
    first[0]["map"][1].append("x")
    first[0]["set"].add("x")
    first[0]["tagged"].value.append("x")
    inner["list"].append("y")
    assert first[1] == {"list": [1], "map": {1: [2]}, "set": {3}, "tagged": TaggedValue(999, [4])}
    second = decode_value(data)
    assert second[0] == second[1] == first[1]
    assert second[0] is not second[1]


def test_scalars_are_not_copied() -> None:
    text = "x" * 1000
    assert round_trip(text)[1] is text


def test_plain_values_are_written_alike_by_both_writers() -> None:
    value = {"a": [1, -1, 2**70, 1.5, None, True, "é", b"x", (), {}, {"b": [[]]}], "l" * 300: list(range(300))}
    assert encode_value(value) == _Encoding("value", VALUE_BYTES_MAX).encode(value)


def test_equal_sets_give_equal_bytes_in_every_process() -> None:
    program = (
        "from perdure.storage.values import encode_value;"
        "print(encode_value([{'a', 'b', 'c', ('d', 1), frozenset({'e', 'f', 'g'})}]).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


def generator() -> Any:
    yield 1


async def coroutine() -> None: ...


REFUSED: list[tuple[Callable[[], object], str, str]] = [
    (threading.Lock, "lock", "keep such objects outside"),
    (object, "object", "keep such objects outside"),
    (generator, "generator", r"store list\(...\) of it"),
    (io.StringIO, "StringIO", "open file"),
    (lambda: Plain.A, "Plain", r"store its .value"),
    (lambda: Order("a"), "Order", "dataclasses.asdict"),
    (lambda: timedelta(1), "timedelta", "total_seconds"),
    (lambda: time(1), "time", "isoformat"),
    (lambda: datetime(2020, 1, 1), "datetime", r"datetime.now\(timezone.utc\)"),
    (lambda: pathlib.PurePosixPath("a"), "PurePosixPath", r"store str\(...\)"),
    (lambda: 1 + 2j, "complex", r"\[real, imag\]"),
    (lambda: memoryview(b"a"), "memoryview", r"store bytes\(...\)"),
    (lambda: ValueError("x"), "ValueError", "ErrorValue"),
    (lambda: int, "type", "store its name"),
    (lambda: generator, "function", "call it"),
    (lambda: range(3), "range", r"list\(...\)"),
    (lambda: deque([1]), "deque", r"list\(...\)"),
    (lambda: {}.items(), "dict_items", r"list\(...\)"),
    (lambda: ..., "ellipsis", "keep such objects outside"),
    (lambda: cbor2.undefined, "UndefinedType", "keep such objects outside"),
    (lambda: "\ud800", "str", "lone surrogate"),
    (lambda: TaggedValue(-1, 0), "TaggedValue", "at most 64 bits"),
    (lambda: TaggedValue(2**64, 0), "TaggedValue", "at most 64 bits"),
    (lambda: Mock(spec=int), "Mock", "could not be read"),
]


@pytest.mark.parametrize(("make", "type_name", "advice"), REFUSED, ids=[name for _, name, _ in REFUSED])
def test_what_cannot_come_back_is_refused_with_type_and_advice(
    make: Callable[[], object], type_name: str, advice: str
) -> None:
    """S9: the error names what is wrong and what to do instead."""
    with pytest.raises(ValueEncodeError, match=advice) as raised:
        encode_value(make(), what="the result of step 'charge'")
    assert raised.value.type_name == type_name
    assert raised.value.path == "value"
    assert str(raised.value).startswith(f"the result of step 'charge' cannot be stored: value ({type_name})")


def test_forgotten_await_is_named() -> None:
    """S9: a coroutine is refused with the advice to await it."""
    forgotten = coroutine()
    with pytest.raises(ValueEncodeError, match="await it"):
        encode_value({"a": forgotten})
    asyncio.run(forgotten)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, 1, 2, object()]}, 'value["a"][3]'),
        ([{"a": {1: object()}}], 'value[0]["a"][1]'),
        ({(1, object()): 2}, "value.keys()[0][1]"),
        ({"x": {(1, object)}}, 'value["x"].elements()[0][1]'),
        ({b"k": object()}, "value[b'k']"),
        ({(1, 2): object()}, "value[tuple]"),
        ({"k" * 100: object()}, f'value["{"k" * 60}..."]'),
        ({"a": "\udfff"}, 'value["a"]'),
        ({"\udfff": 1}, "value.keys()[0]"),
        ([ErrorValue("a", "b", object())], "value[0].cause"),
        ([TaggedValue(999, [object()])], "value[0].value[0]"),
    ],
)
def test_refusal_says_where(value: object, path: str) -> None:
    """S9: the path leads to the part that cannot be stored."""
    with pytest.raises(ValueEncodeError) as raised:
        encode_value(value)
    assert raised.value.path == path
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.path, str(copy)) == (path, str(raised.value))


def test_container_that_fails_when_read_is_refused_with_its_failure() -> None:
    class Broken(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("broken")

    with pytest.raises(ValueEncodeError, match="broken") as raised:
        encode_value([Broken(a=1)])
    assert isinstance(raised.value.__cause__, RuntimeError)


def nest(depth: int, wrap: Callable[[object], object]) -> object:
    value: object = wrap(0)
    for _ in range(depth - 1):
        value = wrap(value)
    return value


WRAPS: list[Callable[[Any], object]] = [
    lambda value: [value],
    lambda value: (value,),
    lambda value: {"k": value},
    lambda value: {1: value},
    lambda value: frozenset({value}),
    lambda value: TaggedValue(999, value),
    lambda value: ErrorValue("a", "b", value),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_nesting_is_bounded_and_its_limit_can_be_read_back(wrap: Callable[[object], object]) -> None:
    value = nest(NESTING_MAX, wrap)
    data, returned = round_trip(value)
    assert encode_value(returned) == data
    with pytest.raises(ValueTooDeepError, match="over 100 deep"):
        encode_value(nest(NESTING_MAX + 1, wrap))


def test_innermost_value_at_the_limit_may_be_any_scalar() -> None:
    for scalar in (Decimal("1.5"), Decimal("-0"), Fraction(1, 3), DAY, DAY.replace(microsecond=1), 2**80, UUID(int=1)):
        value: object = {1: scalar}
        for _ in range(NESTING_MAX - 1):
            value = {1: value}
        data, returned = round_trip(value)
        assert encode_value(returned) == data


def test_depth_does_not_recurse() -> None:
    """S9: a structure of 100,000 levels is refused like one of 101."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueTooDeepError):
        encode_value(value)
    while value:
        value = value.pop()  # Python's own teardown of such a list would recurse


def test_value_that_contains_itself_is_too_deep() -> None:
    """S9: a cycle ends as too deep, also where each level holds itself twice."""
    single: list[Any] = []
    single.append(single)
    double: list[Any] = []
    double += [double, double]
    mapping: dict[Any, Any] = {}
    mapping[1] = mapping
    for value in (single, double, mapping, {"a": [{1}, double]}):
        with pytest.raises(ValueTooDeepError, match="contains itself"):
            encode_value(value)


def test_value_that_shares_its_parts_exponentially_is_oversized() -> None:
    plain: object = [1]
    for _ in range(60):
        plain = [plain, plain]
    other: object = {1}
    for _ in range(60):
        other = [other, other]
    for value in (plain, other):
        with pytest.raises(OversizedValueError, match="more than") as raised:
            encode_value(value, bytes_max=20_000)
        assert raised.value.size > raised.value.limit == 20_000


@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [text], lambda text: {1: text}])
def test_size_is_checked_against_the_encoded_bytes(wrap: Callable[[str], object]) -> None:
    """S9: the error names size and limit."""
    size = len(encode_value(wrap("x" * 1000)))
    assert len(encode_value(wrap("x" * 1000), bytes_max=size)) == size
    with pytest.raises(OversizedValueError) as raised:
        encode_value(wrap("x" * 1000), bytes_max=size - 1, what="the input")
    assert (raised.value.size, raised.value.limit) == (size, size - 1)
    assert str(raised.value).startswith(f"the input takes {size} bytes, over the limit of {size - 1};")
    assert isinstance(raised.value, EncodeError)
    assert not isinstance(raised.value, ValueEncodeError)


def test_default_limit_is_that_of_every_driver() -> None:
    assert VALUE_BYTES_MAX == 976 * 1024
    assert len(encode_value(b"x" * (VALUE_BYTES_MAX - 5))) == VALUE_BYTES_MAX
    with pytest.raises(OversizedValueError):
        encode_value(b"x" * (VALUE_BYTES_MAX - 4))


REFERENCE: list[tuple[str, object]] = [
    ("f7", None),
    ("82f701", [None, 1]),
    ("b900016161f7", {"a": None}),
    ("d90103a1f7f7", {None: None}),
    ("d9010282f701", {None, 1}),
    ("c11a65920080", datetime(2024, 1, 1, 0, 0, 0, tzinfo=UTC)),
    ("c1fb41d954fc4007df3b", datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)),
    ("c1fbc1e0000000000000", datetime(1901, 12, 13, 20, 45, 52, tzinfo=UTC)),
    ("c1fbbff0000000000000", datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ("c1fb7ff8000000000000", TaggedValue(1, math.nan)),  # an invalid date
    ("c1fb429f655056700000", TaggedValue(1, 8.63e12)),  # later than Python's calendar
    ("c0781b323032302d30312d30315430303a30303a30302e3030303030315a", datetime(2020, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
    ("1b0020000000000000", 2**53),
    ("3bffffffffffffffff", -(2**64)),
    ("c249010000000000000000", 2**64),
    ("c348ffffffffffffffff", -(2**64)),
    ("d9010283010283" + "01a1616102" + "03", None),
    ("d90103a2616b0102" + "6176", {"k": 1, 2: "v"}),
    ("d90103b90001" + "01" + "d90103b90001" + "02" + "80", {1: {2: []}}),
    ("d81b82" + "69547970654572726f72" + "616d", ErrorValue("TypeError", "m")),
    ("d81b83" + "69547970654572726f72" + "616d" + "f7", ErrorValue("TypeError", "m")),
    ("d81b83" + "6145" + "616d" + "d81b83614661" + "6ef7", ErrorValue("E", "m", ErrorValue("F", "n"))),
    ("d81b836652656745787062612b6167", TaggedValue(27, ["RegExp", "a+", "g"])),
    ("d81b80", TaggedValue(27, [])),
    ("d81b820102", TaggedValue(27, [1, 2])),
    ("d840430001ff", b"\x00\x01\xff"),
    ("d844420001", b"\x00\x01"),
    ("d8414400010002", [1, 2]),
    ("d8454401000200", [1, 2]),
    ("d84248" + "00000001" + "ffffffff", [1, 2**32 - 1]),
    ("d84644ffffffff", [2**32 - 1]),
    ("d843480000000000000001", [1]),
    ("d84748ffffffffffffffff", [2**64 - 1]),
    ("d8484380ff7f", [-128, -1, 127]),
    ("d84942fffe", [-2]),
    ("d84d42feff", [-2]),
    ("d84a44fffffffe", [-2]),
    ("d84e44feffffff", [-2]),
    ("d84b48fffffffffffffffe", [-2]),
    ("d84f48feffffffffffffff", [-2]),
    ("d850423c00", [1.0]),
    ("d85442003c", [1.0]),
    ("d851443f800000", [1.0]),
    ("d855440000803f", [1.0]),
    ("d852483ff0000000000000", [1.0]),
    ("d85648000000000000f07f", [math.inf]),
    ("d85640", []),
    ("d85740", TaggedValue(87, b"")),
    ("d90103a1d8484101" + "00", {(1,): 0}),
    ("9f0102ff", [1, 2]),
    ("bf616101ff", {"a": 1}),
    ("fa3fc00000", 1.5),
    ("f93e00", 1.5),
    ("63eda080", "\N{REPLACEMENT CHARACTER}"),  # JavaScript text may hold half a surrogate pair
    ("8263eda080f7", ["\N{REPLACEMENT CHARACTER}", None]),
    ("43eda080", b"\xed\xa0\x80"),
    ("62c3b7", "÷"),
    ("81fbf7f7f7f7f7f7f7f7", None),
    ("d8236161", TaggedValue(35, "a")),
    ("d81c81d81d00", TaggedValue(28, [TaggedValue(29, 0)])),
    ("d903e7a161618101", TaggedValue(999, {"a": [1]})),
    ("82d903e78101d903e881d903e7a10102", [TaggedValue(999, [1]), TaggedValue(1000, [TaggedValue(999, {1: 2})])]),
    ("a1d903e7810100", {TaggedValue(999, (1,)): 0}),
    ("d9d9f78101", [1]),
    ("a201020103", {1: 3}),
    ("d90103a30102f50301f6", None),
]


@pytest.mark.parametrize(("data", "value"), REFERENCE, ids=[data for data, _ in REFERENCE])
def test_everything_the_reference_engine_stores_is_read(data: str, value: object) -> None:
    """S16: JavaScript's types come back as Python's, or as tagged data."""
    decoded = decode_value(bytes.fromhex(data))
    if value is not None:
        assert same(decoded, value)
    assert same(decode_value(encode_value(decoded)), decoded)


def test_objects_in_a_set_are_frozen_so_that_they_can_be_there() -> None:
    """S16: a JavaScript Set may hold objects and arrays, which Python's can only hold frozen."""
    decoded = decode_value(bytes.fromhex("d9010283a1616101820102d90102810a"))
    assert decoded == {cbor2.frozendict({"a": 1}), (1, 2), frozenset({10})}


def test_undefined_is_exported_as_stored() -> None:
    assert UNDEFINED == b"\xf7"
    assert decode_value(UNDEFINED) is None


@pytest.mark.parametrize(
    "data",
    [
        "",
        "0102",  # a second value
        "f6f6",
        "8101ff",
        "61",  # cut short
        "8201",
        "a101",
        "ff",
        "1c",
        "5f01ff",
        "62c328",  # not UTF-8
        "61ff",
        "e0",  # simple values without a meaning
        "f0",
        "f820",
        "81f8ff",
        "c1f5",  # tags around what they are not for
        "c16161",
        "c0" + "6161",
        "c0" + "6a323032302d30312d3031",
        "c0" + "7332303230" + "2d30312d30315430303a30303a3030",
        "c001",
        "c201",
        "c401",
        "c4820161" + "61",
        "c482fb3ff000000000000001",
        "c4821bffffffffffffffff01",
        "d81e820100",
        "d8254100",
        "d90102a0",
        "d9010380",
        "d903ec6161",
        "d84501",
        "d8454101",  # half an item of a typed array
        "d81b826f646563696d616c2e446563696d616c6161",
        "81" * 300 + "00",
        "d90103a101" * 150 + "00",
    ],
)
def test_bytes_that_are_no_value_are_refused(data: str) -> None:
    with pytest.raises(ValueDecodeError) as raised:
        decode_value(bytes.fromhex(data))
    assert isinstance(raised.value, DecodeError)


def test_decoder_survives_a_million_levels() -> None:
    for opening in (
        b"\x81",
        b"\xa1",
        b"\x9f",
        b"\xbf",
        b"\xc6",
        b"\xd9\x01\x02\x81",
        b"\xd9\x01\x03\xa1\x00",
        b"\xf7\x81",
    ):
        with pytest.raises(ValueDecodeError):
            decode_value(opening * 1_000_000)


@pytest.mark.parametrize(
    "claim",
    ["5b", "7b", "9b", "bb", "d901029b", "d90103bb", "c25b", "d8455b", "d903e79b", "a19b", "81f79b"],
)
def test_claimed_length_takes_no_memory(claim: str) -> None:
    payloads = [bytes.fromhex(claim + length) + b"\x00" for length in ("7fffffffffffffff", "0000000200000000")]
    tracemalloc.start()
    try:
        for payload in payloads:
            with pytest.raises(ValueDecodeError):
                decode_value(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_claimed_length_takes_no_memory_outside_python_either() -> None:
    program = """
import resource
from perdure.storage.values import ValueDecodeError, decode_value
usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = usage()
for claim in ("5b", "7b", "9b", "bb", "d901029b", "d90103bb", "c25b", "d8455b", "d903e79b", "a19b"):
    for length in ("7fffffffffffffff", "0000000040000000"):
        try:
            decode_value(bytes.fromhex(claim + length) + bytes(1000))
        except ValueDecodeError:
            continue
        raise SystemExit("decoded")
print(usage() - before)
"""
    grown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert int(grown) < 50_000


@pytest.mark.parametrize(
    "make",
    [
        lambda digits: Decimal("7" * digits),
        lambda digits: Decimal("-" + "7" * digits + "e-5"),
        lambda digits: Fraction(int(Decimal("7" * digits)), 2),
        lambda digits: Fraction(3, int(Decimal("7" * digits))),
    ],
    ids=["decimal", "negative decimal", "numerator", "denominator"],
)
def test_a_number_that_takes_minutes_to_make_is_refused_and_the_longest_that_does_not_comes_back(
    make: Callable[[int], object],
) -> None:
    """S41: decoding holds up the whole process, so what takes time by the square of its length is limited, both ways."""
    longest = make(19_728)
    assert decode_value(encode_value(longest)) == longest
    with pytest.raises(ValueEncodeError, match=r"value\[0\].*65536 bits.*store it as text"):
        encode_value([make(19_730)])


def test_a_stored_number_that_would_take_minutes_to_make_is_damage() -> None:
    """S41: found out before anything is made of it."""
    part = b"\xc2\x5a" + (490_000).to_bytes(4, "big") + b"\x7f" * 490_000
    for data in (b"\xc4\x82\x00" + part, b"\xd8\x1e\x82" + part + b"\x02", b"\xd8\x1e\x82\x02" + part):
        began = clock.perf_counter()
        with pytest.raises(ValueDecodeError, match="65536"):
            decode_value(data)
        assert clock.perf_counter() - began < 5
    with pytest.raises(ValueDecodeError):
        decode_value(b"\xd8\x1e\x82\x01\x00")
    with pytest.raises(ValueDecodeError):
        decode_value(b"\xd8\x1e\x82\x01\x61a")
