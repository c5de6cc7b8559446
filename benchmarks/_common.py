"""What the benchmarks share: the machine they ran on, ratios measured in turns, and the raw SQLite twin.

The twin gets exactly the batches that the engine wrote, applies them with plain `sqlite3`, one transaction each, and
takes its PRAGMAs from a file that our driver made, so both sides do the same work at the same durability.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from perdure.storage import AlarmChange, Batch, Driver, NowaitDriver, SqliteDriver
from perdure.storage.layout import ALARM_KEY, encode_u64

PRAGMAS = ("page_size", "journal_mode", "synchronous", "locking_mode", "wal_autocheckpoint", "journal_size_limit")


def environment() -> dict[str, Any]:
    """The machine and the versions a figure depends on."""
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }


def report(question: str, **figures: Any) -> None:
    """Print one benchmark's answer as JSON."""
    json.dump({"question": question, **figures, "environment": environment()}, sys.stdout, indent=2)
    print()


def median(values: Sequence[float], digits: int = 3) -> float:
    """The median, rounded for reading."""
    return round(statistics.median(values), digits)


async def timed(work: Awaitable[Any]) -> float:
    """Seconds that the work takes."""
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


class RecordingDriver:
    """Passes everything on to a driver and keeps the batches."""

    def __init__(self, inner: Driver) -> None:
        self._inner = inner
        self.batches: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def batch(self, batch: Batch) -> None:
        """Keep the batch and apply it."""
        self.batches.append(batch)
        await self._inner.batch(batch)

    def batch_nowait(self, batch: Batch) -> bool:
        """The same without waiting, where the driver can."""
        done = isinstance(self._inner, NowaitDriver) and self._inner.batch_nowait(batch)
        if done:
            self.batches.append(batch)
        return done


async def pragmas_of(path: Path, durability: Any) -> dict[str, Any]:
    """What our driver sets on a file, read back through its own connection."""
    driver = await SqliteDriver.open(path, create=True, durability=durability)
    try:
        database = driver.database()
        return {name: database.execute(f"PRAGMA {name}").fetchone()[0] for name in PRAGMAS}
    finally:
        await driver.aclose()


class RawTwin:
    """Plain `sqlite3` with our PRAGMAs and our table."""

    def __init__(self, path: Path, pragmas: dict[str, Any]) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for name in (
            "page_size",
            "locking_mode",
            "journal_mode",
            "synchronous",
            "wal_autocheckpoint",
            "journal_size_limit",
        ):
            self._connection.execute(f"PRAGMA {name} = {pragmas[name]}")
        self._connection.execute("CREATE TABLE kv(key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        found = {name: self._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in PRAGMAS}
        assert found == pragmas, f"the twin runs with {found}, not with {pragmas}"

    def apply(self, batches: Sequence[Batch]) -> float:
        """Apply the batches, one transaction each; seconds."""
        execute, executemany = self._connection.execute, self._connection.executemany
        begun = time.perf_counter()
        for batch in batches:
            execute("BEGIN IMMEDIATE")
            for key in batch.deletes:
                execute("DELETE FROM kv WHERE key = ?", (key,))
            for start, end in batch.delete_ranges:
                execute("DELETE FROM kv WHERE key >= ? AND key < ?", (start, end))
            executemany(
                "INSERT INTO kv VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", batch.puts
            )
            self._apply_alarm(batch.alarm)
            execute("COMMIT")
        return time.perf_counter() - begun

    def _apply_alarm(self, alarm: AlarmChange | None) -> None:
        if alarm is None:
            return
        if alarm.wake_at_ms is None:
            self._connection.execute("DELETE FROM kv WHERE key = ?", (ALARM_KEY,))
        else:
            self._connection.execute(
                "INSERT OR REPLACE INTO kv VALUES (?, ?)", (ALARM_KEY, encode_u64(alarm.wake_at_ms))
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


async def in_turns(rounds: int, *sides: Callable[[], Awaitable[float]]) -> list[list[float]]:
    """Measure each side in turn, so that a change of the machine's mood meets them all; seconds by side and round.

    A first round warms up (imports, the adaptive interpreter, the disk's own state) and does not count.
    """
    for side in sides:
        await side()
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, measured in zip(sides, seconds, strict=True):
            measured.append(await side())
    return seconds
