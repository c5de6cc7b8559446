"""Order-preserving keys: the part of the FoundationDB tuple encoding that the storage layout needs.

1. Byte order of packed keys is the order of the tuples, element by element; a tuple sorts before its extensions. Across
   kinds of part, the order is bytes, text, tuple, integer (that of the type codes).
2. Packing is concatenative: `pack(a + b) == pack(a) + pack(b)`. A key under a known parent is the parent's bytes plus
   the packed rest, and everything below a parent is one prefix.
3. Every key has one encoding. `unpack` refuses any other spelling, so that two different byte strings never stand for
   the same place in history.
4. Depth is bounded and the walk keeps its own stack, so no input can exhaust Python's.

Integers cover -(2**64 - 1) to 2**64 - 1, text is UTF-8, and tuples nest up to `KEY_NESTING_MAX` deep. Null, floats
and the encoding's other kinds are refused: the layout uses none, and a kind that is never written need not be read.

The rejected alternative, a separator-joined text path, is what makes `a/b` and `a` + `b` the same entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final, TypeAlias

from perdure.storage.errors import DecodeError, EncodeError

__all__ = [
    "KEY_NESTING_MAX",
    "KeyDecodeError",
    "KeyEncodeError",
    "KeyPart",
    "pack",
    "pack_index",
    "prefix_end",
    "unpack",
]

KeyPart: TypeAlias = "int | str | bytes | tuple[KeyPart, ...]"
"""One element of a key."""

KEY_NESTING_MAX: Final = 100
"""How deep tuples nest at most; a part of the key itself has depth 0."""

# Type codes: stored on disk; never change or reuse.
_END: Final = 0x00
_BYTES: Final = 0x01
_TEXT: Final = 0x02
_NESTED: Final = 0x05
_ZERO: Final = 0x14  # 0x0c..0x13 are negative integers of 8..1 bytes, 0x15..0x1c positive ones of 1..8 bytes
_ESCAPE: Final = 0xFF

_INT_BYTES_MAX: Final = 8
_INT_CODES: Final = range(_ZERO - _INT_BYTES_MAX, _ZERO + _INT_BYTES_MAX + 1)

_SMALL_INTS: Final = (bytes([_ZERO]), *(bytes([_ZERO + 1, value]) for value in range(1, 256)))
"""Encodings of 0..255, which is what nearly every part of a real key is."""


_TWO_BYTES: Final = Struct(">BH")


class KeyEncodeError(EncodeError):
    """A part cannot be in a key. `path` is like `key[1][0]`, `type_name` the type found there."""


class KeyDecodeError(DecodeError):
    """Bytes are not a key. `offset` is where in them."""

    offset: int = 0


def pack(parts: tuple[KeyPart, ...]) -> bytes:
    """Encode a tuple as a key whose byte order is the tuple's order.

    Concatenative: `pack(a + b) == pack(a) + pack(b)`, and `pack(())` is empty.

    Args:
        parts: Integers (-(2**64 - 1) to 2**64 - 1; `IntEnum` members count, `bool` does not), text, bytes, and tuples
            of these, nested at most `KEY_NESTING_MAX` deep.

    Raises:
        KeyEncodeError: A part has another type, is out of range, is text with a lone surrogate, or nests too deep.
    """
    pieces: list[bytes] = []
    for position, part in enumerate(parts):
        if type(part) is int and 0 <= part < 65536:
            pieces.append(pack_index(part))
        elif isinstance(part, tuple):
            _pack_nested(part, position, pieces)
        else:
            pieces.append(_pack_scalar(part, (position,)))
    return b"".join(pieces)


def pack_index(index: int) -> bytes:
    """`pack((index,))` for a small number, of which most parts of the engine's keys are; 0 to 2**16 - 1."""
    return _SMALL_INTS[index] if index < 256 else _TWO_BYTES.pack(_ZERO + 2, index)


def unpack(data: bytes) -> tuple[KeyPart, ...]:
    """Decode a key; the inverse of `pack`.

    Raises:
        KeyDecodeError: The bytes are not what `pack` gives for any tuple: an unknown code, an integer in more bytes
            than it needs, bad UTF-8, an unterminated part, or nesting over `KEY_NESTING_MAX`.
    """
    parts: list[KeyPart] = []
    outer: list[list[KeyPart]] = []
    offset = 0
    size = len(data)
    while offset < size:
        code = data[offset]
        offset += 1
        if code == _ZERO:
            parts.append(0)
        elif code in _INT_CODES:
            value, offset = _unpack_int(data, offset, code)
            parts.append(value)
        elif code == _NESTED:
            if len(outer) == KEY_NESTING_MAX:
                raise KeyDecodeError(f"key nests over {KEY_NESTING_MAX} deep at byte {offset - 1}", offset=offset - 1)
            outer.append(parts)
            parts = []
        elif code == _END and outer:
            if offset < size and data[offset] == _ESCAPE:
                raise KeyDecodeError(f"null inside a tuple at byte {offset - 1}; keys hold no nulls", offset=offset - 1)
            nested = tuple(parts)
            parts = outer.pop()
            parts.append(nested)
        elif code in (_TEXT, _BYTES):
            raw, end = _unpack_escaped(data, offset)
            parts.append(raw if code == _BYTES else _unpack_text(raw, offset))
            offset = end
        else:
            raise KeyDecodeError(f"unknown type code 0x{code:02x} in a key at byte {offset - 1}", offset=offset - 1)
    if outer:
        raise KeyDecodeError("key ends inside a nested tuple", offset=size)
    return tuple(parts)


def prefix_end(prefix: bytes) -> bytes | None:
    """The smallest key that is greater than every key starting with `prefix`.

    Returns:
        The exclusive end of the prefix's range; `None` when there is none (the prefix is empty or all 0xff bytes), so
        that the range is open-ended.
    """
    kept = prefix.rstrip(b"\xff")
    if not kept:
        return None
    return kept[:-1] + bytes([kept[-1] + 1])


def _pack_nested(nested: tuple[KeyPart, ...], position: int, pieces: list[bytes]) -> None:
    """Append the encoding of a nested tuple, walking it with an explicit stack."""
    path = [position]
    stack: list[Iterator[tuple[int, KeyPart]]] = [iter(enumerate(nested))]
    pieces.append(b"\x05")
    while stack:
        for index, part in stack[-1]:
            if isinstance(part, tuple):
                if len(stack) == KEY_NESTING_MAX:
                    raise _refusal(f"nests over {KEY_NESTING_MAX} deep; use a flat key", (*path, index), part)
                path.append(index)
                stack.append(iter(enumerate(part)))
                pieces.append(b"\x05")
                break
            pieces.append(_pack_scalar(part, (*path, index)))
        else:
            pieces.append(b"\x00")
            stack.pop()
            path.pop()


def _pack_scalar(part: object, path: tuple[int, ...]) -> bytes:
    if isinstance(part, int) and not isinstance(part, bool):
        return _pack_int(int(part), path)
    if isinstance(part, str):
        try:
            raw = part.encode()
        except UnicodeEncodeError:
            raise _refusal("is text with a lone surrogate, which UTF-8 cannot hold", path, part) from None
        return b"\x02" + raw.replace(b"\x00", b"\x00\xff") + b"\x00"
    if isinstance(part, bytes):
        return b"\x01" + part.replace(b"\x00", b"\x00\xff") + b"\x00"
    raise _refusal("cannot be in a key; use int, str, bytes or a tuple of these", path, part)


def _pack_int(value: int, path: tuple[int, ...]) -> bytes:
    if 0 <= value < 256:
        return _SMALL_INTS[value]
    length = (value.bit_length() + 7) // 8
    if length > _INT_BYTES_MAX:
        raise _refusal("is outside -(2**64 - 1) to 2**64 - 1", path, value)
    if value > 0:
        return bytes([_ZERO + length]) + value.to_bytes(length, "big")
    return bytes([_ZERO - length]) + (value + (1 << (8 * length)) - 1).to_bytes(length, "big")


def _unpack_int(data: bytes, offset: int, code: int) -> tuple[int, int]:
    length = abs(code - _ZERO)
    end = offset + length
    if end > len(data):
        raise KeyDecodeError("key ends inside an integer", offset=offset)
    value = int.from_bytes(data[offset:end], "big")
    if code < _ZERO:
        value -= (1 << (8 * length)) - 1
    if (value.bit_length() + 7) // 8 != length:
        raise KeyDecodeError(f"integer {value} in {length} bytes, more than it needs, at byte {offset}", offset=offset)
    return value, end


def _unpack_escaped(data: bytes, offset: int) -> tuple[bytes, int]:
    """The content that starts at `offset`, and the offset after its terminator."""
    search = offset
    while True:
        end = data.find(b"\x00", search)
        if end < 0:
            raise KeyDecodeError("key ends inside text or bytes", offset=len(data))
        if data[end + 1 : end + 2] != b"\xff":
            return data[offset:end].replace(b"\x00\xff", b"\x00"), end + 1
        search = end + 2


def _unpack_text(raw: bytes, offset: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise KeyDecodeError(f"text that is not UTF-8 in a key at byte {offset}", offset=offset) from None


def _refusal(reason: str, path: tuple[int, ...], part: Any) -> KeyEncodeError:
    where = "key" + "".join(f"[{index}]" for index in path)
    type_name = type(part).__name__
    return KeyEncodeError(f"{where} ({type_name}) {reason}", path=where, type_name=type_name)
