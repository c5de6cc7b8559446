"""Rows of the catalog: between `CatalogRow` and SQLite, with what is indexed of them beside.

1. The table `attributes` holds just what the rows of `workflows` say in their column of that name: both change in one
   transaction, which is the caller's.
2. A row that is corrected never gets a later wake while somebody may be about to want an earlier one.
3. The column holds JSON with sorted names, so equal attributes have equal text, and a row that keeps its own is known by
   comparing it.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from typing import Any, Final

from perdure.storage.attributes import Scalar, attribute_text
from perdure.storage.catalog_schema import ADD, COLUMNS, INDEXED, INTEGER_MAX, PUT, UPDATE
from perdure.storage.store import CatalogRow

__all__ = ["add_row", "corrected", "get_row", "put_row", "remove_row", "row_of", "select_rows", "storable"]

_NO_ATTRIBUTES: Final = "{}"
_SELECT: Final = f"SELECT {COLUMNS} FROM workflows WHERE workflow_id = ?"


def get_row(connection: sqlite3.Connection, workflow_id: str) -> CatalogRow | None:
    """The row of one workflow, or `None`."""
    found = connection.execute(_SELECT, (workflow_id,)).fetchone()
    return None if found is None else row_of(found)


def select_rows(connection: sqlite3.Connection, statement: str, values: tuple[object, ...]) -> list[CatalogRow]:
    """The rows that a statement finds, which selects `COLUMNS`."""
    return [row_of(found) for found in connection.execute(statement, values).fetchall()]


def put_row(connection: sqlite3.Connection, row: CatalogRow) -> None:
    """Insert or replace a row, and what is indexed of it."""
    values = _values(row)
    # Nearly always only what a running workflow changes is new: naming no other column leaves the other indexes alone.
    if connection.execute(UPDATE, values).rowcount == 0:
        _unindex(connection, row.workflow_id)
        connection.execute(PUT, values)
        _index(connection, row)


def add_row(connection: sqlite3.Connection, row: CatalogRow) -> None:
    """`put_row` in one statement where there is no row, as nearly always when a workflow is made."""
    if connection.execute(ADD, _values(row)).rowcount == 0:
        put_row(connection, row)
    else:
        _index(connection, row)


def storable(row: CatalogRow) -> CatalogRow:
    """The row as it is read again after it was put."""
    # SQLite's integers are signed: an alarm past 2**63 wakes earlier, which the catalog may do.
    wake = row.next_wake_ms
    return row if wake is None or wake <= INTEGER_MAX else replace(row, next_wake_ms=INTEGER_MAX)


def remove_row(connection: sqlite3.Connection, workflow_id: str) -> None:
    """Remove a row, if there is one, and what is indexed of it."""
    _unindex(connection, workflow_id)
    connection.execute("DELETE FROM workflows WHERE workflow_id = ?", (workflow_id,))


def corrected(current: CatalogRow | None, read: CatalogRow, *, is_open: bool) -> CatalogRow:
    """What a row is to be; equal to `current` when it is right.

    Args:
        current: The row as it is, and was before the namespace was read.
        read: The row that the namespace calls for.
        is_open: Whether the workflow's driver is open.
    """
    if current is None:
        # Whoever has it open may believe that the row says "at once".
        return replace(read, next_wake_ms=0) if is_open else read
    wake = read.next_wake_ms
    if is_open and current.next_wake_ms is not None and (wake is None or wake > current.next_wake_ms):
        wake = current.next_wake_ms
    # Opening a file may change when it seems to have changed last.
    updated_at_ms = current.updated_at_ms if read.state == current.state else read.updated_at_ms
    return replace(read, next_wake_ms=wake, updated_at_ms=updated_at_ms)


def row_of(found: tuple[Any, ...]) -> CatalogRow:
    """What `COLUMNS` say."""
    workflow_id, workflow_type, state, wake, mail, created, updated, problem, attributes, parent_id = found
    kept: dict[str, Scalar] = {} if attributes == _NO_ATTRIBUTES else json.loads(attributes)
    return CatalogRow(workflow_id, workflow_type, state, wake, mail != 0, created, updated, problem, kept, parent_id)


def _index(connection: sqlite3.Connection, row: CatalogRow) -> None:
    if row.attributes:
        connection.executemany(
            "INSERT INTO attributes VALUES (?, ?, ?, ?)",
            [
                (name, attribute_text(value), row.created_at_ms, row.workflow_id)
                for name, value in row.attributes.items()
            ],
        )


def _unindex(connection: sqlite3.Connection, workflow_id: str) -> None:
    found = connection.execute(INDEXED, (workflow_id,)).fetchone()
    if found is not None and found[1] != _NO_ATTRIBUTES:
        connection.executemany(
            "DELETE FROM attributes WHERE name = ? AND value = ? AND created_at_ms = ? AND workflow_id = ?",
            [(name, attribute_text(value), found[0], workflow_id) for name, value in json.loads(found[1]).items()],
        )


def _values(row: CatalogRow) -> tuple[object, ...]:
    wake = None if row.next_wake_ms is None else min(row.next_wake_ms, INTEGER_MAX)
    # A problem quotes file names and user code, which may hold what UTF-8 cannot.
    problem = None if row.problem is None else row.problem.encode(errors="backslashreplace").decode()
    attributes = row.attributes
    return (
        row.workflow_id,
        row.workflow_type,
        row.state,
        wake,
        row.mail_waiting,
        row.created_at_ms,
        row.updated_at_ms,
        problem,
        json.dumps(dict(attributes), ensure_ascii=False, sort_keys=True) if attributes else _NO_ATTRIBUTES,
        row.parent_id,
    )
