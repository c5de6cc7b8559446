"""User values to CBOR: what may be stored, checked before anything is written.

1. A value that cannot come back is refused, with the place and type of what is wrong and what to do instead. Nothing
   is stored as a best effort.
2. Depth and size are checked without recursion, before cbor2 sees the value: cbor2 ends the process at 20,000 levels,
   and a value that shares its parts can be exponentially larger than it looks.
3. What is written, the reference engine can load: a dict with other than text keys goes under tag 259, because one
   such map without it makes a whole workflow unreadable there.
4. Equal sets give equal bytes in every process: elements are sorted by their encoding, since Python's own order of a
   set differs from run to run.

Plain values (JSON's types and bytes) take a short check and go to cbor2. All others are written here, item by item. The
rejected alternative, rebuilding them from cbor2's tag objects, fails for dict keys, which must be hashable throughout.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from math import isfinite
from os import PathLike
from struct import Struct
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Final, TypeAlias, cast
from uuid import UUID

import cbor2

from perdure.storage.driver import VALUE_BYTES_MAX
from perdure.storage.value_decoder import SPECIAL_DECIMAL
from perdure.storage.value_types import (
    NESTING_MAX,
    NUMBER_BITS_MAX,
    ErrorValue,
    OversizedValueError,
    TaggedValue,
    ValueEncodeError,
    ValueTooDeepError,
)

__all__ = ["encode_flat", "encode_value"]

_PLAIN_SCALARS: Final = frozenset({type(None), bool, int, str, bytes})
_PLAIN_CONTAINERS: Final = frozenset({dict, list, tuple})
_TEXT: Final = frozenset({str})
_FLAT_KINDS: Final = _PLAIN_SCALARS | {float}
_SLACK_BYTES: Final = 16 * 1024 * 1024
"""How far past its limit a value is written, so that the error of one merely too large names its exact size."""

_DOUBLE: Final = Struct(">Bd")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_DIGITS_MAX: Final = NUMBER_BITS_MAX // 3
"""More digits than this have more bits than that, which is so found out before they are made a number."""

_TOO_LONG: Final = f"has a part of over {NUMBER_BITS_MAX} bits, about 19,700 digits; round it, or store it as text"

_PLAIN_DATA: Final = "None, bool, int, float, str, bytes, list, dict, set, datetime, date, Decimal, Fraction or UUID"

_Children: TypeAlias = Iterator[tuple[str | int, object]]
"""Contents of a container, each with how its path continues: an index, or the text to append."""


def encode_value(
    value: object,
    *,
    bytes_max: int = VALUE_BYTES_MAX,
    what: str = "value",
    to_plain: Callable[[object], object] | None = None,
) -> bytes:
    """Encode a value as CBOR.

    Storable are `None`, `bool`, `int`, `float`, `str`, `bytes`, `list`, `dict`, `set`, aware `datetime`, `date`,
    `Decimal`, `Fraction`, `UUID`, `ErrorValue` and `TaggedValue`, which come back equal in value and type, and these,
    which come back as the plain type: `tuple` as `list`, `frozenset` as `set`, `bytearray` as `bytes`, and instances of
    subclasses (`IntEnum` and `StrEnum` members, named tuples, `OrderedDict`, ...). A datetime's zone comes back as its
    UTC offset. Dict keys and set elements that are tuples or frozensets stay that.

    In the reference engine, integers of 2**32 and more arrive as BigInt, and dicts with other than text keys as Map.

    Args:
        value: What to encode. It is not changed, and later changes of it do not show in the result.
        bytes_max: Most bytes that the result may have.
        what: How errors name the value, for example "the result of step 'charge'".
        to_plain: Gives for an object of no storable type one that is stored in its place (a dict of its fields, say, with
            whatever they hold), or the object itself to refuse it.

    Raises:
        ValueEncodeError: The value holds something that cannot be stored.
        ValueTooDeepError: It nests over `NESTING_MAX` deep, or contains itself.
        OversizedValueError: Its encoding is larger than `bytes_max`.
    """
    if _is_plain(value, what, bytes_max):
        try:
            data = cbor2.dumps(value)
        except UnicodeEncodeError:
            data = _Encoding(what, bytes_max, to_plain).encode(value)  # to say where the surrogate is
    else:
        data = _Encoding(what, bytes_max, to_plain).encode(value)
    if len(data) > bytes_max:
        raise _oversized(what, len(data), bytes_max, exact=True)
    return data


def encode_flat(value: object, bytes_max: int) -> bytes | None:
    """The encoding of a dict of plain scalars under text keys, as most results are; `None` for all else.

    All else is whatever takes a closer look: also a dict that is too large, or holds an infinity or a lone surrogate.
    """
    if type(value) is not dict:
        return None
    record = cast("dict[object, object]", value)
    if len(record) > bytes_max or not _TEXT.issuperset(map(type, record)):
        return None
    kinds = set(map(type, record.values()))
    if not kinds <= _FLAT_KINDS:
        return None
    if float in kinds and any(type(field) is float and not isfinite(field) for field in record.values()):
        return None
    try:
        data = cbor2.dumps(record)
    except UnicodeEncodeError:
        return None
    return data if len(data) <= bytes_max else None


def _is_plain(value: object, what: str, bytes_max: int) -> bool:
    """Whether a value holds only JSON's types and bytes, exactly these and no subclasses, and nests within bounds.

    Infinities and NaN do not count as plain: cbor2 shortens them, the reference engine does not.

    Raises:
        OversizedValueError: It has far more items than its encoding may have bytes.
    """
    kind = type(value)
    if kind in _PLAIN_SCALARS or (kind is float and isfinite(cast("float", value))):
        return True
    if kind not in _PLAIN_CONTAINERS:
        return False
    pending = [(value, 1)]
    items = 0
    while pending:
        container, depth = pending.pop()
        contents = cast("Collection[object]", container)
        items += len(contents)
        if items > 4 * bytes_max:
            raise _oversized(what, items, bytes_max, exact=False)
        if depth > NESTING_MAX:
            return False
        if type(container) is dict:
            for key in contents:
                if type(key) is not str:
                    return False
            contents = cast("dict[object, object]", container).values()
        for item in contents:
            kind = type(item)
            if kind in _PLAIN_SCALARS:
                continue
            if kind in _PLAIN_CONTAINERS:
                pending.append((item, depth + 1))
            elif kind is not float or not isfinite(cast("float", item)):
                return False
    return True


class _Encoding:
    """One value being written: the pieces so far, and the containers that are open."""

    __slots__ = ("_bytes_max", "_pieces", "_to_plain", "_what")

    def __init__(self, what: str, bytes_max: int, to_plain: Callable[[object], object] | None = None) -> None:
        self._what = what
        self._bytes_max = bytes_max
        self._to_plain = to_plain
        self._pieces: list[bytes] = []

    def encode(self, value: object) -> bytes:
        """Write the value and everything in it, with a stack of its own."""
        pieces = self._pieces
        path: list[str | int] = []
        stack: list[_Children] = [iter([("", value)])]
        items = size = written = 0
        while stack:
            for step, item in stack[-1]:
                try:
                    children = self._write(item)
                except _Refusal as refusal:
                    raise self._refused(str(refusal), [*path, step], item, ValueEncodeError) from None
                except Exception as error:
                    reason = f"could not be read ({error!r}); store plain data"
                    raise self._refused(reason, [*path, step], item, ValueEncodeError) from error
                items += 1
                size += sum(map(len, pieces[written:]))
                written = len(pieces)
                if items > self._bytes_max or size > self._bytes_max + _SLACK_BYTES:
                    raise _oversized(self._what, size, self._bytes_max, exact=False)
                if children is not None:
                    if len(stack) > NESTING_MAX:
                        reason = f"nests over {NESTING_MAX} deep, or contains itself; store a flatter value"
                        raise self._refused(reason, [*path, step], item, ValueTooDeepError)
                    path.append(step)
                    stack.append(children)
                    break
            else:
                stack.pop()
                written = len(pieces)  # a set that ended has joined its elements
                if path:
                    path.pop()
        return b"".join(pieces)

    def _write(self, item: object) -> _Children | None:
        """Write an item without its contents, which are returned."""
        emit = self._pieces.append
        match item:
            case None:
                emit(b"\xf6")
            case bool():
                emit(b"\xf5" if item else b"\xf4")
            case int():
                emit(cbor2.dumps(int.__index__(item)))
            case float():
                emit(_DOUBLE.pack(0xFB, item))
            case str():
                raw = _text(item)
                emit(_head(3, len(raw)) + raw)
            case bytes() | bytearray():
                emit(_head(2, len(item)) + item)
            case dict() | cbor2.frozendict():
                return self._write_dict(list(cast("Mapping[object, object]", item).items()))
            case list() | tuple():
                items = list(cast("Iterable[object]", item))
                emit(_head(4, len(items)))
                return iter(enumerate(items))
            case set() | frozenset():
                elements = list(cast("Iterable[object]", item))
                emit(b"\xd9\x01\x02" + _head(4, len(elements)))
                return self._elements(elements)
            case datetime():
                emit(_datetime(item))
            case date():
                emit(b"\xd9\x03\xec\x6a" + date.isoformat(item).encode())
            case Decimal():
                emit(_decimal(item))
            case Fraction():
                if max(item.numerator.bit_length(), item.denominator.bit_length()) > NUMBER_BITS_MAX:
                    raise _Refusal(_TOO_LONG)
                emit(b"\xd8\x1e\x82" + cbor2.dumps(item.numerator) + cbor2.dumps(item.denominator))
            case UUID():
                emit(b"\xd8\x25\x50" + item.bytes)
            case ErrorValue():
                return self._write_error(item)
            case TaggedValue():
                if not 0 <= item.tag < 2**64:
                    raise _Refusal("has a tag outside 0 to 2**64 - 1; use a number of at most 64 bits")
                emit(_head(6, item.tag))
                return iter([(".value", item.value)])
            case _:
                plain = item if self._to_plain is None else self._to_plain(item)
                if plain is item:
                    raise _Refusal(_advice(item))
                return self._write(plain)
        return None

    def _write_dict(self, pairs: list[tuple[object, object]]) -> _Children:
        plain = all(isinstance(key, str) for key, _ in pairs)
        self._pieces.append((b"" if plain else b"\xd9\x01\x03") + _head(5, len(pairs)))
        for index, (key, value) in enumerate(pairs):
            yield f".keys()[{index}]", key
            yield f"[{_key_text(key)}]", value

    def _write_error(self, error: ErrorValue) -> _Children:
        self._pieces.append(b"\xd8\x1b\x83")
        yield ".name", error.name
        yield ".message", error.message
        if error.cause is None:
            self._pieces.append(b"\xf7")
        else:
            yield ".cause", error.cause

    def _elements(self, elements: list[object]) -> _Children:
        """A set's elements; once all are written, sorts what was written of each."""
        pieces = self._pieces
        starts: list[int] = []
        for index, element in enumerate(elements):
            starts.append(len(pieces))
            yield f".elements()[{index}]", element
        starts.append(len(pieces))
        pieces[starts[0] :] = sorted(b"".join(pieces[start:end]) for start, end in pairwise(starts))

    def _refused(
        self, reason: str, path: list[str | int], item: object, error: type[ValueEncodeError]
    ) -> ValueEncodeError:
        steps = [step if isinstance(step, str) else f"[{step}]" for step in path]
        where = "value" + "".join(steps if len(steps) <= 12 else [*steps[:6], "...", *steps[-6:]])
        type_name = type(item).__qualname__
        message = f"{self._what} cannot be stored: {where} ({type_name}) {reason}"
        return error(message, path=where, type_name=type_name)


class _Refusal(Exception):
    """Why an item cannot be stored; `_Encoding.encode` adds where it is."""


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major << 5 | argument])
    for info, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << (8 * size):
            return bytes([major << 5 | info]) + argument.to_bytes(size, "big")
    raise AssertionError("no length in memory needs more than 64 bits")


def _text(text: str) -> bytes:
    try:
        return str.encode(text)
    except UnicodeEncodeError:
        raise _Refusal(
            'holds a lone surrogate, which is no text; store bytes, e.g. text.encode("utf-8", "surrogatepass")'
        ) from None


def _datetime(moment: datetime) -> bytes:
    """A date as the reference engine writes it where that is exact, else as text with its offset."""
    offset = moment.utcoffset()
    if offset is None:
        raise _Refusal("has no time zone; attach one, e.g. datetime.now(timezone.utc) or value.replace(tzinfo=...)")
    milliseconds, rest = divmod(moment - _EPOCH, _MILLISECOND)
    if offset or rest:
        text = datetime.isoformat(moment).encode()
        return b"\xc0" + _head(3, len(text)) + text
    if milliseconds % 1000 == 0 and 0 <= milliseconds < 2**32 * 1000:
        return b"\xc1\x1a" + (milliseconds // 1000).to_bytes(4, "big")
    return b"\xc1" + _DOUBLE.pack(0xFB, milliseconds / 1000)


def _decimal(number: Decimal) -> bytes:
    sign, digits, exponent = number.as_tuple()
    if isinstance(exponent, str) or (sign and not any(digits)):
        # NaNs, infinities and negative zeros are not a mantissa and an exponent.
        name, text = SPECIAL_DECIMAL.encode(), Decimal.__str__(number).encode()
        return b"\xd8\x1b\x82" + _head(3, len(name)) + name + _head(3, len(text)) + text
    if len(digits) > _DIGITS_MAX or (mantissa := int(Decimal((sign, digits, 0)))).bit_length() > NUMBER_BITS_MAX:
        raise _Refusal(_TOO_LONG)
    return b"\xc4\x82" + cbor2.dumps(exponent) + cbor2.dumps(mantissa)


def _key_text(key: object) -> str:
    if isinstance(key, str):
        shown = str.__str__(key)
        return f'"{shown}"' if len(shown) <= 60 else f'"{shown[:60]}..."'
    if isinstance(key, int | float | bytes):
        return f"{key!r:.60}"
    return type(key).__name__


def _oversized(what: str, size: int, limit: int, *, exact: bool) -> OversizedValueError:
    measured = f"{size}" if exact else f"more than {size}"
    return OversizedValueError(
        f"{what} takes {measured} bytes, over the limit of {limit}; store it elsewhere and keep a reference to it",
        size=size,
        limit=limit,
    )


_ADVICE: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    ((FunctionType, MethodType, BuiltinFunctionType), "is a function; call it and store what it gives"),
    (io.IOBase, "is an open file; store its path, or what is in it"),
    (Awaitable, "was not awaited; await it and store what it gives"),
    (Iterator, "can be read only once; store list(...) of it"),
    (Enum, "is an enum member without a plain type; store its .value"),
    (timedelta, "has no stored form; store .total_seconds()"),
    (time, "has no stored form; store .isoformat()"),
    (PathLike, "has no stored form; store str(...) of it"),
    (complex, "has no stored form; store [real, imag]"),
    (memoryview, "is a view; store bytes(...) of it"),
    (BaseException, "is an exception; store its text, or ErrorValue(name, message)"),
    (type, "is a class; store its name"),
    (Mapping, "has no stored form; store dict(...) of it"),
    (Iterable, f"has no stored form; store plain data such as list(...) of it ({_PLAIN_DATA})"),
)


def _advice(item: object) -> str:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return (
            "is a dataclass; annotate what returns or takes it with its class, or store dataclasses.asdict(...) of it"
        )
    for kinds, advice in _ADVICE:
        if isinstance(item, kinds):
            return advice
    return f"has no stored form; store plain data ({_PLAIN_DATA}) and keep such objects outside the workflow's values"
