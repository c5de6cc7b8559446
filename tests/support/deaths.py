"""Copies of a directory at each point at which its process could have died, down to single system calls.

The state of the directory is copied before and after every change that a store makes to it; each copy is what a killed
process would have left behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.storage import sqlite_image as image
from perdure.storage.catalog import Catalog
from perdure.storage.process_lock import ProcessLock
from perdure.storage.sqlite_namespace import Namespace

__all__ = ["Deaths"]

CATALOG_WRITES = (
    "put_rows", "put_file", "begin_delete", "finish_delete", "cancel_delete", "set_meta", "start", "finish", "move",
    "settle", "mark", "clear_problem", "correct", "checkpoint", "close",
)  # fmt: skip
CHANGES: list[tuple[Any, str]] = [
    *((os, name) for name in ("link", "rename", "replace", "unlink", "mkdir", "ftruncate", "pwrite")),
    *((Catalog, name) for name in CATALOG_WRITES),
    (image, "write_synced"),
    (ProcessLock, "write_note"),
]


COMMITS: list[tuple[Any, str]] = [(Namespace, "commit"), (Namespace, "close")]


class Deaths:
    """Copies of a directory, one for each point at which its process could have died.

    Args:
        data: The directory.
        copies: Where to copy it to.
        commits: Whether the commits of workflows are such points too.
    """

    def __init__(self, data: Path, copies: Path, *, commits: bool = False) -> None:
        self._changes = [*CHANGES, *COMMITS] if commits else CHANGES
        self.data = data
        self.copies = copies
        self.phase = ""
        self.found: list[tuple[str, Path]] = []
        self._seen: set[tuple[str, frozenset[tuple[str, bytes]]]] = set()

    def point(self) -> None:
        """Copy the directory, unless nothing has changed since an earlier copy."""
        if not self.data.exists():
            return
        content = frozenset(
            (str(path.relative_to(self.data)), path.read_bytes()) for path in self.data.rglob("*") if path.is_file()
        )
        if (self.phase, content) not in self._seen:
            self._seen.add((self.phase, content))
            target = self.copies / str(len(self.found))
            shutil.copytree(self.data, target)
            self.found.append((self.phase, target))

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Look at every change from here on."""
        busy = False

        def watch(change: Callable[..., Any]) -> Callable[..., Any]:
            def changing(*arguments: Any, **options: Any) -> Any:
                nonlocal busy
                if busy:
                    return change(*arguments, **options)
                busy = True
                self.point()
                busy = False
                try:
                    return change(*arguments, **options)
                finally:
                    busy = True
                    self.point()
                    busy = False

            return changing

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in self._changes:
                patch.setattr(owner, name, watch(getattr(owner, name)))
            yield
