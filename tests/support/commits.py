"""Which statement of the SQLite driver commits: COMMIT, or the one statement of a batch that only puts some rows."""

from __future__ import annotations

from typing import Any

__all__ = ["does_commit"]


def does_commit(connection: Any, sql: str) -> bool:
    """Whether the driver's statement makes a batch durable. `connection` is of the standard library, or used like one."""
    return sql == "COMMIT" or (sql.startswith("REPLACE INTO kv") and not connection.in_transaction)
