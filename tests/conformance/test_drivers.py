"""Every driver under the one suite that users run on theirs (S38)."""

import itertools
from pathlib import Path

import pytest

from perdure.storage.conformance import DriverConformance
from perdure.storage.driver import Batch, Driver
from perdure.storage.errors import BatchRefusedError
from perdure.storage.memory import MemoryDriver
from perdure.storage.sqlite import CommitIn, SqliteDriver
from perdure.storage.sqlite_connection import Durability


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
