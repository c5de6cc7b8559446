"""The layout: every key in hex, parsers that take their own keys only, and ranges."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.storage import layout
from perdure.storage.keys import KeyDecodeError, KeyEncodeError, pack, prefix_end
from perdure.storage.layout import (
    NumberDecodeError,
    NumberEncodeError,
    decode_u64,
    dedup_key,
    detail_key,
    encode_u64,
    entry_key,
    loop_iterations_range,
    loop_start_key,
    message_key,
    metadata_key,
    name_key,
    parse_dedup_key,
    parse_detail_key,
    parse_entry_key,
    parse_loop_start_key,
    parse_message_key,
    parse_metadata_key,
    parse_name_key,
)
from perdure.storage.schema import LoopIteration


def test_fixed_keys_never_change() -> None:
    fixed = {name: getattr(layout, name).hex() for name in layout.__all__ if name.endswith(("_KEY", "_PREFIX"))}
    assert fixed == {
        "NAMES_PREFIX": "1501",
        "HISTORY_PREFIX": "1502",
        "WORKFLOW_PREFIX": "1503",
        "METADATA_PREFIX": "1504",
        "OWN_PREFIX": "1520",
        "MAILBOX_PREFIX": "1521",
        "DEDUP_PREFIX": "1522",
        "DETAIL_PREFIX": "1523",
        "LOOP_START_PREFIX": "1524",
        "REPLIES_PREFIX": "1525",
        "REPLY_PREFIX": "15251502",
        "REQUEST_PREFIX": "15251501",
        "REQUEST_OPEN_PREFIX": "1525150114",
        "REQUEST_ANSWERED_PREFIX": "152515011501",
        "CALLS_PREFIX": "1526",
        "SENT_PREFIX": "1527",
        "STATE_KEY": "15031501",
        "OUTPUT_KEY": "15031502",
        "ERROR_KEY": "15031503",
        "INPUT_KEY": "15031504",
        "WORKFLOW_ID_KEY": "15201501",
        "WORKFLOW_TYPE_KEY": "15201502",
        "ALARM_KEY": "15201503",
        "IDLE_ACTIVATIONS_KEY": "15201504",
        "COMPLETION_SEQUENCE_KEY": "15201505",
        "SEED_KEY": "15201506",
        "MAILBOX_SEQUENCE_KEY": "15201507",
        "ATTRIBUTES_KEY": "15201508",
        "PARENT_KEY": "15201509",
        "FAILURE_CAUSES_KEY": "1520150a",
        "FORMAT_VERSION_KEY": "1520150b",
        "PASSABLE_KEY": "1520150c",
        "CODEC_KEY": "15201512",
        "DEADLINE_KEY": "1520150d",
        "DUTIES_KEY": "1520150e",
        "GENERATION_KEY": "1520150f",
        "JOINERS_KEY": "15201510",
        "CREATED_AT_KEY": "15201511",
    }


def test_built_keys_never_change() -> None:
    assert name_key(0).hex() == "150114"
    assert entry_key((0, LoopIteration(0, 14), 1)).hex() == "1502140514150e001501"
    assert metadata_key("a").hex() == "1504026100"
    assert message_key(256).hex() == "1521160100"
    assert message_key(-1).hex() == "152113fe"
    assert dedup_key("a").hex() == "1522026100"
    assert detail_key("a").hex() == "1523026100"
    assert loop_start_key("a", 3).hex() == "15240261001503"


@pytest.mark.parametrize(
    ("parse", "key", "value"),
    [
        (parse_name_key, name_key(2**32 - 1), 2**32 - 1),
        (parse_entry_key, entry_key((0,)), (0,)),
        (parse_entry_key, entry_key((5, LoopIteration(5, 2**32 - 1), 0)), (5, LoopIteration(5, 2**32 - 1), 0)),
        (parse_metadata_key, metadata_key("ä\x00/~:"), "ä\x00/~:"),
        (parse_message_key, message_key(2**64 - 1), 2**64 - 1),
        (parse_message_key, message_key(-1), -1),
        (parse_message_key, message_key(-(2**63)), -(2**63)),
        (parse_dedup_key, dedup_key(""), ""),
        (parse_detail_key, detail_key("x"), "x"),
        (parse_loop_start_key, loop_start_key("x", 2**32 - 1), ("x", 2**32 - 1)),
    ],
)
def test_parsers_undo_builders(parse: Callable[[bytes], object], key: bytes, value: object) -> None:
    assert parse(key) == value


def test_parsed_iterations_are_named() -> None:
    segment = parse_entry_key(entry_key((5, LoopIteration(5, 6))))[1]
    assert isinstance(segment, LoopIteration)
    assert segment.iteration == 6


PARSERS: dict[str, Callable[[bytes], object]] = {
    "name": parse_name_key,
    "entry": parse_entry_key,
    "metadata": parse_metadata_key,
    "message": parse_message_key,
    "dedup": parse_dedup_key,
    "detail": parse_detail_key,
}
KEYS = {
    "name": name_key(0),
    "entry": entry_key((0, 1)),
    "metadata": metadata_key("a"),
    "message": message_key(1),
    "dedup": dedup_key("a"),
    "detail": detail_key("a"),
    "state": layout.STATE_KEY,
    "loop start": loop_start_key("a", 1),
}


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("key", KEYS)
def test_parsers_take_their_own_keys_only(parser: str, key: str) -> None:
    parse = PARSERS[parser]
    if parser == key:
        assert parse(KEYS[key]) is not None
    else:
        with pytest.raises(KeyDecodeError):
            parse(KEYS[key])


@pytest.mark.parametrize(
    ("parse", "key"),
    [
        (parse_name_key, pack((1,))),
        (parse_name_key, pack((1, -1))),
        (parse_name_key, pack((1, 2**32))),
        (parse_name_key, pack((1, "0"))),
        (parse_name_key, pack((1, 0, 0))),
        (parse_entry_key, pack((2,))),
        (parse_entry_key, pack((2, -1))),
        (parse_entry_key, pack((2, "a"))),
        (parse_entry_key, pack((2, (0,)))),
        (parse_entry_key, pack((2, (0, 1, 2)))),
        (parse_entry_key, pack((2, (0, 2**32)))),
        (parse_entry_key, pack((2, (0, (1,))))),
        (parse_metadata_key, pack((4, 1))),
        (parse_metadata_key, pack((4, b"a"))),
        (parse_message_key, pack((33, -(2**63) - 1))),
        (parse_message_key, pack((33, "1"))),
        (parse_dedup_key, pack((34, 1))),
        (parse_detail_key, pack((35, 1))),
        (parse_name_key, b""),
        (parse_name_key, b"\xff"),
        (parse_entry_key, b"\x15\x02\x15"),
    ],
)
def test_malformed_keys_are_refused(parse: Callable[[bytes], object], key: bytes) -> None:
    with pytest.raises(KeyDecodeError):
        parse(key)


def test_loop_range_covers_its_iterations_and_nothing_else() -> None:
    def inside(iteration: int) -> list[bytes]:
        segment = LoopIteration(1, iteration)
        return [entry_key((0, 1, segment, *rest)) for rest in ((0,), (2**32 - 1,), (9, LoopIteration(9, 7), 3))]

    start, end = loop_iterations_range((0, 1), 3, 300)
    for iteration in (3, 4, 254, 255, 256, 299):
        assert all(start <= key < end for key in inside(iteration))
    for iteration in (0, 2, 300, 301, 2**32 - 1):
        assert not any(start <= key < end for key in inside(iteration))
    others = [entry_key((0, 1)), entry_key((0, 0)), entry_key((0, 2)), entry_key((0, 2, LoopIteration(2, 5), 0))]
    assert not any(start <= key < end for key in others)


def test_loop_range_may_be_empty_and_may_reach_the_last_iteration() -> None:
    start, end = loop_iterations_range((1,), 5, 5)
    assert start == end
    start, end = loop_iterations_range((1,), 0, 2**32)
    assert start < entry_key((1, LoopIteration(1, 2**32 - 1), 0)) < end


@pytest.mark.parametrize("location", [(), (LoopIteration(0, 1),), (0, LoopIteration(0, 1))])
def test_loop_range_needs_the_location_of_a_loop(location: layout.Location) -> None:
    with pytest.raises(KeyEncodeError, match="must end in a name index"):
        loop_iterations_range(location, 0, 1)


@pytest.mark.parametrize(("first", "after"), [(-1, 1), (2, 1), (0, 2**32 + 1)])
def test_loop_range_needs_an_ascending_range(first: int, after: int) -> None:
    with pytest.raises(KeyEncodeError, match="ascending range"):
        loop_iterations_range((0,), first, after)


def test_entry_key_is_the_prefix_of_what_is_below_it() -> None:
    parent = entry_key((1, 2))
    assert entry_key((1, 2, 0)).startswith(parent)
    assert entry_key((1, 2, LoopIteration(2, 0), 5)).startswith(parent)
    assert not entry_key((1, 513)).startswith(parent)
    end = prefix_end(parent)
    assert end is not None
    assert entry_key((1, 2, 2**32 - 1)) < end <= entry_key((1, 3))


@pytest.mark.parametrize(
    ("value", "data"),
    [(0, "0000000000000000"), (1, "0100000000000000"), (2**64 - 1, "ff" * 8), (258, "0201" + "00" * 6)],
)
def test_numbers_are_eight_bytes_little_endian(value: int, data: str) -> None:
    assert encode_u64(value).hex() == data
    assert decode_u64(bytes.fromhex(data)) == value


@pytest.mark.parametrize("value", [-1, 2**64])
def test_numbers_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(NumberEncodeError):
        encode_u64(value)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\x00" * 9])
def test_numbers_of_other_lengths_are_refused(data: bytes) -> None:
    with pytest.raises(NumberDecodeError):
        decode_u64(data)
