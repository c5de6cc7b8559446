"""The contract between a supervisor and storage: everything it needs, and no files.

1. A store opens one driver per workflow and keeps a catalog, an index over all workflows that can be rebuilt from their
   namespaces. The catalog never knows less than is needed: its next wake is never later than the workflow's own.
2. A store has one owner. `acquire` takes ownership for as long as the store is open.
3. Catalog writes survive the death of the process on return. They need not survive a power cut: a store that was not
   closed and finds that the machine was restarted since rebuilds its catalog from the namespaces in `acquire`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Protocol, runtime_checkable

from perdure.storage.driver import Driver

__all__ = ["CatalogRow", "Store"]


@dataclass(frozen=True, slots=True)
class CatalogRow:
    """What the catalog knows of one workflow.

    Attributes:
        workflow_id: The workflow's id.
        workflow_type: The registered name of its function.
        state: Text of the workflow's state.
        next_wake_ms: When it wants to be activated next (milliseconds since the epoch; 0 is "at once"), `None` for
            never.
        mail_waiting: Whether its mailbox may hold undelivered messages.
        created_at_ms: When it was created.
        updated_at_ms: When this row last changed.
        problem: Why it cannot run (a set-aside file, an unregistered type, a divergence), or `None`.
    """

    workflow_id: str
    workflow_type: str
    state: str
    next_wake_ms: int | None
    mail_waiting: bool
    created_at_ms: int
    updated_at_ms: int
    problem: str | None = None


@runtime_checkable
class Store(Protocol):
    """Where a supervisor keeps its workflows."""

    async def acquire(self) -> None:
        """Take ownership, create what is missing, check the format, rebuild the catalog if it was lost.

        Raises:
            StoreLockedError: Another process owns it; `holder_pid` names which.
            FormatVersionError: A newer Perdure wrote it.
            UnsupportedFileSystemError: It lies on a network file system.
        """
        ...

    async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
        """Open the namespace of a workflow; the caller closes the driver. At most one is open per workflow.

        Args:
            workflow_id: Any non-empty text.
            create: Whether a missing namespace is made (empty) instead of being an error.

        Raises:
            NamespaceNotFoundError: There is none, and `create` is false.
            CorruptStoreError: The file was damaged; it was set aside and the catalog row carries the problem.
            StoreBusyError: It is already open.
        """
        ...

    async def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        """Insert or replace catalog rows, in one transaction."""
        ...

    async def get_row(self, workflow_id: str) -> CatalogRow | None:
        """The row of one workflow, or `None`."""
        ...

    async def find_due(self, now_ms: int, *, limit: int, since_ms: int = 0) -> Sequence[CatalogRow]:
        """Rows without a problem whose `since_ms <= next_wake_ms <= now_ms`, earliest first, at most `limit`."""
        ...

    async def next_wake_ms(self, *, since_ms: int = 0) -> int | None:
        """The earliest `next_wake_ms >= since_ms` of all rows without a problem, or `None`."""
        ...

    async def list_rows(
        self, *, state: str | None = None, workflow_type: str | None = None, after: str | None = None, limit: int = 100
    ) -> Sequence[CatalogRow]:
        """Rows in order of workflow id, those after the id `after`, at most `limit`. Opens no namespace."""
        ...

    async def count_rows(self, *, state: str | None = None, workflow_type: str | None = None) -> int:
        """How many rows there are. Opens no namespace."""
        ...

    async def delete(self, workflow_id: str) -> None:
        """Remove a workflow's namespace and row. After a crash at any point it is there whole, or gone for good.

        Raises:
            StoreBusyError: Its driver is open.
        """
        ...

    async def backup(self, workflow_id: str, target: str | PathLike[str]) -> None:
        """Write a consistent copy of one namespace to `target`, through the open driver if there is one."""
        ...

    def describe(self, workflow_id: str) -> str:
        """Where a person finds this workflow's data (a file's path, for the file store)."""
        ...

    async def aclose(self) -> None:
        """Close what is open and give up ownership. Closing twice is fine."""
        ...
