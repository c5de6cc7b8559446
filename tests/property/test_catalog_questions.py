"""Both stores give the same answer to any question, whatever was put, replaced and deleted before."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.storage import CatalogRow, FileStore, MemoryStore
from perdure.storage.store import Store

STATES = ["pending", "running", "sleeping", "completed", "failed", "a state of tomorrow"]
TYPES = ["", "order", "refund"]
IDS = ["a", "b", "B", "é", "\0", "longer id"]
VALUES: list[Any] = [0, 0.0, -0.0, False, "", "0", None, 1, True, "true", 2**63 - 1, "é"]
NAMES = ["customer", "is new", "é"]

attributes = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES), max_size=3)
times = st.integers(0, 4)
wakes = st.none() | st.integers(0, 4) | st.just(2**63 - 1)
rows = st.builds(
    CatalogRow,
    workflow_id=st.sampled_from(IDS),
    workflow_type=st.sampled_from(TYPES),
    state=st.sampled_from(STATES),
    next_wake_ms=wakes,
    mail_waiting=st.booleans(),
    created_at_ms=times,
    updated_at_ms=times,
    problem=st.none() | st.just("storage: gone"),
    attributes=attributes,
    parent_id=st.none() | st.sampled_from(IDS),
)
changes = st.lists(st.lists(rows, max_size=4) | st.sampled_from(IDS), max_size=12)
cursors = st.none() | st.tuples(times, st.sampled_from(IDS))
questions = st.fixed_dictionaries(
    {},
    optional={
        "state": st.sampled_from(STATES) | st.lists(st.sampled_from(STATES), max_size=3),
        "workflow_type": st.sampled_from(TYPES),
        "created_before_ms": times | st.just(2**64),
        "attributes": attributes,
        "parent_id": st.sampled_from(IDS),
        "has_problem": st.booleans(),
    },
)


async def change(store: Store, made: Iterable[Any]) -> None:
    for each in made:
        if isinstance(each, str):
            await store.delete(each)
        else:
            await store.put_rows(each)


async def answers(store: Store, question: dict[str, Any], after: tuple[int, str] | None, limit: int) -> list[Any]:
    ended: list[Any] = [await store.find_ended(state, 3, limit=limit, after=after) for state in STATES]
    return [
        list(await store.list_rows(**question, after=after, limit=limit)),
        await store.count_rows(**question),
        list(await store.find_due(3, limit=limit)),
        list(await store.find_due(3, limit=limit, since_ms=1, after="a")),
        await store.next_wake_ms(since_ms=1),
        await store.list_types(),
        *map(list, ended),
    ]


async def compare(
    directory: Path, made: list[Any], asked: list[dict[str, Any]], after: tuple[int, str] | None, limit: int
) -> None:
    files, memory = FileStore(directory, commit_in="inline"), MemoryStore()
    for store in (files, memory):
        await store.acquire()
        await change(store, made)
    for question in [{}, *asked]:
        assert await answers(files, question, after, limit) == await answers(memory, question, after, limit)
    pages: list[CatalogRow] = []
    while page := await files.list_rows(
        limit=2, after=(pages[-1].created_at_ms, pages[-1].workflow_id) if pages else None
    ):
        pages += page
    assert pages == list(await memory.list_rows(limit=1_000))
    for store in (files, memory):
        await store.aclose()


@settings(max_examples=60)
@given(changes, st.lists(questions, min_size=1, max_size=4), cursors, st.integers(0, 5))
def test_stores_agree(made: list[Any], asked: list[dict[str, Any]], after: tuple[int, str] | None, limit: int) -> None:
    """S50: what an index answers is what looking at every row answers."""
    with TemporaryDirectory() as directory:
        trio.run(compare, Path(directory) / "data", made, asked, after, limit)
