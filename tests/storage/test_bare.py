"""BARE: every type in hex, and every way in which bytes can fail to be one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from perdure.storage.bare import UINT_MAX, BareDecodeError, BareEncodeError, Reader, Writer
from perdure.storage.errors import DecodeError, EncodeError


def written(write: Callable[[Writer], None]) -> str:
    writer = Writer()
    write(writer)
    return writer.getvalue().hex()


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (2**32 - 1, "ffffffff0f"),
        (UINT_MAX, "ffffffffffffffffff01"),
    ],
)
def test_uint_examples(value: int, encoded: str) -> None:
    assert written(lambda w: w.uint(value)) == encoded
    reader = Reader(bytes.fromhex(encoded))
    assert reader.uint() == value
    reader.finish()


@pytest.mark.parametrize(
    ("name", "value", "encoded"),
    [
        ("u8", 254, "fe"),
        ("u16", 0xFEDC, "dcfe"),
        ("u32", 1, "01000000"),
        ("u64", 2**63, "0000000000000080"),
        ("boolean", True, "01"),
        ("boolean", False, "00"),
        ("string", "é", "02c3a9"),
        ("string", "", "00"),
        ("data", b"\x00\x01", "020001"),
    ],
)
def test_plain_types(name: str, value: object, encoded: str) -> None:
    assert written(lambda w: getattr(w, name)(value)) == encoded
    reader = Reader(bytes.fromhex(encoded))
    assert getattr(reader, name)() == value
    reader.finish()


def test_optional_tag_and_list() -> None:
    def write(writer: Writer) -> None:
        writer.optional(writer.string, None)
        writer.optional(writer.string, "a")
        writer.tag(2)
        writer.list_len(2)
        writer.u8(7)
        writer.u8(8)

    encoded = written(write)
    assert encoded == "00" + "010161" + "02" + "020708"
    reader = Reader(bytes.fromhex(encoded))
    assert [reader.optional(reader.string), reader.optional(reader.string)] == [None, "a"]
    assert reader.tag(3) == 2
    assert [reader.u8() for _ in range(reader.list_len())] == [7, 8]
    reader.finish()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uint", -1),
        ("uint", 2**64),
        ("u8", 256),
        ("u8", -1),
        ("u16", 2**16),
        ("u32", 2**32),
        ("u32", -1),
        ("u64", 2**64),
        ("tag", -1),
        ("list_len", 2**64),
        ("string", "\ud800"),
    ],
)
def test_values_out_of_range_are_refused_and_write_nothing(name: str, value: object) -> None:
    writer = Writer()
    with pytest.raises(BareEncodeError) as raised:
        getattr(writer, name)(value)
    assert isinstance(raised.value, EncodeError)
    assert writer.getvalue() == b""


@pytest.mark.parametrize(
    ("name", "encoded", "reason"),
    [
        ("uint", "", "ends inside an integer"),
        ("uint", "80", "ends inside an integer"),
        ("uint", "ffffffffffffffffff", "ends inside an integer"),
        ("uint", "8000", "more bytes than it needs"),
        ("uint", "ff8000", "more bytes than it needs"),
        ("uint", "80808080808080808000", "more bytes than it needs"),
        ("uint", "ffffffffffffffffff02", "more than 64 bits"),
        ("uint", "ffffffffffffffffff7f", "more than 64 bits"),
        ("uint", "ffffffffffffffffffff01", "more than 64 bits"),
        ("u8", "", "1 bytes needed"),
        ("u16", "00", "2 bytes needed"),
        ("u32", "000000", "4 bytes needed"),
        ("u64", "00000000000000", "8 bytes needed"),
        ("boolean", "02", "0 or 1 was expected"),
        ("string", "0261", "2 bytes needed, only 1 left"),
        ("string", "01ff", "not UTF-8"),
        ("string", "03eda080", "not UTF-8"),
        ("data", "ffffffffffffffffff01", "bytes needed, only 0 left"),
        ("list_len", "0200", "2 items claimed"),
    ],
)
def test_bytes_that_are_not_the_type_are_refused(name: str, encoded: str, reason: str) -> None:
    with pytest.raises(BareDecodeError, match=reason) as raised:
        getattr(Reader(bytes.fromhex(encoded)), name)()
    assert isinstance(raised.value, DecodeError)
    assert 0 <= raised.value.offset <= len(encoded) // 2


def test_tag_above_the_known_ones_is_refused() -> None:
    with pytest.raises(BareDecodeError, match="tag 3 where there are only 3"):
        Reader(b"\x03").tag(3)


def test_list_length_is_held_against_the_size_of_its_items() -> None:
    assert Reader(b"\x02" + bytes(10)).list_len(5) == 2
    with pytest.raises(BareDecodeError, match="more than the remaining bytes can hold"):
        Reader(b"\x02" + bytes(9)).list_len(5)


def test_bytes_left_over_are_refused() -> None:
    reader = Reader(b"\x01\x02")
    assert reader.u8() == 1
    with pytest.raises(BareDecodeError, match="1 bytes left over at byte 1 of 2"):
        reader.finish()


@pytest.mark.parametrize("name", ["data", "string", "list_len"])
def test_claimed_length_takes_no_memory(name: str) -> None:
    claims: list[Any] = [Reader(claim + b"\x01\x02") for claim in (b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f")]
    tracemalloc.start()
    try:
        for reader in claims:
            with pytest.raises(BareDecodeError):
                getattr(reader, name)()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000
