"""The namespace that belongs to the supervisor: opened when it is first needed, and again after a fault.

1. Nothing is made for a supervisor that keeps nothing.
2. A batch is durable on return. Whatever else comes out of it but a refusal leaves open whether it was written: the driver
   is closed, `generation` goes up, and whoever keeps in memory what is in there reads it again.
3. Batches are written one at a time, in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from perdure.storage import Batch, BatchRefusedError, Driver, NamespaceNotFoundError, StorageError, Store

__all__ = ["OwnNamespace"]


class OwnNamespace:
    """What a supervisor keeps for itself.

    Args:
        store: Where it is.

    Attributes:
        generation: Goes up when what was read may not be what is stored.
    """

    def __init__(self, store: Store) -> None:
        self.generation: int = 0
        self._store = store
        self._driver: Driver | None = None
        self._lock = trio.Lock()

    async def get(self, key: bytes) -> bytes | None:
        """The value at a key, or `None`."""
        async with self._lock:
            driver = await self._opened(create=False)
            return None if driver is None else await driver.get(key)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Every pair whose key starts with the prefix, in order."""
        async with self._lock:
            driver = await self._opened(create=False)
            return [] if driver is None else await driver.list(prefix)

    async def batch(self, batch: Batch) -> None:
        """Apply a batch, durably; not interrupted by cancellation once it has begun."""
        async with self._lock:
            with trio.CancelScope(shield=True):
                driver = await self._opened(create=True)
                assert driver is not None, "it is made"
                try:
                    await driver.batch(batch)
                except BatchRefusedError:
                    raise
                except StorageError:
                    self.generation += 1
                    await self._drop()
                    raise

    async def aclose(self) -> None:
        """Close it; it is opened again if it is used again."""
        async with self._lock:
            await self._drop()

    async def _opened(self, *, create: bool) -> Driver | None:
        if self._driver is None:
            try:
                self._driver = await self._store.open_own(create=create)
            except NamespaceNotFoundError:
                return None
        return self._driver

    async def _drop(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            await driver.aclose()
