"""Keys: worked examples in hex, and what is refused. Order and round trips over all keys are in tests/property."""

from __future__ import annotations

import pickle
from enum import IntEnum

import pytest

from perdure.storage.keys import KEY_NESTING_MAX, KeyDecodeError, KeyEncodeError, KeyPart, pack, prefix_end, unpack

EXAMPLES: list[tuple[tuple[KeyPart, ...], str]] = [
    ((), ""),
    ((0,), "14"),
    ((1,), "1501"),
    ((255,), "15ff"),
    ((256,), "160100"),
    ((65_535,), "16ffff"),
    ((65_536,), "17010000"),
    ((2**32 - 1,), "18ffffffff"),
    ((2**64 - 1,), "1cffffffffffffffff"),
    ((-1,), "13fe"),
    ((-255,), "1300"),
    ((-256,), "12feff"),
    ((-(2**64 - 1),), "0c0000000000000000"),
    (("",), "0200"),
    (("a",), "026100"),
    (("a\x00b",), "026100ff6200"),
    (("é",), "02c3a900"),
    ((b"",), "0100"),
    ((b"\x00\xff",), "0100ffff00"),
    (((),), "0500"),
    (((0, 3),), "0514150300"),
    ((((1,), "x"),), "050515010002780000"),
    ((2, 0, (0, 14), 1), "1502140514150e001501"),
    ((4, "e3"), "150402653300"),
]


@pytest.mark.parametrize(("parts", "packed"), EXAMPLES, ids=[packed or "empty" for _, packed in EXAMPLES])
def test_examples_pack_and_unpack(parts: tuple[KeyPart, ...], packed: str) -> None:
    assert pack(parts).hex() == packed
    assert unpack(bytes.fromhex(packed)) == parts


def test_int_enum_members_are_integers() -> None:
    class Prefix(IntEnum):
        HISTORY = 2

    assert pack((Prefix.HISTORY, (Prefix.HISTORY,))) == pack((2, (2,)))


@pytest.mark.parametrize("part", [True, None, 1.5, [1], bytearray(b"a"), {1}, (1, False)])
def test_parts_of_other_types_are_refused(part: object) -> None:
    with pytest.raises(KeyEncodeError, match=r"use int, str, bytes or a tuple"):
        pack((1, part))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [2**64, -(2**64)])
def test_integers_over_64_bits_are_refused(number: int) -> None:
    with pytest.raises(KeyEncodeError, match="outside"):
        pack((number,))


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(KeyEncodeError, match="lone surrogate"):
        pack(("\ud800",))


def test_refusal_names_place_and_type_and_pickles() -> None:
    with pytest.raises(KeyEncodeError) as raised:
        pack((1, (2, (3, 1.5))))  # type: ignore[arg-type]
    assert (raised.value.path, raised.value.type_name) == ("key[1][1][1]", "float")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.path, copy.type_name, str(copy)) == ("key[1][1][1]", "float", str(raised.value))


def nest(depth: int) -> tuple[KeyPart, ...]:
    part: tuple[KeyPart, ...] = ()
    for _ in range(depth):
        part = (part,)
    return part


def test_nesting_reaches_its_limit_both_ways() -> None:
    parts = nest(KEY_NESTING_MAX)
    assert unpack(pack(parts)) == parts


def test_deeper_nesting_is_refused_both_ways_without_recursion() -> None:
    with pytest.raises(KeyEncodeError, match="over 100 deep"):
        pack(nest(KEY_NESTING_MAX + 1))
    with pytest.raises(KeyEncodeError, match="over 100 deep"):
        pack(nest(100_000))
    with pytest.raises(KeyDecodeError, match="over 100 deep"):
        unpack(b"\x05" * (KEY_NESTING_MAX + 1) + b"\x00" * (KEY_NESTING_MAX + 1))
    with pytest.raises(KeyDecodeError, match="over 100 deep"):
        unpack(b"\x05" * 1_000_000)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        ("1500", "more than it needs"),
        ("160001", "more than it needs"),
        ("1c00ffffffffffffff", "more than it needs"),
        ("13ff", "more than it needs"),
        ("12ffff", "more than it needs"),
        ("12ff00", "more than it needs"),
        ("15", "ends inside an integer"),
        ("1c00", "ends inside an integer"),
        ("0261", "ends inside text"),
        ("0100ff", "ends inside text"),
        ("02ff00", "not UTF-8"),
        ("02eda08000", "not UTF-8"),
        ("02c08000", "not UTF-8"),
        ("05", "ends inside a nested tuple"),
        ("0500ff00", "null inside a tuple"),
        ("00", "unknown type code 0x00"),
        ("1501ff", "unknown type code 0xff"),
        ("0b00", "unknown type code 0x0b"),
        ("1d00", "unknown type code 0x1d"),
        ("2180000000000000", "unknown type code 0x21"),
    ],
)
def test_bytes_that_no_tuple_packs_to_are_refused(packed: str, reason: str) -> None:
    with pytest.raises(KeyDecodeError, match=reason):
        unpack(bytes.fromhex(packed))


@pytest.mark.parametrize(
    ("prefix", "end"),
    [("1502", "1503"), ("15ff", "16"), ("00", "01"), ("61ffff", "62"), ("", None), ("ff", None), ("ffff", None)],
)
def test_prefix_end_is_the_next_key_after_the_prefix(prefix: str, end: str | None) -> None:
    found = prefix_end(bytes.fromhex(prefix))
    assert (None if found is None else found.hex()) == end
