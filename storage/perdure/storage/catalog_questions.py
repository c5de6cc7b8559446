"""Listing and counting workflows: which index answers which question.

1. Rows come in order of creation, by `created_at_ms` and then by id. That order never changes under a reader who pages.
2. Each condition has an index in that order: `workflows_state_type` for states and types, `workflows_parent`,
   `workflows_problem`, and the table `attributes`. Of several, the narrowest leads, and the rest is looked up row by row,
   so a question costs what its narrowest condition would.
3. Which is the narrowest is found by counting a little of each, then more of each, until one has no more: that costs a
   multiple of the narrowest, whatever the size of the others.
4. A question for a state, or a type, alone is put to the pairs of state and type that there are, a few dozen at most, and
   their answers are merged. Rejected: an index for each, which every change of state would have to write too.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

from perdure.storage.attributes import attribute_text
from perdure.storage.catalog_schema import COLUMNS, INTEGER_MAX
from perdure.storage.question import Question

__all__ = ["count", "select", "types"]

_FIRST_PROBE: Final = 16
_PROBE_GROWTH: Final = 8

_PAIR: Final = "SELECT state, workflow_type FROM workflows INDEXED BY workflows_state_type"
_FIRST_PAIR: Final = f"{_PAIR} ORDER BY state, workflow_type LIMIT 1"
_NEXT_TYPE: Final = f"{_PAIR} WHERE state = ? AND workflow_type > ? ORDER BY workflow_type LIMIT 1"
_NEXT_STATE: Final = f"{_PAIR} WHERE state > ? ORDER BY state, workflow_type LIMIT 1"

_Found: TypeAlias = tuple[Any, ...]
_CREATED, _ID = 5, 0  # where they are in a row


@dataclass(frozen=True, slots=True)
class _Range:
    """A stretch of one index, in order of creation.

    Attributes:
        source: What follows FROM; the row itself is `w` in it.
        alias: Which table of it has the order.
        condition: What picks the stretch.
        values: Its parameters.
    """

    source: str
    alias: str
    condition: str
    values: tuple[object, ...]


_Way: TypeAlias = Sequence[_Range]
"""One way to the answer: disjoint stretches that hold all of it."""


def select(connection: sqlite3.Connection, question: Question, limit: int) -> list[_Found]:
    """The rows, in order of creation, at most `limit`."""
    if limit <= 0 or question.states == frozenset():
        return []
    way = _narrowest(connection, _ways(connection, question), question)
    columns = ", ".join(f"w.{column}" for column in COLUMNS.split(", "))
    with ExitStack() as stack:
        streams: list[Iterator[_Found]] = []
        for each in way:
            where, values = _where(each, question)
            statement = (
                f"SELECT {columns} FROM {each.source} WHERE {where} "
                f"ORDER BY {each.alias}.created_at_ms, {each.alias}.workflow_id LIMIT ?"
            )
            streams.append(stack.enter_context(closing(connection.execute(statement, (*values, limit)))))
        return list(islice(heapq.merge(*streams, key=lambda row: (row[_CREATED], row[_ID])), limit))


def count(connection: sqlite3.Connection, question: Question) -> int:
    """How many rows there are."""
    if question.states == frozenset():
        return 0  # SQLite cannot be told to use an index where nothing is wanted of it
    total = 0
    for each in _narrowest(connection, _ways(connection, question), question):
        where, values = _where(each, question)
        # Of an attribute alone, the index knows it all.
        source = "attributes a" if each.alias == "a" and "w." not in where else each.source
        total += connection.execute(f"SELECT count(*) FROM {source} WHERE {where}", values).fetchone()[0]
    return total


def types(connection: sqlite3.Connection) -> list[str]:
    """The types that there are rows of, in order."""
    return sorted({workflow_type for _, workflow_type in _pairs(connection, None, None)})


def _ways(connection: sqlite3.Connection, question: Question) -> list[_Way]:
    ways: list[_Way] = []
    for name, value in question.attributes.items():
        source = "attributes a CROSS JOIN workflows w ON w.workflow_id = a.workflow_id"
        ways.append([_Range(source, "a", "a.name = ? AND a.value = ?", (name, attribute_text(value)))])
    if question.parent_id is not None:
        source = "workflows w INDEXED BY workflows_parent"
        ways.append([_Range(source, "w", "w.parent_id = ?", (question.parent_id,))])
    if question.has_problem:
        ways.append([_Range("workflows w INDEXED BY workflows_problem", "w", "w.problem IS NOT NULL", ())])
    if question.states is not None or question.workflow_type is not None:
        source = "workflows w INDEXED BY workflows_state_type"
        ways.append(
            [
                _Range(source, "w", "w.state = ? AND w.workflow_type = ?", pair)
                for pair in _pairs(connection, question.states, question.workflow_type)
            ]
        )
    return ways or [[_Range("workflows w INDEXED BY workflows_created", "w", "1", ())]]


def _pairs(
    connection: sqlite3.Connection, states: Collection[str] | None, workflow_type: str | None
) -> list[tuple[str, str]]:
    """The pairs of state and type that there are, of those asked for; one step through the index for each."""
    if states is not None and workflow_type is not None:
        return [(state, workflow_type) for state in sorted(set(states))]
    pairs: list[tuple[str, str]] = []
    found = connection.execute(_FIRST_PAIR).fetchone()
    while found is not None:
        pairs.append(found)
        following = connection.execute(_NEXT_TYPE, found).fetchone()
        # Comparing both at once would step over each row of the pair.
        found = connection.execute(_NEXT_STATE, found[:1]).fetchone() if following is None else following
    return [
        pair
        for pair in pairs
        if (states is None or pair[0] in states) and (workflow_type is None or pair[1] == workflow_type)
    ]


def _narrowest(connection: sqlite3.Connection, ways: list[_Way], question: Question) -> _Way:
    if len(ways) == 1:
        return ways[0]
    bound = _FIRST_PROBE
    while True:
        sizes = [_size(connection, way, question, bound) for way in ways]
        smallest = min(sizes)
        if smallest < bound:
            return ways[sizes.index(smallest)]
        bound *= _PROBE_GROWTH


def _size(connection: sqlite3.Connection, way: _Way, question: Question, bound: int) -> int:
    size = 0
    for each in way:
        if size < bound:
            # The stretch alone, without the row: of an attribute that is its own table.
            source = "attributes a" if each.alias == "a" else each.source
            where, values = _bounds(each, question)
            statement = f"SELECT count(*) FROM (SELECT 1 FROM {source} WHERE {where} LIMIT ?)"
            size += connection.execute(statement, (*values, bound - size)).fetchone()[0]
    return size


def _bounds(each: _Range, question: Question) -> tuple[str, list[object]]:
    """The stretch of an index that is asked for."""
    conditions, values = [each.condition], list(each.values)
    if question.created_before_ms is not None:
        conditions.append(f"{each.alias}.created_at_ms < ?")
        values.append(min(question.created_before_ms, INTEGER_MAX))
    if question.after is not None:
        conditions.append(f"({each.alias}.created_at_ms, {each.alias}.workflow_id) > (?, ?)")
        values += [min(question.after[0], INTEGER_MAX), question.after[1]]
    return " AND ".join(conditions), values


def _where(each: _Range, question: Question) -> tuple[str, list[object]]:
    """The stretch, and what else its rows have to be."""
    text, values = _bounds(each, question)
    conditions = [text]
    by_pair = "w.state" in each.condition
    if question.states is not None and not by_pair:
        conditions.append(f"w.state IN ({', '.join('?' * len(question.states))})")
        values += question.states
    if question.workflow_type is not None and not by_pair:
        conditions.append("w.workflow_type = ?")
        values.append(question.workflow_type)
    if question.parent_id is not None and "parent_id" not in each.condition:
        conditions.append("w.parent_id = ?")
        values.append(question.parent_id)
    if question.has_problem is not None and "w.problem" not in each.condition:
        conditions.append("w.problem IS NOT NULL" if question.has_problem else "w.problem IS NULL")
    for name, value in question.attributes.items():
        pair = (name, attribute_text(value))
        if each.values != pair:
            conditions.append(
                "EXISTS (SELECT 1 FROM attributes b WHERE b.name = ? AND b.value = ?"
                " AND b.created_at_ms = w.created_at_ms AND b.workflow_id = w.workflow_id)"
            )
            values += pair
    return " AND ".join(conditions), values
