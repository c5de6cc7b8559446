"""Details: what the engine writes is read; a field of another shape is damage; a field of a newer Perdure is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.storage import DecodeError, encode_value
from perdure.storage.schema import MessageEntry
from perdure.workflow.details import decode_detail
from perdure.workflow.reads import decode_count, decode_read

CALL = {"workflow": "order", "child": "o-1"}


@pytest.mark.parametrize(
    "detail",
    [
        {},
        {"kind": "exhausted", "error": {"name": "ValueError", "message": "no"}},
        {"completed": 3, "undone": 1, "rollback_attempts": 2, "rollback_last_ms": 1_700_000_000_000},
        {"sequence": -5},
        {"sequence": None},
        {"sleep": True},
        {"call": CALL | {"given": True, "fresh": 2, "failure": "cycle", "chain": ["a", "b"]}},
        {"branches": {"x": {"error": {"name": "E"}, "causes": ["id"]}}},
        {"of a newer Perdure": [1, {"any": "shape"}]},
    ],
    ids=repr,
)
def test_what_is_written_is_read(detail: dict[str, Any]) -> None:
    assert decode_detail(encode_value(detail), "entry-1") == detail


@pytest.mark.parametrize(
    "damaged",
    [
        [],
        None,
        {"kind": "unheard of"},
        {"kind": ["exhausted"]},
        {"completed": -1},
        {"completed": True},
        {"undone": "once"},
        {"rollback_attempts": 1.5},
        {"rollback_last_ms": 2**64},
        {"sequence": -(2**63) - 1},
        {"sleep": "yes"},
        {"call": "o-1"},
        {"call": {"workflow": "order"}},
        {"call": CALL | {"child": ""}},
        {"call": CALL | {"given": 1}},
        {"call": CALL | {"chain": [1]}},
        {"branches": []},
        {"branches": {"x": "no"}},
        {"branches": {"x": {"causes": "id"}}},
    ],
    ids=repr,
)
def test_another_shape_is_damage_of_the_entry(damaged: object) -> None:
    """S41"""
    with pytest.raises(DecodeError, match="entry-1"):
        decode_detail(encode_value(damaged), "entry-1")


@pytest.mark.parametrize("count", [-1, 2**32, 1.5, float("nan"), float("inf"), True, "1", None, [1]], ids=repr)
def test_a_count_of_messages_that_is_none_is_damage(count: object) -> None:
    """S41: 2**62 of them would be looked for one by one."""
    with pytest.raises(DecodeError, match="q:count"):
        decode_count(MessageEntry("q:count", encode_value(count)), "q:count")


@pytest.mark.parametrize(("count", "number"), [(0, 0), (3, 3), (2.0, 2)])
def test_a_count_may_be_written_as_javascript_does(count: object, number: int) -> None:
    assert decode_count(MessageEntry("q:count", encode_value(count)), "q:count") == number


@pytest.mark.parametrize("created_at", ["now", None, True, float("nan"), float("-inf"), 1e300, []], ids=repr)
def test_a_message_without_a_time_is_damage(created_at: object) -> None:
    """S41"""
    body = encode_value({"id": "m", "name": "go", "body": 1, "createdAt": created_at, "completed": False})
    with pytest.raises(DecodeError, match="q:0"):
        decode_read(MessageEntry("go", body), "q:0")
