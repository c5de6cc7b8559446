"""A store whose drivers code user data: what `open_supervisor(..., codec=codec)` makes of its store.

1. Every driver that it opens is a `CodedDriver`; there is no way around the codec for whoever is given this store.
2. All else is the store's below: the catalog, ownership and deletion know no user data, and a backup copies what is on disk,
   which is coded.

Rejected: an argument of each store. Stores that others write would have to remember it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from os import PathLike

from perdure.storage.attributes import Scalar
from perdure.storage.codec import CODED_BYTES_MAX, ValueCodec, check_codec
from perdure.storage.coded_driver import CodedDriver
from perdure.storage.driver import Driver
from perdure.storage.store import CatalogRow, Store, create_driver

__all__ = ["CodedStore"]


class CodedStore:
    """A `Store` over another. Its methods do what those of the store below do.

    Args:
        inner: Where workflows are.
        codec: What wraps their user data.

    Raises:
        TypeError: `codec` is not a `ValueCodec`.
        ValueError: Its `overhead_bytes` is negative.
    """

    def __init__(self, inner: Store, codec: ValueCodec) -> None:
        self._inner = inner
        self._codec = check_codec(codec)

    def __repr__(self) -> str:
        return f"<CodedStore over {self._inner!r}>"

    @property
    def inner(self) -> Store:
        """The store below, whose drivers have the coded values."""
        return self._inner

    @property
    def overhead_bytes(self) -> int:
        """By how many bytes, at most, a stored value grows."""
        return self._codec.overhead_bytes + CODED_BYTES_MAX

    async def acquire(self) -> None:
        """Take ownership."""
        await self._inner.acquire()

    async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
        """Open the namespace of a workflow, its user data decoded as it is read and coded as it is written."""
        return await self._coded(await self._inner.open_driver(workflow_id, create=create), workflow_id)

    async def create_driver(self, row: CatalogRow) -> tuple[Driver, bool]:
        """Write a row and open its namespace, coded; whether that is known to be empty."""
        driver, is_empty = await create_driver(self._inner, row)
        return await self._coded(driver, row.workflow_id), is_empty

    async def _coded(self, inner: Driver, workflow_id: str) -> Driver:
        try:
            return CodedDriver(inner, self._codec, workflow_id)
        except BaseException:
            await inner.aclose()
            raise

    async def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        """Insert or replace catalog rows."""
        await self._inner.put_rows(rows)

    async def get_row(self, workflow_id: str) -> CatalogRow | None:
        """The row of one workflow, or `None`."""
        return await self._inner.get_row(workflow_id)

    async def find_due(
        self, now_ms: int, *, limit: int, since_ms: int = 0, after: str | None = None
    ) -> Sequence[CatalogRow]:
        """Rows that are due."""
        return await self._inner.find_due(now_ms, limit=limit, since_ms=since_ms, after=after)

    async def find_ended(
        self, state: str, before_ms: int, *, limit: int, after: tuple[int, str] | None = None
    ) -> Sequence[CatalogRow]:
        """Rows in a terminal state, by age."""
        return await self._inner.find_ended(state, before_ms, limit=limit, after=after)

    async def next_wake_ms(self, *, since_ms: int = 0) -> int | None:
        """The earliest wake."""
        return await self._inner.next_wake_ms(since_ms=since_ms)

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
        """Rows for which all that is given holds."""
        return await self._inner.list_rows(
            state=state,
            workflow_type=workflow_type,
            created_before_ms=created_before_ms,
            attributes=attributes,
            parent_id=parent_id,
            has_problem=has_problem,
            after=after,
            limit=limit,
        )

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
        """How many rows `list_rows` would give."""
        return await self._inner.count_rows(
            state=state,
            workflow_type=workflow_type,
            created_before_ms=created_before_ms,
            attributes=attributes,
            parent_id=parent_id,
            has_problem=has_problem,
        )

    async def list_types(self) -> Sequence[str]:
        """The types that there are rows of."""
        return await self._inner.list_types()

    async def open_own(self, *, create: bool = True) -> Driver:
        """Open the owner's namespace, coded as those of workflows are."""
        return await self._coded(await self._inner.open_own(create=create), "")

    async def delete(self, workflow_id: str) -> None:
        """Remove a workflow's namespace and row."""
        await self._inner.delete(workflow_id)

    async def backup(self, workflow_id: str, target: str | PathLike[str]) -> None:
        """Copy one namespace as it is on disk, coded, to `target`."""
        await self._inner.backup(workflow_id, target)

    async def backup_all(self, target: str | PathLike[str]) -> Mapping[str, str]:
        """Copy everything as it is on disk, coded, to a new directory."""
        return await self._inner.backup_all(target)

    async def reindex(self) -> int:
        """Read all rows again from the namespaces, of which that needs nothing that is coded."""
        return await self._inner.reindex()

    def describe(self, workflow_id: str) -> str:
        """Where a person finds this workflow's data."""
        return self._inner.describe(workflow_id)

    async def aclose(self) -> None:
        """Close what is open and give up ownership."""
        await self._inner.aclose()
