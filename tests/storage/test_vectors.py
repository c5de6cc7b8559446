"""The reference engine's stored bytes: all of them decode, and encode again to the same.

`tests/vectors` holds whole dumps of its namespaces at every stop of every scenario. Resuming them is the engine's part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from perdure.storage import layout
from perdure.storage.keys import pack, unpack
from perdure.storage.schema import (
    Entry,
    JoinEntry,
    LoopEntry,
    MessageEntry,
    RaceEntry,
    StepEntry,
    decode_entry,
    decode_metadata,
    encode_entry,
    encode_metadata,
)
from perdure.storage.values import decode_value, encode_value

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
NAMES = sorted(path.stem for path in VECTORS.glob("*.json"))
each_stop = pytest.mark.parametrize(
    ("name", "stop"),
    [(name, stop) for name in NAMES for stop in range(len(json.loads((VECTORS / f"{name}.json").read_text())))],
)


def dump(name: str, stop: int) -> dict[bytes, bytes]:
    stops = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in stops[stop]["kv"]}


def entries(name: str, stop: int) -> Iterator[tuple[bytes, Entry]]:
    for key, value in dump(name, stop).items():
        if key.startswith(layout.HISTORY_PREFIX):
            yield value, decode_entry(value)


def user_values(name: str, stop: int) -> Iterator[bytes]:
    """Everything stored as CBOR: input, output and error of the workflow, and what its entries hold."""
    stored = dump(name, stop)
    yield from (stored[key] for key in (layout.INPUT_KEY, layout.OUTPUT_KEY, layout.ERROR_KEY) if key in stored)
    for _, entry in entries(name, stop):
        match entry.kind:
            case StepEntry(output=bytes() as output):
                yield output
            case LoopEntry(state=state, output=output):
                yield from (state,) if output is None else (state, output)
            case MessageEntry(body=body):
                yield body
            case JoinEntry(branches=branches) | RaceEntry(branches=branches):
                yield from (branch.output for branch in branches.values() if branch.output is not None)
            case _:
                pass


def test_the_vectors_are_all_here() -> None:
    assert (
        sorted(
            [
                "order",
                "retry",
                "sleep",
                "loop",
                "loopdone",
                "join",
                "race",
                "rollback",
                "migrate",
                "values",
                "tried",
                "errmeta",
            ]
        )
        == NAMES
    )


@each_stop
def test_keys_round_trip_and_are_all_known(name: str, stop: int) -> None:
    """S16: every key packs to the same bytes and is one that the layout names."""
    stored = dump(name, stop)
    assert stored
    assert list(stored) == sorted(stored)
    workflow = {layout.STATE_KEY, layout.OUTPUT_KEY, layout.ERROR_KEY, layout.INPUT_KEY}
    for key in stored:
        assert pack(unpack(key)) == key
        match unpack(key)[0]:
            case 1:
                assert layout.name_key(layout.parse_name_key(key)) == key
            case 2:
                assert layout.entry_key(layout.parse_entry_key(key)) == key
            case 3:
                assert key in workflow
            case _:
                assert layout.metadata_key(layout.parse_metadata_key(key)) == key


@each_stop
def test_entries_encode_to_the_same_bytes(name: str, stop: int) -> None:
    """S16: entries re-encode byte for byte, and lie at their own location."""
    stored = dump(name, stop)
    for data, entry in entries(name, stop):
        assert encode_entry(entry) == data
        assert stored[layout.entry_key(entry.location)] == data


@each_stop
def test_metadata_encodes_to_the_same_bytes_and_belongs_to_steps_and_loops(name: str, stop: int) -> None:
    """S16: metadata re-encodes byte for byte; exactly steps and loops have some."""
    stored = dump(name, stop)
    ids = {layout.parse_metadata_key(key) for key in stored if key.startswith(layout.METADATA_PREFIX)}
    for entry_id in ids:
        data = stored[layout.metadata_key(entry_id)]
        assert encode_metadata(decode_metadata(data)) == data
    kinds = {entry.id: entry.kind for _, entry in entries(name, stop)}
    assert {entry_id for entry_id, kind in kinds.items() if isinstance(kind, StepEntry | LoopEntry)} >= ids
    assert all(isinstance(kinds[entry_id], StepEntry | LoopEntry) for entry_id in ids)


@each_stop
def test_user_values_keep_their_value_and_plain_ones_their_bytes(name: str, stop: int) -> None:
    """S16: every user value comes back the same from our encoding, which is byte-equal where no map is involved."""
    found = list(user_values(name, stop))
    assert found
    for data in found:
        value = decode_value(data)
        encoded = encode_value(value)
        assert repr(decode_value(encoded)) == repr(value)
        if not holds_map_or_bytes(value):
            assert encoded == (b"\xf6" if data == b"\xf7" else data)


def holds_map_or_bytes(value: Any) -> bool:
    """Whether the reference spells this differently: maps with 16-bit lengths, and byte arrays under a tag."""
    if isinstance(value, list | set):
        return any(holds_map_or_bytes(item) for item in value)
    return isinstance(value, dict | bytes)


def test_values_of_every_javascript_type_come_back_as_pythons() -> None:
    """S16: the recorded outputs of the `values` workflow, by name."""
    stored = dump("values", 0)
    outputs: dict[str, object] = {}
    for _, entry in entries("values", 0):
        assert isinstance(entry.kind, StepEntry)
        name = stored[layout.name_key(entry.location[0])].decode()  # type: ignore[arg-type]
        outputs[name] = None if entry.kind.output is None else decode_value(entry.kind.output)
    assert repr(outputs.pop("nan")) == "[nan, inf, -inf, 0, 0.1, 1e+300]"
    assert outputs == {
        "undefined": None,
        "null": None,
        "bigint": 123456789012345678901234567890,
        "date": datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC),
        "set": {1, 2, 3},
        "map": {"k": 1, 2: "v"},
        "long": "x" * 300,
    }


def test_input_with_every_plain_type_comes_back() -> None:
    """S16: text, numbers, bytes and nesting of the `values` workflow's input."""
    assert decode_value(dump("values", 0)[layout.INPUT_KEY]) == {
        "text": "héllo ✓ 漢字 🎉",
        "int": 42,
        "neg": -7,
        "big": 9007199254740991.0,
        "float": 1.5,
        "tiny": 5e-324,
        "yes": True,
        "no": False,
        "nil": None,
        "list": [1, [2, [3]]],
        "bytes": b"\x00\x01\xff",
        "nested": {"a": {"b": {"c": []}}},
        "empty": {},
    }
