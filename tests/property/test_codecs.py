"""The codecs over generated input: order of keys, round trips, and decoders on damaged bytes.

1. The order that keys promise is stated here a second time, as a plain sort key, and compared.
2. A decoder given any bytes gives a value or a `DecodeError`. Damage is made from valid encodings, cut or with bits
   flipped, because arbitrary bytes hardly get past the first field.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategies import entries, messages, metadata, shape, text, u64, values

from perdure.storage.bare import Reader, Writer
from perdure.storage.errors import DecodeError
from perdure.storage.keys import KeyPart, pack, prefix_end, unpack
from perdure.storage.layout import (
    entry_key,
    parse_dedup_key,
    parse_entry_key,
    parse_message_key,
    parse_metadata_key,
    parse_name_key,
)
from perdure.storage.schema import (
    Entry,
    EntryMetadata,
    MailboxMessage,
    decode_entry,
    decode_message,
    decode_metadata,
    encode_entry,
    encode_message,
    encode_metadata,
)
from perdure.storage.value_encoder import _Encoding
from perdure.storage.values import decode_value, encode_value, round_trip

# Keys

edges = st.sampled_from(
    [sign * (1 << (8 * size)) + step for size in range(9) for sign in (1, -1) for step in (-1, 0, 1)]
)
key_integers = st.integers(-(2**64 - 1), 2**64 - 1) | edges.filter(lambda value: abs(value) < 2**64)
key_text = text | st.text(st.sampled_from("\x00\x01a\xff\uffff\U0001f389"), max_size=4)
key_bytes = st.binary(max_size=8) | st.lists(st.sampled_from([0, 1, 0xFE, 0xFF]), max_size=4).map(bytes)
key_parts: st.SearchStrategy[KeyPart] = st.recursive(
    key_integers | key_text | key_bytes, lambda parts: st.lists(parts, max_size=3).map(tuple), max_leaves=6
)
keys = st.lists(key_parts, max_size=4).map(tuple)


def order(part: KeyPart) -> tuple[int, Any]:
    """The promised order, said another way: by kind, then by value, tuples by their parts."""
    match part:
        case bytes():
            return (1, part)
        case str():
            return (2, [ord(character) for character in part])
        case tuple():
            return (5, [order(inner) for inner in part])
        case int():
            return (20, part)


@given(keys, keys)
def test_keys_sort_as_tuples_do(left: tuple[KeyPart, ...], right: tuple[KeyPart, ...]) -> None:
    assert (pack(left) < pack(right)) == (order(left) < order(right))
    assert (pack(left) == pack(right)) == (left == right)


@given(key_integers, key_integers)
def test_integer_keys_sort_as_integers_do(left: int, right: int) -> None:
    assert (pack((left,)) < pack((right,))) == (left < right)


@given(keys)
def test_keys_round_trip(key: tuple[KeyPart, ...]) -> None:
    assert unpack(pack(key)) == key


@given(keys, keys)
def test_packing_is_concatenative(left: tuple[KeyPart, ...], right: tuple[KeyPart, ...]) -> None:
    assert pack(left + right) == pack(left) + pack(right)


@given(keys, keys, st.binary(max_size=4))
def test_prefix_range_holds_what_starts_with_the_prefix(
    prefix: tuple[KeyPart, ...], other: tuple[KeyPart, ...], tail: bytes
) -> None:
    start = pack(prefix)
    end = prefix_end(start)
    for key in (pack(other), start + tail, start + b"\xff" * 3, pack(prefix + other)):
        assert (key >= start and (end is None or key < end)) == key.startswith(start)


@given(st.binary(max_size=40))
@example(b"\x05" * 200)
def test_a_key_has_one_spelling(data: bytes) -> None:
    try:
        key = unpack(data)
    except DecodeError:
        return
    assert pack(key) == data


# Entries, metadata, messages


@given(entries)
def test_entries_round_trip(entry: Entry) -> None:
    assert decode_entry(encode_entry(entry)) == entry
    if entry.location:
        assert parse_entry_key(entry_key(entry.location)) == entry.location


@given(metadata)
def test_metadata_round_trips(value: EntryMetadata) -> None:
    assert decode_metadata(encode_metadata(value)) == value


@given(messages)
def test_messages_round_trip(message: MailboxMessage) -> None:
    assert decode_message(encode_message(message)) == message


@given(u64)
def test_uint_round_trips(value: int) -> None:
    writer = Writer()
    writer.uint(value)
    reader = Reader(writer.getvalue())
    assert reader.uint() == value
    reader.finish()


# Values


@given(values)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_values_come_back_equal_in_value_and_type(value: object) -> None:
    """S8: for every storable value, first run and replay agree, and a second round trip changes nothing."""
    data, returned = round_trip(value)
    assert shape(returned) == shape(value)
    assert encode_value(returned) == data
    assert shape(decode_value(data)) == shape(returned)


@given(values)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_both_writers_of_values_agree(value: object) -> None:
    assert encode_value(value) == _Encoding("value", 1 << 20).encode(value)


# Damage

Decoder = Callable[[bytes], object]
DAMAGED: dict[str, tuple[st.SearchStrategy[bytes], list[Decoder]]] = {
    "keys": (
        keys.map(pack),
        [unpack, parse_name_key, parse_entry_key, parse_metadata_key, parse_message_key, parse_dedup_key],
    ),
    "entries": (entries.map(encode_entry), [decode_entry]),
    "metadata": (metadata.map(encode_metadata), [decode_metadata]),
    "messages": (messages.map(encode_message), [decode_message]),
    "values": (values.map(encode_value), [decode_value]),
}


def attempt(decode: Decoder, data: bytes) -> object:
    """What is decoded, or the refusal. Any other exception ends the test."""
    try:
        return decode(data)
    except DecodeError as refusal:
        return refusal


@pytest.mark.parametrize("kind", DAMAGED)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_decoders_raise_nothing_but_decode_errors(kind: str, data: st.DataObject) -> None:
    encoded, decoders = DAMAGED[kind]
    damaged = bytearray(data.draw(st.binary(max_size=60) | encoded))
    for place, bit in data.draw(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 7)), max_size=3)):
        if damaged:
            damaged[place % len(damaged)] ^= 1 << bit
    kept = bytes(damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged)
    for decode in decoders:
        assert shape(attempt(decode, kept)) == shape(attempt(decode, kept))


@given(entries, st.data())
def test_entries_have_one_spelling(entry: Entry, data: st.DataObject) -> None:
    damaged = bytearray(encode_entry(entry))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_entry(bytes(damaged))
    except DecodeError:
        return
    assert encode_entry(decoded) == damaged


@given(st.binary(max_size=30))
def test_whatever_is_read_as_a_value_can_be_stored_again(data: bytes) -> None:
    try:
        value = decode_value(data)
    except DecodeError:
        return
    assert shape(decode_value(encode_value(value))) == shape(value)


@pytest.mark.parametrize("decode", [decode_entry, decode_metadata, decode_message, decode_value, unpack])
@settings(max_examples=50)
@given(
    head=st.binary(max_size=6),
    claim=st.sampled_from(
        [b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x5a\xff\xff\xff\xff", b"\x9b\x00" + b"\xff" * 7]
    ),
)
def test_claimed_lengths_take_no_memory(decode: Decoder, head: bytes, claim: bytes) -> None:
    tracemalloc.start()
    try:
        for data in (head + claim, b"\x01\x00" + claim, b"\x01\x00\x00" + claim, claim + head):
            attempt(decode, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
