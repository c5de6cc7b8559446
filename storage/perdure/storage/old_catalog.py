"""The catalog that is being replaced: asked for what the files do not say, believed in nothing else.

1. It may be of any version, older than the files, cut short or garbage. What cannot be read from it is not known.
2. A row of it counts for a file only if the file's name is one that the row's id gets.

Rejected: opening it as a catalog. It would be judged, and refused, for what is not asked of it.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from perdure.storage.descriptors import out_of_descriptors
from perdure.storage.naming import name_stem, parse_file_name
from perdure.storage.store import CatalogRow

__all__ = ["OldCatalog"]


class OldCatalog:
    """See the module."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        if path.exists():
            try:
                self._connection = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
            except sqlite3.Error as error:
                _check_descriptors(path, error)

    @staticmethod
    def is_legible(path: Path) -> bool:
        """Whether there is anything in the file to ask for."""
        if not path.exists():
            return False
        try:
            connection = sqlite3.connect(path, isolation_level=None, timeout=0)
        except sqlite3.Error as error:
            _check_descriptors(path, error)
            return False
        with closing(connection):
            try:
                return connection.execute("SELECT 1 FROM files LIMIT 1").fetchone() is not None
            except sqlite3.Error as error:
                _check_descriptors(path, error)
                return False

    def ask(self, file: str) -> CatalogRow | None:
        """The row it had for the workflow of this file; `None` when it had none or cannot be read."""
        if self._connection is None:
            return None
        try:
            found = self._connection.execute(
                "SELECT f.workflow_id, w.workflow_type, w.created_at_ms, w.updated_at_ms"
                " FROM files f JOIN workflows w USING (workflow_id) WHERE f.file = ?",
                (file,),
            ).fetchone()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            _check_descriptors(self._path, error)
            self.close()
            return None
        name = parse_file_name(file)
        match found:
            case (str(workflow_id), str(workflow_type), int(created), int(updated)) if (
                name is not None and name_stem(workflow_id) == name.stem
            ):
                return CatalogRow(workflow_id, workflow_type, "pending", None, False, created, updated)
            case _:
                return None

    def close(self) -> None:
        """Close it. Closing twice is fine."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _check_descriptors(path: Path, error: Exception) -> None:
    """Give up rather than go on without an old catalog that could be read if there were a descriptor for it."""
    if (exhausted := out_of_descriptors(f"cannot open {path}", error, path=str(path))) is not None:
        raise exhausted from error
