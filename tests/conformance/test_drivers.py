"""Every driver under the one suite that users run on theirs (S38)."""

import itertools
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from value_codecs import SealedCodec

from perdure.storage import young_driver
from perdure.storage.codec import CODED_BYTES_MAX
from perdure.storage.coded_driver import CodedDriver
from perdure.storage.conformance import DriverConformance
from perdure.storage.driver import VALUE_BYTES_MAX, Batch, Driver
from perdure.storage.errors import BatchRefusedError, ValueTooLargeError
from perdure.storage.file_store import FileStore
from perdure.storage.memory import MemoryDriver
from perdure.storage.sqlite import CommitIn, SqliteDriver
from perdure.storage.sqlite_connection import Durability
from perdure.storage.store import CatalogRow
from perdure.storage.young_driver import YoungDriver


class MemoryConformance(DriverConformance):
    driver_kind = "memory"
    atomic_batch = True

    async def open_driver(self) -> MemoryDriver:
        return MemoryDriver(atomic_batch=self.atomic_batch)

    async def reopen(self, driver: Driver) -> MemoryDriver:
        assert isinstance(driver, MemoryDriver)
        await driver.aclose()
        return MemoryDriver(driver.data, atomic_batch=self.atomic_batch)


class TestMemoryDriver(MemoryConformance):
    pass


class TestMemoryDriverThatIsNotAtomic(MemoryConformance):
    atomic_batch = False

    async def test_it_refuses_what_must_be_cut(self):
        """S38: more than 128 entries or 976 KiB, with nothing written."""
        driver = await self.open_driver()
        for puts in ([(b"%d" % index, b"") for index in range(129)], [(b"a", bytes(976 * 1024))]):
            with pytest.raises(BatchRefusedError, match="use commit_batch"):
                await driver.batch(Batch(puts=puts))
        assert driver.data == {}


class SqliteConformance(DriverConformance):
    driver_kind = "sqlite"
    durability: Durability = "full"
    commit_in: CommitIn = "auto"
    checkpoint_on_close = True
    value_bytes_max = VALUE_BYTES_MAX

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.numbers = itertools.count()

    async def open_driver(self) -> SqliteDriver:
        path = self.directory / f"{next(self.numbers)}.sqlite"
        return await self._open(str(path))

    async def reopen(self, driver: Driver) -> SqliteDriver:
        assert isinstance(driver, SqliteDriver)
        await driver.aclose()
        return await self._open(driver.path)

    async def _open(self, path: str) -> SqliteDriver:
        return await SqliteDriver.open(
            path,
            create=True,
            durability=self.durability,
            commit_in=self.commit_in,
            checkpoint_on_close=self.checkpoint_on_close,
            value_bytes_max=self.value_bytes_max,
        )


class TestSqliteDriverByDefault(SqliteConformance):
    pass


class TestSqliteDriverFullInline(SqliteConformance):
    durability = "full"
    commit_in = "inline"


class TestSqliteDriverFullInThreads(SqliteConformance):
    durability = "full"
    commit_in = "thread"


class TestSqliteDriverNormal(SqliteConformance):
    durability = "normal"
    commit_in = "auto"


class TestSqliteDriverNormalInline(SqliteConformance):
    durability = "normal"
    commit_in = "inline"


class TestSqliteDriverNormalInThreads(SqliteConformance):
    durability = "normal"
    commit_in = "thread"


class TestSqliteDriverThatKeepsItsLog(SqliteConformance):
    checkpoint_on_close = False


class YoungConformance(DriverConformance):
    """On workflows that were born in the journal; `reopen` is a `kill -9`, and what the next process finds."""

    driver_kind = "young"
    durability: Durability = "full"
    commit_in: CommitIn = "auto"
    journaled_bytes_max = young_driver.JOURNALED_BYTES_MAX

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(young_driver, "JOURNALED_BYTES_MAX", self.journaled_bytes_max)
        self.directory = tmp_path
        self.stores: list[FileStore] = []

    async def open_driver(self) -> YoungDriver:
        store = await self._acquire(self._next_place())
        driver, is_new = await store.create_driver(CatalogRow("w", "t", "pending", None, False, 1, 1))
        assert is_new
        assert isinstance(driver, YoungDriver)
        return driver

    async def reopen(self, driver: Driver) -> Driver:
        assert isinstance(driver, YoungDriver)
        left = shutil.copytree(Path(driver.path).parents[1], self._next_place())
        await driver.aclose()
        store = await self._acquire(left)
        return await store.open_driver("w")

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[Driver, None]:
        before = len(self.stores)
        try:
            async with super()._opened() as driver:
                yield driver
        finally:
            for store in self.stores[before:]:
                await store.aclose()

    def _next_place(self) -> Path:
        return self.directory / f"data-{len(self.stores)}"

    async def _acquire(self, data: Path) -> FileStore:
        store = FileStore(data, durability=self.durability, commit_in=self.commit_in)
        self.stores.append(store)
        await store.acquire()
        return store


class TestYoungDriver(YoungConformance):
    pass


class TestYoungDriverInline(YoungConformance):
    commit_in = "inline"


class TestYoungDriverInThreads(YoungConformance):
    commit_in = "thread"


class TestYoungDriverNormal(YoungConformance):
    durability = "normal"


class TestYoungDriverThatMoves(YoungConformance):
    """With its second batch or so."""

    journaled_bytes_max = 60


class TestYoungDriverThatMovesInline(YoungConformance):
    commit_in = "inline"
    journaled_bytes_max = 60


class TestYoungDriverThatMovesInThreads(YoungConformance):
    commit_in = "thread"
    journaled_bytes_max = 60


ROOM = SealedCodec.overhead_bytes + CODED_BYTES_MAX


class CodedConformance(DriverConformance):
    driver_kind = "memory"
    atomic_batch = True

    async def open_driver(self) -> CodedDriver:
        return self._coded({})

    async def reopen(self, driver: Driver) -> CodedDriver:
        assert isinstance(driver, CodedDriver)
        assert isinstance(driver.inner, MemoryDriver)
        await driver.aclose()
        return self._coded(driver.inner.data)

    def _coded(self, data: dict[bytes, bytes]) -> CodedDriver:
        inner = MemoryDriver(data, atomic_batch=self.atomic_batch, value_bytes_max=VALUE_BYTES_MAX + ROOM)
        return CodedDriver(inner, SealedCodec(), "w")


class TestCodedDriver(CodedConformance):
    pass


class TestCodedDriverThatIsNotAtomic(CodedConformance):
    """What it takes is smaller than for others by what coding adds, since a piece of a batch has a fixed limit."""

    atomic_batch = False

    async def test_it_is_a_driver(self) -> None:
        """S38: it has every method and property of the contract."""
        driver = await self.open_driver()
        assert isinstance(driver, Driver)
        assert driver.value_bytes_max == VALUE_BYTES_MAX - ROOM

    async def test_the_largest_value_is_taken_and_one_byte_more_is_not(self) -> None:
        """S38: as large as it says, and nothing is written of what is larger."""
        driver = await self.open_driver()
        await driver.set(b"key", bytes(driver.value_bytes_max))
        with pytest.raises(ValueTooLargeError):
            await driver.batch(Batch(puts=[(b"a", b""), (b"key", bytes(driver.value_bytes_max + 1))]))
        assert await driver.list(b"") == [(b"key", bytes(driver.value_bytes_max))]

    async def test_a_batch_of_the_common_limits_is_taken_by_every_driver(self) -> None:
        """S38: 128 entries, or as many bytes as fit."""
        driver = await self.open_driver()
        await driver.batch(Batch(puts=[(b"%d" % number, b"") for number in range(128)]))
        await driver.batch(Batch(puts=[(b"k" * 24, bytes(driver.value_bytes_max - 24))]))
        assert len(await driver.list(b"")) == 129


class TestCodedDriverOverAFile(SqliteConformance):
    value_bytes_max = VALUE_BYTES_MAX + ROOM

    async def open_driver(self) -> CodedDriver:  # type: ignore[override]
        return CodedDriver(await super().open_driver(), SealedCodec(), "w")

    async def reopen(self, driver: Driver) -> CodedDriver:  # type: ignore[override]
        assert isinstance(driver, CodedDriver)
        return CodedDriver(await super().reopen(driver.inner), SealedCodec(), "w")
