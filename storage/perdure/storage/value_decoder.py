"""CBOR to user values: everything Perdure or the reference engine can have written.

1. Any bytes give a value or a `ValueDecodeError`, nothing else, and no memory is taken for a length that the bytes only
   claim (cbor2 reads in small chunks; a test holds it to that). Nor is the time of more than a look at each byte: what takes
   time by the square of its length is bounded (`NUMBER_BITS_MAX`), as decoding holds up everything else in the process.
2. Decoding yields data and executes nothing: a tag whose usual meaning is an object with behaviour (a regular
   expression, a MIME message, shared references) stays a `TaggedValue`.
3. What comes back is fresh and mutable, `list`, `dict` and `set`, inside tags as well. Only dict keys and set elements,
   which must be hashable, are frozen: `tuple`, `frozenset`, `frozendict`.
4. Every byte is used; a second item after the value is an error.

cbor2 has no hook for JavaScript's `undefined`, and refuses the lone surrogates that JavaScript text may hold. Both are
rewritten in the bytes beforehand, which CBOR makes a flat scan. The rejected alternative, walking the decoded value,
must rebuild every frozen container around a replaced element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from io import BytesIO
from math import isfinite
from struct import iter_unpack
from typing import Any, Final, TypeAlias, cast

import cbor2

from perdure.storage.value_types import NESTING_MAX, NUMBER_BITS_MAX, ErrorValue, TaggedValue, ValueDecodeError

__all__ = ["SPECIAL_DECIMAL", "decode_value"]

SPECIAL_DECIMAL: Final = "decimal.Decimal"
"""Class name under tag 27 for the decimals that tag 4 cannot hold. Stored on disk; never change or reuse."""

_Decoder: TypeAlias = Callable[[Any, bool], Any]
"""Gives the value of a tag from its content, frozen if the flag is set."""

_DEPTH_MAX: Final = 2 * NESTING_MAX + 8
"""cbor2 counts a tag as a level: each of our containers may carry one, and the innermost item a tag and an array."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_ONE_BYTE_VALUES: Final[dict[bytes, Any]] = {
    **{bytes([value]): value for value in range(24)},
    **{bytes([0x20 + value]): -1 - value for value in range(24)},
    **{b"\x40": b"", b"\x60": "", b"\xf4": False, b"\xf5": True, b"\xf6": None, b"\xf7": None},
}
_MISSING: Final = object()

_SHORT_TEXT_HEADS: Final = (b"?", *(bytes([0x60 + length]) for length in range(24)))
"""The first byte of encoded text, by the length of the whole; nothing begins like the first."""

_SUSPECT: Final = re.compile(rb"[\xe0-\xf3\xf7\xf8]")
"""A byte that may head an undefined or another simple value, or begin an encoded surrogate. Most values have none."""

_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}".encode()


def decode_value(data: bytes) -> Any:
    """The value that was encoded as `data`.

    Dict keys that Python holds equal (JavaScript's Map tells `1` from `true`) leave one entry, with the last value.

    Returns:
        A fresh value that shares nothing with any other result.

    Raises:
        ValueDecodeError: The bytes are not one whole value, nest too deep, or hold a malformed or unknown item.
    """
    value = _ONE_BYTE_VALUES.get(data, _MISSING)
    if value is not _MISSING:
        return value
    if len(data) < 25 and data[:1] == _SHORT_TEXT_HEADS[len(data)]:
        try:
            return data[1:].decode()
        except UnicodeDecodeError:
            pass  # damaged, or JavaScript text with a lone surrogate
    if _SUSPECT.search(data):
        data = _without_undefined(data)
    unknown: set[int] = set()

    def note_unknown(tag: cbor2.CBORTag, immutable: bool) -> cbor2.CBORTag:
        unknown.add(tag.tag)
        return tag

    value = _decode(data, _DECODERS, note_unknown)
    if unknown:
        # cbor2 freezes what is inside a tag unless a decoder is registered for it, so register them and read again.
        decoders: dict[int, _Decoder] = {**_DECODERS, **{tag: partial(_tagged, tag) for tag in unknown}}
        value = _decode(data, decoders, note_unknown)
    return value


def _decode(
    data: bytes,
    decoders: Mapping[int, _Decoder],
    tag_hook: Callable[[cbor2.CBORTag, bool], Any],
) -> Any:
    stream = BytesIO(data)
    try:
        decoder = cbor2.CBORDecoder(stream, semantic_decoders=decoders, tag_hook=tag_hook, max_depth=_DEPTH_MAX)
        value = decoder.decode()
    except Exception as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, Exception):
            raise cause from None  # cbor2 wraps whatever interrupts a decoder, a KeyboardInterrupt included
        reason = f"{error}: {cause}" if cause else f"{error}"
        raise ValueDecodeError(f"{len(data)} stored bytes are not a CBOR value: {reason}") from error
    if stream.tell() != len(data):
        raise ValueDecodeError(f"{len(data) - stream.tell()} bytes left over after a CBOR value")
    return value


def _without_undefined(data: bytes) -> bytes:
    """The same bytes with undefined made null and surrogates in text made replacement characters.

    Items follow each other flatly in CBOR, so containers need no bookkeeping here. Damaged input ends the scan early;
    the decoder says what is wrong with it.
    """
    result = bytearray(data)
    offset = 0
    size = len(data)
    while offset < size:
        first = data[offset]
        major, info = first >> 5, first & 0x1F
        length_bytes = 1 << (info - 24) if 24 <= info < 28 else 0
        if major == 7:
            if first == 0xF7:
                result[offset] = 0xF6
            elif info < 20 or info == 24:
                raise ValueDecodeError(f"simple value at byte {offset}, which has no meaning here")
        argument_end = offset + 1 + length_bytes
        offset = argument_end
        if major in (2, 3) and info < 28:
            payload = int.from_bytes(data[argument_end - length_bytes : argument_end], "big") if info >= 24 else info
            offset += payload
            if major == 3 and payload >= 3 and offset <= size:
                result[argument_end:offset] = _SURROGATE.sub(_REPLACEMENT, data[argument_end:offset])
    return bytes(result)


def _tagged(tag: int, value: Any, immutable: bool) -> TaggedValue:
    return TaggedValue(tag, value)


def _date_text(value: Any, immutable: bool) -> datetime:
    moment = datetime.fromisoformat(value)
    if moment.utcoffset() is None:
        raise ValueDecodeError("date text without a time zone")
    return moment


def _date_number(value: Any, immutable: bool) -> datetime | TaggedValue:
    if type(value) is not int and type(value) is not float:
        raise ValueDecodeError(f"date tag around a {type(value).__name__}")
    if not isfinite(value):
        return TaggedValue(1, value)  # an invalid JavaScript date
    # JavaScript's dates are whole milliseconds; far from the epoch a double holds those exactly, but no microseconds.
    milliseconds = round(value * 1000)
    try:
        if milliseconds / 1000 == value:
            return _EPOCH + timedelta(milliseconds=milliseconds)
        return _EPOCH + timedelta(microseconds=round(value * 1_000_000))
    except OverflowError:
        return TaggedValue(1, value)  # JavaScript's calendar ends later than Python's


def _decimal(value: Any, immutable: bool) -> Decimal:
    exponent, mantissa = value
    if type(exponent) is not int or type(mantissa) is not int:
        raise ValueDecodeError("decimal fraction of something other than two integers")
    _check_length(mantissa)
    number = Decimal(mantissa)
    return Decimal((number.is_signed(), number.as_tuple().digits, exponent))


def _fraction(value: Any, immutable: bool) -> Fraction:
    numerator, denominator = value
    if type(numerator) is not int or type(denominator) is not int:
        raise ValueDecodeError("fraction of something other than two integers")
    _check_length(numerator)
    _check_length(denominator)
    return Fraction(numerator, denominator)


def _check_length(part: int) -> None:
    if part.bit_length() > NUMBER_BITS_MAX:
        raise ValueDecodeError(f"a number of {part.bit_length()} bits where at most {NUMBER_BITS_MAX} belong")


def _object(value: Any, immutable: bool) -> Decimal | ErrorValue | TaggedValue:
    match value:
        case [str(name), str(text)] if name == SPECIAL_DECIMAL:
            return Decimal(text)
        case ["RegExp", str(), str()]:
            return TaggedValue(27, value)
        case [str(name), str(message)]:
            return ErrorValue(name, message)
        case [str(name), str(message), cause]:
            return ErrorValue(name, message, cause)
        case _:
            return TaggedValue(27, value)


def _map(value: Any, immutable: bool) -> Any:
    if type(value) is not (cbor2.frozendict if immutable else dict):
        raise ValueDecodeError(f"map tag around a {type(value).__name__}")
    return cast("Any", value)


def _bytes(value: Any, immutable: bool) -> bytes:
    if type(value) is not bytes:
        raise ValueDecodeError(f"typed array around a {type(value).__name__}")
    return value


def _typed_array(item: str, value: Any, immutable: bool) -> list[Any] | tuple[Any, ...]:
    items = (number for (number,) in iter_unpack(item, _bytes(value, immutable)))
    return tuple(items) if immutable else list(items)


def _content(value: Any, immutable: bool) -> Any:
    return value


_TYPED_ARRAYS: Final = {
    **{65: ">H", 66: ">I", 67: ">Q", 69: "<H", 70: "<I", 71: "<Q"},
    **{72: "b", 73: ">h", 74: ">i", 75: ">q", 77: "<h", 78: "<i", 79: "<q"},
    **{80: ">e", 81: ">f", 82: ">d", 84: "<e", 85: "<f", 86: "<d"},
}
"""Item layouts of RFC 8746's typed arrays. 64 and 68 are bytes; 83 and 87, 128-bit floats, have no Python type."""

_OPAQUE_TAGS: Final = (5, 25, 28, 29, 35, 36, 52, 54, 256, 260, 261, 43000)
"""Tags to which cbor2 gives a meaning that is not wanted here: big floats, string and value sharing, regular
expressions, MIME messages, network addresses, complex numbers."""

_DECODERS: Final[dict[int, _Decoder]] = {
    0: _date_text,
    1: _date_number,
    4: _decimal,
    27: _object,
    30: _fraction,
    64: _bytes,
    68: _bytes,
    259: _map,
    55799: _content,
    **{tag: partial(_typed_array, item) for tag, item in _TYPED_ARRAYS.items()},
    **{tag: partial(_tagged, tag) for tag in _OPAQUE_TAGS},
}
"""Tags read here. cbor2 reads the rest of those we write: big integers (2, 3), UUIDs (37), dates (100,
1004) and sets (258)."""
