"""What a rebuilt catalog says, decided from a few keys of each workflow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage.attributes import encode_attributes
from perdure.storage.errors import DecodeError
from perdure.storage.layout import (
    ALARM_KEY,
    ATTRIBUTES_KEY,
    CREATED_AT_KEY,
    PARENT_KEY,
    STATE_KEY,
    WORKFLOW_ID_KEY,
    WORKFLOW_TYPE_KEY,
    encode_u64,
)
from perdure.storage.rebuild import ROW_KEYS, rebuild_row
from perdure.storage.store import CatalogRow
from perdure.storage.values import encode_value


def pairs(state: str | None, alarm: int | None = None) -> dict[bytes, bytes]:
    found = {WORKFLOW_ID_KEY: b"order-1", WORKFLOW_TYPE_KEY: b"order"}
    if state is not None:
        found[STATE_KEY] = state.encode()
    if alarm is not None:
        found[ALARM_KEY] = encode_u64(alarm)
    return found


@pytest.mark.parametrize(
    ("state", "alarm", "mail", "wake"),
    [
        (None, None, False, 0),
        ("", None, False, 0),
        ("pending", None, False, 0),
        ("pending", 50, False, 50),
        ("pending", 50, True, 50),
        ("running", None, False, 0),
        ("running", 50, True, 0),
        ("rolling_back", None, False, 0),
        ("rolling_back", 50, True, 50),
        ("sleeping", 50, False, 50),
        ("sleeping", None, False, None),
        ("sleeping", 50, True, 0),
        ("sleeping", None, True, 0),
        ("sleeping", 2**64 - 1, False, 2**64 - 1),
        ("completed", None, False, None),
        ("completed", 50, True, None),
        ("failed", 50, False, None),
        ("cancelled", 50, True, None),
        ("a state of tomorrow", 50, False, 0),
    ],
)
def test_when_a_workflow_is_woken(state: str | None, alarm: int | None, mail: bool, wake: int | None) -> None:
    """S50: what was active is due at once, what sleeps at its alarm, what ended never."""
    row = rebuild_row(pairs(state, alarm), mail_waiting=mail, created_at_ms=1, updated_at_ms=2)
    assert row == CatalogRow("order-1", "order", state or "pending", wake, mail, 1, 2)


def test_a_workflow_says_itself_when_it_was_made_what_it_is_found_by_and_who_called_it() -> None:
    """S50: none of it is in the catalog alone."""
    found = pairs("running") | {
        CREATED_AT_KEY: encode_u64(77),
        ATTRIBUTES_KEY: encode_attributes({"customer": 7, "is_new": True}),
        PARENT_KEY: encode_value({"id": "order-0", "more": 1}),
    }
    row = rebuild_row(found, mail_waiting=False, created_at_ms=1, updated_at_ms=2)
    assert row == CatalogRow(
        "order-1", "order", "running", 0, False, 77, 2, None, {"customer": 7, "is_new": True}, "order-0"
    )


def test_a_namespace_without_an_id_names_no_workflow() -> None:
    assert rebuild_row({}, mail_waiting=False, created_at_ms=1, updated_at_ms=2) is None
    assert rebuild_row({STATE_KEY: b"running"}, mail_waiting=True, created_at_ms=1, updated_at_ms=2) is None


@given(
    st.dictionaries(
        st.sampled_from(ROW_KEYS),
        st.binary(max_size=12),
    ),
    st.booleans(),
)
def test_any_bytes_give_a_row_or_the_one_error(found: dict[bytes, bytes], mail: bool) -> None:
    try:
        row = rebuild_row(found, mail_waiting=mail, created_at_ms=1, updated_at_ms=2)
    except DecodeError:
        return
    assert (row is None) == (WORKFLOW_ID_KEY not in found)
