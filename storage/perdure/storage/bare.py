"""BARE, the binary encoding of entries and metadata: a writer and a reader.

1. A value has one encoding. The reader refuses the others (an overlong `uint`, a `bool` other than 0 or 1), so that
   decoding and encoding again gives the same bytes.
2. The reader believes no length before it has compared it with the bytes that are left: damaged input costs an error,
   never memory.
3. The reader raises `BareDecodeError` and nothing else, whatever the bytes.
4. `finish` ends every read; bytes left over are an error, because a decoder that ignores them hides damage.

Both are plain classes with one method per BARE type. The rejected alternative, an interpreter of schema
descriptions, puts a dispatch per field into the replay path and is harder to read than the ten structs it would serve.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from struct import error as StructError
from typing import Final, TypeVar

from perdure.storage.errors import DecodeError, EncodeError

__all__ = ["UINT_MAX", "BareDecodeError", "BareEncodeError", "Reader", "Writer"]

_T = TypeVar("_T")

UINT_MAX: Final = 2**64 - 1
"""Largest BARE `uint`."""

_U16: Final = Struct("<H")
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")


class BareEncodeError(EncodeError):
    """A value does not fit its BARE type: out of range, of another Python type, or text that UTF-8 cannot hold."""


class BareDecodeError(DecodeError):
    """Bytes are not the BARE struct they should be. `offset` is where in them."""

    offset: int = 0


class Writer:
    """Appends BARE values to a buffer; `getvalue` returns it.

    Every method raises `BareEncodeError` for a value outside its type's range, and leaves the buffer as it was.
    """

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def getvalue(self) -> bytes:
        """What was written so far."""
        return bytes(self._buffer)

    def uint(self, value: int) -> None:
        """Variable-length unsigned integer (ULEB128), 0 to 2**64 - 1: a length, an enum or a union tag."""
        if 0 <= value < 0x80:
            self._buffer.append(value)
            return
        if not 0 <= value <= UINT_MAX:
            raise BareEncodeError(f"{value} is not an unsigned integer of at most 64 bits", type_name="uint")
        while value >= 0x80:
            self._buffer.append(value & 0x7F | 0x80)
            value >>= 7
        self._buffer.append(value)

    def u8(self, value: int) -> None:
        """One byte, 0 to 255."""
        if not 0 <= value <= 0xFF:
            raise BareEncodeError(f"{value} is not an unsigned integer of 8 bits", type_name="u8")
        self._buffer.append(value)

    def u16(self, value: int) -> None:
        """Two bytes, little-endian, 0 to 2**16 - 1."""
        self._packed(_U16, value)

    def u32(self, value: int) -> None:
        """Four bytes, little-endian, 0 to 2**32 - 1."""
        self._packed(_U32, value)

    def u64(self, value: int) -> None:
        """Eight bytes, little-endian, 0 to 2**64 - 1."""
        self._packed(_U64, value)

    def boolean(self, value: bool) -> None:
        """One byte, 0 or 1."""
        self._buffer.append(1 if value else 0)

    def string(self, value: str) -> None:
        """UTF-8 text after its length in bytes."""
        try:
            raw = value.encode()
        except UnicodeEncodeError:
            raise BareEncodeError("text holds a lone surrogate, which UTF-8 cannot hold", type_name="str") from None
        self.uint(len(raw))
        self._buffer += raw

    def data(self, value: bytes) -> None:
        """Bytes after their length."""
        self.uint(len(value))
        self._buffer += value

    def optional(self, write: Callable[[_T], None], value: _T | None) -> None:
        """A byte 0 for `None`, otherwise a byte 1 and the value, written with `write` (a method of this writer)."""
        if value is None:
            self._buffer.append(0)
        else:
            self._buffer.append(1)
            write(value)

    def tag(self, value: int) -> None:
        """The number of an enum member or of a union's alternative."""
        self.uint(value)

    def list_len(self, value: int) -> None:
        """The number of items of a list, or of pairs of a map; the items follow."""
        self.uint(value)

    def _packed(self, packing: Struct, value: int) -> None:
        try:
            self._buffer += packing.pack(value)
        except StructError:
            bits = packing.size * 8
            raise BareEncodeError(f"{value} is not an unsigned integer of {bits} bits", type_name=f"u{bits}") from None


class Reader:
    """Takes BARE values from bytes, in order.

    Every method raises `BareDecodeError` when the bytes end too early or are not the canonical encoding of its type.
    """

    __slots__ = ("_data", "_offset", "_size")

    def __init__(self, data: bytes, offset: int = 0) -> None:
        self._data = data
        self._offset = offset
        self._size = len(data)

    @property
    def offset(self) -> int:
        """Where the next value starts, in bytes."""
        return self._offset

    def finish(self) -> None:
        """Check that every byte was read."""
        if self._offset != self._size:
            raise self.failure(f"{self._size - self._offset} bytes left over")

    def failure(self, reason: str) -> BareDecodeError:
        """An error that names the current offset, for a caller that finds a value it cannot accept."""
        return BareDecodeError(f"{reason} at byte {self._offset} of {self._size}", offset=self._offset)

    def uint(self) -> int:
        """Variable-length unsigned integer (ULEB128) of at most 64 bits, in as few bytes as it needs."""
        data, offset, size = self._data, self._offset, self._size
        if offset < size and (byte := data[offset]) < 0x80:
            self._offset = offset + 1
            return byte
        value = 0
        for shift in range(0, 70, 7):
            if offset == size:
                raise self.failure("input ends inside an integer")
            byte = data[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise self.failure("integer in more bytes than it needs")
                if value > UINT_MAX:
                    break
                self._offset = offset
                return value
        raise self.failure("integer of more than 64 bits")

    def u8(self) -> int:
        """One byte."""
        offset = self._advance(1)
        return self._data[offset]

    def u16(self) -> int:
        """Two bytes, little-endian."""
        offset = self._advance(2)
        return int(_U16.unpack_from(self._data, offset)[0])

    def u32(self) -> int:
        """Four bytes, little-endian."""
        offset = self._advance(4)
        return int(_U32.unpack_from(self._data, offset)[0])

    def u64(self) -> int:
        """Eight bytes, little-endian."""
        offset = self._advance(8)
        return int(_U64.unpack_from(self._data, offset)[0])

    def boolean(self) -> bool:
        """One byte, 0 or 1."""
        value = self.u8()
        if value > 1:
            self._offset -= 1
            raise self.failure(f"byte 0x{value:02x} where 0 or 1 was expected")
        return value == 1

    def string(self) -> str:
        """UTF-8 text after its length in bytes."""
        start = self._offset
        raw = self.data()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._offset = start
            raise self.failure("text that is not UTF-8") from None

    def data(self) -> bytes:
        """Bytes after their length."""
        length = self.uint()
        offset = self._advance(length)
        return self._data[offset : offset + length]

    def optional(self, read: Callable[[], _T]) -> _T | None:
        """`None` for a byte 0; after a byte 1 what `read` (a method of this reader) gives."""
        return read() if self.boolean() else None

    def tag(self, count: int) -> int:
        """The number of an enum member or of a union's alternative, below `count`."""
        start = self._offset
        value = self.uint()
        if value >= count:
            self._offset = start
            raise self.failure(f"tag {value} where there are only {count}")
        return value

    def list_len(self, item_bytes_min: int = 1) -> int:
        """The number of items of a list or pairs of a map, checked against the bytes left.

        Args:
            item_bytes_min: Fewest bytes that one item takes, at least 1.
        """
        start = self._offset
        value = self.uint()
        if value * item_bytes_min > self._size - self._offset:
            self._offset = start
            raise self.failure(f"{value} items claimed, more than the remaining bytes can hold")
        return value

    def _advance(self, count: int) -> int:
        """Step over `count` bytes that must be there; the offset before them."""
        offset = self._offset
        if count > self._size - offset:
            raise self.failure(f"{count} bytes needed, only {self._size - offset} left")
        self._offset = offset + count
        return offset
