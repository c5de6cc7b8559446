"""Young workflows living at once in a store, drawn from a seed, and what of them must be there after a crash.

1. What a namespace holds says which batches made it: their lineage is in it, and each leaves something of its own. So a batch
   that is missing among others, or is there by half, is seen.
2. What the program was told is noted in marks; from them alone follows what may be found (`allowed`).
3. The journal is made small (`small_journal`), so that within a few operations its segments change, it is relieved, and
   workflows outgrow it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from file_stores import row

from perdure.storage import journal, layout, young_driver
from perdure.storage.driver import AlarmChange, Batch, Driver
from perdure.storage.errors import (
    BatchRefusedError,
    CommitUnknownError,
    NamespaceNotFoundError,
    ValueTooLargeError,
)
from perdure.storage.file_store import FileStore
from perdure.storage.memory import MemoryDriver
from perdure.storage.sqlite_connection import Durability

__all__ = ["IDS", "Lineage", "Lives", "Mark", "allowed", "batch_of", "found", "small_journal"]

IDS = ("a", "b", "c", "d")
LINEAGE_KEY = b"\x98"
OWN_PREFIX = b"\x99"

Lineage: TypeAlias = tuple[int, ...]
"""Which life of its id a workflow is, and its batches, by numbers of which there is one in a program."""

After: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Mark:
    """What the program begins, or was told.

    Attributes:
        workflow_id: Of which workflow.
        kind: `begun`, `done`, or `safe`: done, and durable at either durability.
        lineage: What is there once it is done; `None` once it is deleted.
    """

    workflow_id: str
    kind: str
    lineage: Lineage | None


def small_journal(patch: pytest.MonkeyPatch) -> None:
    """Make everything of the journal small."""
    patch.setattr(journal, "SEGMENT_BYTES", 1_500)
    patch.setattr(journal, "RECORD_BYTES_MAX", 900)
    patch.setattr(journal, "_SEGMENTS_MAX", 3)
    patch.setattr(young_driver, "JOURNALED_BYTES_MAX", 1_200)


def batch_of(workflow_id: str, lineage: Lineage) -> Batch:
    """The last batch of a lineage."""
    *_, number = lineage
    draw = random.Random(number)
    batch = Batch(
        puts=[(LINEAGE_KEY, json.dumps(lineage).encode()), (_own(number), draw.randbytes(draw.randrange(200)))]
    )
    if len(lineage) == 2:
        batch.puts += [
            (layout.WORKFLOW_ID_KEY, workflow_id.encode()),
            (layout.WORKFLOW_TYPE_KEY, b"order"),
            (layout.STATE_KEY, b"running"),
        ]
    if number % 3 == 0:
        batch.deletes.append(_own(lineage[-2]))
    if number % 5 == 0:
        batch.delete_ranges.append((_own(0), _own(max(0, number - 9))))
    if number % 11 == 0:
        batch.delete_prefixes.append(_own(lineage[-2])[:-1])
    if number % 2:
        batch.alarm = AlarmChange(workflow_id, number if number % 7 else None)
    if number % 13 == 0:
        batch.puts.append((_own(number) + b"large", bytes(2_000)))  # more than the journal takes
    return batch


def _own(number: int) -> bytes:
    return OWN_PREFIX + number.to_bytes(4, "big")


def contents(workflow_id: str, lineage: Lineage) -> list[tuple[bytes, bytes]]:
    """What these batches make, one after another."""
    made = MemoryDriver()
    for end in range(2, len(lineage) + 1):
        made.batch_nowait(batch_of(workflow_id, lineage[:end]))
    return sorted(made.data.items())


async def read(driver: Driver, workflow_id: str) -> Lineage:
    """Which batches made a namespace, and nothing else did; `()` if none did."""
    pairs = list(await driver.list(b""))
    if not pairs:
        return ()
    lineage = tuple(json.loads(dict(pairs)[LINEAGE_KEY]))
    assert pairs == contents(workflow_id, lineage), (workflow_id, lineage)
    return lineage


async def found(store: FileStore, workflow_id: str) -> Lineage | str | None:
    """What is there of a workflow; its row is there if and only if it is. A text says that its file was lost."""
    row = await store.get_row(workflow_id)
    try:
        driver = await store.open_driver(workflow_id)
    except NamespaceNotFoundError as error:
        return f"missed: {error}" if error.path is not None or row is not None else None
    try:
        assert row is not None
        assert row.problem is None
        return await read(driver, workflow_id)
    finally:
        await driver.aclose()


def has_file(store: FileStore, workflow_id: str) -> bool:
    """Whether a workflow is no longer young."""
    return os.path.exists(store.path_of(workflow_id))


def allowed(
    marks: Iterable[Mark], workflow_id: str, durability: Durability, *, is_power_lost: bool
) -> set[Lineage | None]:
    """What may be there of a workflow, given what the program had been told.

    A workflow without a batch is there as `()`, and a rebuilt catalog has none of it.
    """
    may_be: set[Lineage | None] = {None}
    safe = 0
    for mark in marks:
        if mark.workflow_id != workflow_id:
            continue
        lineage = mark.lineage
        if mark.kind == "begun":
            may_be.add(lineage)
        elif lineage is None or not is_power_lost or durability == "full":
            may_be = {lineage}
        else:
            safe = len(lineage) if mark.kind == "safe" else min(safe, len(lineage))
            # Only a suffix may be missing.
            may_be = {lineage[:end] for end in range(max(safe, 1), len(lineage) + 1)}
        if lineage is None:
            safe = 0
        if any(each is not None and len(each) == 1 for each in may_be):
            may_be = {None if each is None else () if len(each) == 1 else each for each in may_be} | {None}
    return may_be


class Lives:
    """A program that makes, changes, closes, opens and deletes workflows.

    Args:
        seed: Draws what it does.
        note: Takes a mark.

    Attributes:
        there: What is acknowledged of each workflow that is there.
        unsettled: Workflows whose deletion failed: there whole, or gone.
        refused: How many operations failed.
    """

    def __init__(self, seed: int, note: Callable[[Mark], None]) -> None:
        self._draw = random.Random(seed)
        self._note = note
        self._numbers = 0
        self._drivers: dict[str, Driver] = {}
        self.there: dict[str, Lineage] = {}
        self.unsettled: set[str] = set()
        self.refused = 0

    async def live(
        self, store: FileStore, operations: int, *, errors: tuple[type[Exception], ...] = (), after: After | None = None
    ) -> None:
        """Do so many operations, one after another.

        Args:
            store: Where; after another, whose drivers were closed with it.
            operations: How many.
            errors: With what they may fail.
            after: Called after each.
        """
        self._drivers = {}
        for _ in range(operations):
            try:
                await self._operate(store, self._draw.choice(IDS))
            except errors:
                self.refused += 1
            if after is not None:
                await after()

    async def close(self) -> None:
        """Close all drivers."""
        for workflow_id in list(self._drivers):
            await self._close(workflow_id)

    async def _operate(self, store: FileStore, workflow_id: str) -> None:
        chance = self._draw.random()
        if workflow_id in self.unsettled or (
            workflow_id in self.there and self._is_closed(workflow_id) and chance < 0.4
        ):
            await self._delete(store, workflow_id)
        elif workflow_id not in self.there:
            await self.make(store, workflow_id)
        elif self._is_closed(workflow_id):
            self._drivers[workflow_id] = await store.open_driver(workflow_id)
            await self._look(workflow_id)
        elif chance < 0.16:
            await self._close(workflow_id)
            if chance < 0.08:  # before a sync for another makes it durable that it has its file
                await self._delete(store, workflow_id)
        elif chance < 0.21:
            await self._refuse(workflow_id)
        else:
            await self.change(store, workflow_id)

    def _is_closed(self, workflow_id: str) -> bool:
        return workflow_id not in self._drivers

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def make(self, store: FileStore, workflow_id: str) -> None:
        """Make a workflow."""
        lineage = (self._number(),)
        self._note(Mark(workflow_id, "begun", lineage))
        self._drivers[workflow_id], is_new = await store.create_driver(row(workflow_id))
        assert is_new
        self.there[workflow_id] = lineage

    async def change(self, store: FileStore, workflow_id: str) -> None:
        """Write a batch."""
        driver = self._drivers[workflow_id]
        lineage = (*self.there[workflow_id], self._number())
        self._note(Mark(workflow_id, "begun", lineage))
        try:
            await driver.batch(batch_of(workflow_id, lineage))
        except BatchRefusedError:
            await self._look(workflow_id)
            raise
        except CommitUnknownError:
            del self._drivers[workflow_id]
            await driver.aclose()
            self._drivers[workflow_id] = await store.open_driver(workflow_id)
            if await read(self._drivers[workflow_id], workflow_id) == lineage:
                self.there[workflow_id] = lineage
            await self._look(workflow_id)
            return
        self.there[workflow_id] = lineage
        # The first batch in the journal is durable at either durability.
        is_safe = len(lineage) == 2 and not has_file(store, workflow_id)
        self._note(Mark(workflow_id, "safe" if is_safe else "done", lineage))
        await self._look(workflow_id)

    async def _refuse(self, workflow_id: str) -> None:
        batch = batch_of(workflow_id, (*self.there[workflow_id], self._number()))
        batch.puts.append((b"\x9a", bytes(1_000_000)))
        with pytest.raises(ValueTooLargeError):
            await self._drivers[workflow_id].batch(batch)

    async def _close(self, workflow_id: str) -> None:
        await self._drivers.pop(workflow_id).aclose()
        if len(self.there[workflow_id]) > 1:
            self._note(Mark(workflow_id, "safe", self.there[workflow_id]))

    async def _delete(self, store: FileStore, workflow_id: str) -> None:
        self._note(Mark(workflow_id, "begun", None))
        self.unsettled.add(workflow_id)
        self.there.pop(workflow_id, None)
        await store.delete(workflow_id)
        self.unsettled.discard(workflow_id)
        self._note(Mark(workflow_id, "done", None))

    async def _look(self, workflow_id: str) -> None:
        """What is read is what was acknowledged."""
        there = self.there[workflow_id]
        assert await read(self._drivers[workflow_id], workflow_id) == (there if len(there) > 1 else ())

    def check(self, what: dict[str, Any]) -> None:
        """What was found in order is what was acknowledged."""
        for workflow_id, lineage in what.items():
            if workflow_id not in self.unsettled:
                there = self.there.get(workflow_id)
                assert lineage in ({there} if there is None or len(there) > 1 else {(), None}), workflow_id
