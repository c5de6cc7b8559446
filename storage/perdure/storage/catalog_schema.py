"""The catalog's tables and its statements.

1. Each index for listings ends with the time of creation and the id, the order in which rows are listed. None of what is
   in front of those changes but the state, so a change of state writes one of them.
2. An index names no column that a question does not need: each that a write changes costs it some 10 us.
3. What a running workflow changes again and again is in no index of ended ones, and the other way round.
4. A changed schema gets a new version, and every catalog of another version is rebuilt; there are no migrations.
"""

from typing import Final

__all__ = [
    "ADD",
    "APPLICATION_ID",
    "COLUMNS",
    "FIND_DUE",
    "FIND_ENDED",
    "FIND_FILE",
    "INDEXED",
    "INTEGER_MAX",
    "NEXT_WAKE",
    "PAGE_BYTES",
    "PUT",
    "SCHEMA",
    "SCHEMA_VERSION",
    "SELECT_FILE",
    "STORAGE_PROBLEM",
    "UPDATE",
    "WAL_BYTES_MAX",
]

APPLICATION_ID: Final = 0x50644361
"""`PdCa`: marks the file as a catalog in SQLite's header. Stored on disk; never change or reuse."""

SCHEMA_VERSION: Final = 2
"""SQLite's `user_version`; a catalog of any other is rebuilt. Stored on disk; never reuse."""

STORAGE_PROBLEM: Final = "storage: "
"""How a problem begins that the store itself found, and that it clears again when the file is well."""

PAGE_BYTES: Final = 1024
"""Rows and index entries are small, and a write touches one of each: with pages of 4,096 bytes it takes half as long
again (measured at 20,000 rows)."""

WAL_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bound of the write-ahead log, reached after some 500 single writes; emptying it syncs the disk twice."""

INTEGER_MAX: Final = 2**63 - 1
"""The largest integer that SQLite holds."""

SCHEMA: Final = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY NOT NULL, value) WITHOUT ROWID",
    "workflows": """CREATE TABLE workflows (
    workflow_id TEXT PRIMARY KEY NOT NULL,
    workflow_type TEXT NOT NULL,
    state TEXT NOT NULL,
    next_wake_ms INTEGER,
    mail_waiting INTEGER NOT NULL,
    created_at_ms INTEGER NOT NULL,
    updated_at_ms INTEGER NOT NULL,
    problem TEXT,
    attributes TEXT NOT NULL DEFAULT '{}',
    parent_id TEXT
) WITHOUT ROWID""",
    "attributes": """CREATE TABLE attributes (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    workflow_id TEXT NOT NULL,
    PRIMARY KEY (name, value, created_at_ms, workflow_id)
) WITHOUT ROWID""",
    "files": """CREATE TABLE files (
    workflow_id TEXT PRIMARY KEY NOT NULL,
    file TEXT NOT NULL UNIQUE,
    set_aside INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID""",
    "deletions": """CREATE TABLE deletions (
    workflow_id TEXT PRIMARY KEY NOT NULL,
    file TEXT NOT NULL,
    set_aside INTEGER NOT NULL
) WITHOUT ROWID""",
    "workflows_due": "CREATE INDEX workflows_due ON workflows (next_wake_ms, workflow_id)"
    " WHERE problem IS NULL AND next_wake_ms IS NOT NULL",
    "workflows_created": "CREATE INDEX workflows_created ON workflows (created_at_ms, workflow_id)",
    "workflows_state_type": "CREATE INDEX workflows_state_type ON workflows"
    " (state, workflow_type, created_at_ms, workflow_id)",
    "workflows_parent": "CREATE INDEX workflows_parent ON workflows (parent_id, created_at_ms, workflow_id)"
    " WHERE parent_id IS NOT NULL",
    "workflows_ended": "CREATE INDEX workflows_ended ON workflows (state, updated_at_ms, workflow_id)"
    " WHERE state IN ('completed', 'failed', 'cancelled') AND next_wake_ms IS NULL AND problem IS NULL",
    "workflows_problem": "CREATE INDEX workflows_problem ON workflows (created_at_ms, workflow_id)"
    " WHERE problem IS NOT NULL",
    "catalog": "CREATE VIEW catalog AS SELECT w.*, f.file FROM workflows w LEFT JOIN files f USING (workflow_id)",
}
"""The statements that make an empty catalog, by what they make. The view `catalog` is for people."""

COLUMNS: Final = ", ".join(
    (
        "workflow_id",
        "workflow_type",
        "state",
        "next_wake_ms",
        "mail_waiting",
        "created_at_ms",
        "updated_at_ms",
        "problem",
        "attributes",
        "parent_id",
    )
)
"""A row, in the order of `CatalogRow`'s fields."""
UPDATE: Final = """UPDATE workflows SET state = ?3, next_wake_ms = ?4, mail_waiting = ?5, updated_at_ms = ?7, problem = ?8
WHERE workflow_id = ?1 AND workflow_type = ?2 AND created_at_ms = ?6 AND attributes = ?9 AND parent_id IS ?10"""
"""Replaces a row that is there and differs only in what a running workflow changes."""
PUT: Final = f"""INSERT INTO workflows ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (workflow_id) DO UPDATE SET workflow_type = excluded.workflow_type, state = excluded.state,
next_wake_ms = excluded.next_wake_ms, mail_waiting = excluded.mail_waiting, created_at_ms = excluded.created_at_ms,
updated_at_ms = excluded.updated_at_ms, problem = excluded.problem, attributes = excluded.attributes,
parent_id = excluded.parent_id"""
"""Replaces or inserts a row; what `attributes` has of it is another matter."""
ADD: Final = f"""INSERT INTO workflows ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (workflow_id) DO NOTHING"""
"""Inserts a row, unless there is one."""
INDEXED: Final = "SELECT created_at_ms, attributes FROM workflows WHERE workflow_id = ?"
"""What `attributes` has of a row."""
SELECT_FILE: Final = """SELECT f.workflow_id, f.file, f.set_aside, w.problem
FROM files f LEFT JOIN workflows w ON w.workflow_id = f.workflow_id"""
"""The beginning of every question for a file."""
FIND_FILE: Final = f"""{SELECT_FILE} WHERE f.workflow_id = ?
UNION ALL {SELECT_FILE} WHERE f.file >= ? AND f.file < ?"""
"""Takes an id, and between which names. With `OR` it takes half as long again: SQLite then sees to it that no row comes twice."""
FIND_DUE: Final = f"""SELECT {COLUMNS} FROM workflows
WHERE problem IS NULL AND next_wake_ms IS NOT NULL AND (next_wake_ms, workflow_id) > (?, ?) AND next_wake_ms <= ?
ORDER BY next_wake_ms, workflow_id LIMIT ?"""
"""Takes the earliest wake and the id after which to begin in it ("" for all), the latest wake, and how many rows."""
NEXT_WAKE: Final = """SELECT next_wake_ms FROM workflows
WHERE problem IS NULL AND next_wake_ms IS NOT NULL AND next_wake_ms >= ? ORDER BY next_wake_ms LIMIT 1"""
"""Takes the earliest wake to look at."""
FIND_ENDED: Final = f"""SELECT {COLUMNS} FROM workflows INDEXED BY workflows_ended
WHERE state IN ('completed', 'failed', 'cancelled') AND next_wake_ms IS NULL AND problem IS NULL
AND state = ?1 AND updated_at_ms < ?2 AND (updated_at_ms, workflow_id) > (?3, ?4)
ORDER BY updated_at_ms, workflow_id LIMIT ?5"""
"""Takes the state, before which time, after which time and id, and how many rows."""
