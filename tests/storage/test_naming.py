"""File names: any id, on any file system, without two ids meeting."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage.naming import (
    FileName,
    WorkflowIdError,
    check_workflow_id,
    file_name,
    is_unknown_id,
    name_stem,
    parse_file_name,
    unknown_id,
)


@pytest.mark.parametrize(
    ("workflow_id", "slug"),
    [
        ("order-123", "order-123-"),
        ("Order_123", "order-123-"),
        ("../x", "x-"),
        ("a/b\0c", "a-b-c-"),
        ("📦", ""),
        ("é", ""),
        ("x" * 10_000, "x" * 40 + "-"),
        ("a" * 39 + "/b", "a" * 39 + "--"),
    ],
)
def test_a_person_can_read_the_name(workflow_id: str, slug: str) -> None:
    """S44: nothing of an id but safe characters reaches the file system."""
    assert re.fullmatch(re.escape(slug) + "[0-9a-f]{32}", name_stem(workflow_id))


def test_the_name_is_fixed() -> None:
    """Names are on disk: this one never changes."""
    assert file_name("order-123", session=3, count=5) == (
        "order-123-4ee4025b3048b8f07a5c1a4228a424c0.0000000300000005.sqlite"
    )


@given(st.text(min_size=1), st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_name_is_safe_and_says_what_it_was_made_of(workflow_id: str, session: int, count: int) -> None:
    """S44: whatever the id."""
    name = file_name(workflow_id, session=session, count=count)
    assert re.fullmatch(r"[a-z0-9-]{32,73}\.[0-9a-f]{16}\.sqlite", name)
    parsed = parse_file_name(name)
    assert parsed == FileName(name_stem(workflow_id), session << 32 | count)
    assert parsed is not None
    assert str(parsed) == name
    assert parsed.session == session
    assert is_unknown_id(unknown_id(name))
    assert not is_unknown_id(name)


@given(st.text(min_size=1), st.text(min_size=1))
def test_ids_do_not_meet_even_where_case_is_folded(first: str, second: str) -> None:
    """S44: upper and lower case on any file system."""
    assert (name_stem(first).casefold() == name_stem(second).casefold()) == (first == second)


def test_later_files_have_larger_incarnations() -> None:
    names = [parse_file_name(file_name("x", session=s, count=c)) for s, c in ((1, 0), (1, 1), (2, 0), (2, 7))]
    assert all(earlier < later for earlier, later in pairwise(name for name in names if name is not None))
    assert None not in names


@pytest.mark.parametrize(
    "name",
    ["", "x.sqlite", "order-123.sqlite", file_name("x", session=1, count=0) + "-wal", "A" + file_name("x", session=1, count=0),
     "../" + file_name("x", session=1, count=0), file_name("x", session=1, count=0) + "\n", "?"],
)  # fmt: skip
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_file_name(name) is None
    assert not is_unknown_id(unknown_id(name))


@pytest.mark.parametrize("workflow_id", ["", "\ud800", "ok\udfff"])
def test_what_cannot_be_an_id_is_refused(workflow_id: str) -> None:
    """S44: empty is refused."""
    with pytest.raises(WorkflowIdError) as caught:
        check_workflow_id(workflow_id)
    assert caught.value.workflow_id == workflow_id
    assert name_stem(workflow_id)


@given(st.text(min_size=1))
def test_any_other_text_is_an_id(workflow_id: str) -> None:
    check_workflow_id(workflow_id)
    assert name_stem(workflow_id) == name_stem(workflow_id)
