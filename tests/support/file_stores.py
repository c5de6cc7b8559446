"""What the tests of the file store share: stores opened on a simulated start of the machine, and workflows in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from perdure.storage import Batch, CatalogRow, layout, schema
from perdure.storage.directory import Host
from perdure.storage.file_store import FileStore


@asynccontextmanager
async def opened(data: Path, boot_id: str | None = "boot-1", **options: Any) -> AsyncIterator[FileStore]:
    store = FileStore(data, host=Host(boot_id=lambda: boot_id, now_ms=lambda: 5_000), **options)
    await store.acquire()
    try:
        yield store
    finally:
        await store.aclose()


def row(workflow_id: str, **changes: Any) -> CatalogRow:
    return replace(CatalogRow(workflow_id, "order", "pending", 0, False, 1_000, 2_000), **changes)


async def spawn(
    store: FileStore,
    workflow_id: str,
    *,
    state: str = "running",
    alarm: int | None = None,
    mail: bool = False,
    in_one: bool = True,
) -> CatalogRow:
    """Make a workflow as a supervisor does: its row and its namespace, its first batch, its row again.

    With `in_one` the store writes the row as it makes the namespace, as this store can; otherwise the row comes before.
    """
    if in_one:
        driver, _ = await store.create_driver(row(workflow_id))
    else:
        await store.put_rows([row(workflow_id)])
        driver = await store.open_driver(workflow_id, create=True)
    batch = Batch(
        puts=[
            (layout.WORKFLOW_ID_KEY, workflow_id.encode()),
            (layout.WORKFLOW_TYPE_KEY, b"order"),
            (layout.STATE_KEY, state.encode()),
            (layout.CREATED_AT_KEY, layout.encode_u64(1_000)),
            (b"\x99", workflow_id.encode()),
        ]
    )
    if alarm is not None:
        batch.puts.append((layout.ALARM_KEY, layout.encode_u64(alarm)))
    if mail:
        message = schema.encode_message(schema.MailboxMessage("m", "n", b"\xf6", 1))
        batch.puts.append((layout.message_key(1), message))
    await driver.batch(batch)
    await driver.aclose()
    wake = alarm if state == "sleeping" else 0 if state == "running" else None
    final = row(workflow_id, state=state, next_wake_ms=wake, mail_waiting=mail)
    await store.put_rows([final])
    return final


async def read(store: FileStore, workflow_id: str) -> bytes | None:
    driver = await store.open_driver(workflow_id)
    try:
        return await driver.get(b"\x99")
    finally:
        await driver.aclose()


def damage(path: str | Path, how: str) -> bytes:
    """Spoil a file; what it was."""
    content = Path(path).read_bytes()
    if how == "garbage":
        Path(path).write_bytes(b"garbage " * 2_000)
    elif how == "short":
        Path(path).write_bytes(content[: len(content) // 2])
    elif how == "empty":
        Path(path).write_bytes(b"")
    return content
