"""The contract between a supervisor and storage: everything it needs, and no files.

1. A store opens one driver per workflow and keeps a catalog, an index over all workflows that can be rebuilt from their
   namespaces. The catalog never knows less than is needed: its next wake is never later than the workflow's own.
2. A store has one owner. `acquire` takes ownership for as long as the store is open.
3. Catalog writes survive the death of the process on return. They need not survive a power cut: a store that was not
   closed and finds that the machine was restarted since rebuilds its catalog from the namespaces in `acquire`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from typing import Protocol, cast, runtime_checkable

from perdure.storage.attributes import Scalar
from perdure.storage.driver import Driver

__all__ = ["CatalogRow", "CreatingStore", "Store", "create_driver"]


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
        problem: Why it cannot be used (its file is damaged, or gone), or `None`.
        attributes: By what it can be found (`attributes.py`).
        parent_id: The workflow that called it, or `None`.
    """

    workflow_id: str
    workflow_type: str
    state: str
    next_wake_ms: int | None
    mail_waiting: bool
    created_at_ms: int
    updated_at_ms: int
    problem: str | None = None
    attributes: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar], hash=False)
    parent_id: str | None = None


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

    async def find_due(
        self, now_ms: int, *, limit: int, since_ms: int = 0, after: str | None = None
    ) -> Sequence[CatalogRow]:
        """Rows without a problem whose `since_ms <= next_wake_ms <= now_ms`, earliest first, at most `limit`.

        Those of one time are in order of workflow id; `after` leaves out those of `since_ms` up to this id. So a page goes on
        after the last row of the one before.
        """
        ...

    async def find_ended(
        self, state: str, before_ms: int, *, limit: int, after: tuple[int, str] | None = None
    ) -> Sequence[CatalogRow]:
        """Rows in a terminal state, without a duty or a problem, whose `updated_at_ms < before_ms`, oldest first.

        Args:
            state: `completed`, `failed` or `cancelled`.
            before_ms: The row did not change since then, in milliseconds since the epoch.
            limit: How many rows at most.
            after: Only rows after this pair of `updated_at_ms` and id: the last row of the page before.
        """
        ...

    async def next_wake_ms(self, *, since_ms: int = 0) -> int | None:
        """The earliest `next_wake_ms >= since_ms` of all rows without a problem, or `None`."""
        ...

    async def list_rows(
        self,
        *,
        state: str | Collection[str] | None = None,
        workflow_type: str | None = None,
        created_before_ms: int | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
        has_problem: bool | None = None,
        after: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> Sequence[CatalogRow]:
        """Rows for which all that is given holds, in order of creation (`created_at_ms`, then id). Opens no namespace.

        Args:
            state: In this state, or in one of these.
            workflow_type: Of this type.
            created_before_ms: Made before this time, in milliseconds since the epoch.
            attributes: With all of these attributes; values are compared with their types.
            parent_id: Called by this workflow.
            has_problem: With a problem; `False`: without one; `None`: either.
            after: Only rows after this pair of `created_at_ms` and id: the last row of the page before.
            limit: How many rows at most.
        """
        ...

    async def count_rows(
        self,
        *,
        state: str | Collection[str] | None = None,
        workflow_type: str | None = None,
        created_before_ms: int | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
        has_problem: bool | None = None,
    ) -> int:
        """How many rows `list_rows` would give without a limit. Opens no namespace."""
        ...

    async def list_types(self) -> Sequence[str]:
        """The types that there are rows of, in order. Costs what the types are, not what the rows are."""
        ...

    async def open_own(self, *, create: bool = True) -> Driver:
        """Open the namespace that belongs to the owner of the store and to no workflow.

        The caller closes the driver. At most one is open.

        Args:
            create: Whether a missing namespace is made (empty) instead of being an error.

        Raises:
            NamespaceNotFoundError: There is none, and `create` is false.
            CorruptStoreError: Its file was damaged, and was set aside.
            StoreBusyError: It is already open.
        """
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

    async def backup_all(self, target: str | PathLike[str]) -> Mapping[str, str]:
        """Write a copy of everything to a new directory, which a `FileStore` can be opened on.

        Each workflow is copied as it is at some moment while this runs, through its open driver if there is one; they are
        not all copied at the same moment. Complete and durable on return, or not there.

        Returns:
            What could not be copied (damaged files), by workflow id, and why. Empty when everything was.
        """
        ...

    async def reindex(self) -> int:
        """Read all rows again from the namespaces, while the store is in use; an open driver is asked.

        No row's next wake is made later than its workflow's own, nor a row changed that changes meanwhile.

        Returns:
            How many rows were not right.
        """
        ...

    def describe(self, workflow_id: str) -> str:
        """Where a person finds this workflow's data (a file's path, for the file store)."""
        ...

    async def aclose(self) -> None:
        """Close what is open and give up ownership. Closing twice is fine."""
        ...


@runtime_checkable
class CreatingStore(Protocol):
    """What a store may offer besides: to make a namespace and write its row in one, which spares each new workflow a write.

    It counts only where the store's class has it, and no class after the one that defines it overrides `put_rows` or
    `open_driver`: a store that wraps another and delegates with `__getattr__`, or that watches what it opens, would otherwise be
    passed by, unseen.
    """

    async def create_driver(self, row: CatalogRow) -> tuple[Driver, bool]:
        """Write the row of a workflow that is to begin, and open its namespace, which is made if it is missing.

        On return both survive the death of the process; with the first batch the namespace survives what `open_driver`
        promises. Killed before that, there is a row only if there is the namespace.

        Returns:
            The driver, which the caller closes, and whether the namespace was just made, and so is empty.

        Raises:
            StorageError: As `put_rows` and `open_driver`. If the namespace cannot be made, the row was not written.
        """
        ...


@cache
def _is_creating(kind: type) -> bool:
    """Whether a class has a `create_driver` that does what its `put_rows` and `open_driver` do."""
    creates, *others = (
        next((each for each in kind.__mro__ if name in vars(each)), object)
        for name in ("create_driver", "put_rows", "open_driver")
    )
    return creates is not object and all(issubclass(creates, other) for other in others)


async def create_driver(store: Store, row: CatalogRow) -> tuple[Driver, bool]:
    """`CreatingStore.create_driver` of any store; one that has none writes the row first, and tells nothing of the namespace.

    Returns:
        The driver, which the caller closes, and whether the namespace is known to be empty.
    """
    if _is_creating(type(store)):
        return await cast("CreatingStore", store).create_driver(row)
    await store.put_rows([row])
    return await store.open_driver(row.workflow_id, create=True), False
