"""The catalog, used from Trio: one call at a time, in the right thread.

1. At `synchronous=NORMAL` a catalog write syncs nothing and is done in place, in some 30 us; handing it to a thread
   would cost more than that. Only bounding the write-ahead log syncs the disk, so that part goes to a thread (unless
   all is to be inline), paid by the write that made it necessary, while others wait for the turn.
2. A call that has begun is carried through, whatever is cancelled.
3. A damaged catalog is reported to the owner at once, who sees to it that the next `acquire` rebuilds it, even if this
   process is killed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

import trio

from perdure.storage.blocking import Blocking
from perdure.storage.catalog import Catalog, Meta
from perdure.storage.errors import CorruptStoreError, StorageError

__all__ = ["CatalogAccess"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CatalogAccess:
    """An open catalog in Trio's hands.

    Args:
        catalog: It is closed by `aclose`.
        blocking: Runs what blocks.
        in_place: Whether calls run in place; otherwise each is handed to `blocking`.
        checkpoints: Whether writes bound the write-ahead log here, through `blocking`; otherwise the catalog has to.
        on_damage: Called once, in place, when the catalog turns out to be damaged.
    """

    def __init__(
        self,
        catalog: Catalog,
        blocking: Blocking,
        *,
        in_place: bool,
        checkpoints: bool,
        on_damage: Callable[[], None],
    ) -> None:
        self.catalog = catalog
        self._blocking = blocking
        self._in_place = in_place
        self._checkpoints = checkpoints
        self._on_damage = on_damage
        self._turn = trio.Lock()
        self._damaged = False

    async def ask(self, method: Callable[Concatenate[Catalog, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a method of the catalog.

        Raises:
            CorruptStoreError: The catalog is damaged; the next `acquire` rebuilds it.
            StorageError: It failed; a write that failed was not made.
        """
        try:
            if self._in_place and not self._turn.locked():
                return method(self.catalog, *args, **kwargs)
            async with self._turn:
                if self._in_place:
                    return method(self.catalog, *args, **kwargs)
                return await self._blocking.run(method, self.catalog, *args, **kwargs)
        except CorruptStoreError:
            if not self._damaged:
                self._damaged = True
                self._on_damage()
            raise

    async def write(self, method: Callable[Concatenate[Catalog, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a method that writes, as `ask` does, and bound the write-ahead log after it."""
        result = await self.ask(method, *args, **kwargs)
        if self._checkpoints and self.catalog.needs_checkpoint():
            with trio.CancelScope(shield=True):
                await self._checkpoint()
        return result

    async def _checkpoint(self) -> None:
        async with self._turn:
            # What was written is written, and the log still serves; if the disk is at fault, the next write says so.
            with suppress(StorageError):
                if self.catalog.needs_checkpoint():
                    await self._blocking.run(self.catalog.checkpoint)

    async def aclose(self, meta: Meta) -> None:
        """Note that the catalog is closed in good order, and close it; durable on return. Not interrupted.

        Raises:
            StorageError: That could not be noted. The catalog is closed all the same.
        """
        with trio.CancelScope(shield=True):
            async with self._turn:
                await self._blocking.run(self._close, meta)

    def _close(self, meta: Meta) -> None:
        try:
            if not self._damaged:
                self.catalog.set_meta(meta)
        finally:
            self.catalog.close()
