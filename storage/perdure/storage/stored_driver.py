"""What a store knows of the drivers it gave out.

A driver is over when its caller closed it, and also when it gave itself up after a commit of unknown outcome: the
caller is then told to open another, and must not have to close the dead one first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from perdure.storage.driver import Driver
from perdure.storage.errors import StoreBusyError
from perdure.storage.sqlite import SqliteDriver

__all__ = ["HeldDriver", "Slot", "StoredDriver"]


class HeldDriver(Driver, Protocol):
    """What a store gives out."""

    when_closed: Callable[[], None] | None
    """Called when the driver is over."""

    @property
    def path(self) -> str:
        """The file."""
        ...

    @property
    def is_given_up(self) -> bool:
        """Whether the workflow is free for another driver: this was closed, or gave up after a commit of unknown outcome."""
        ...

    async def has_any(self, prefix: bytes) -> bool:
        """Whether any key starts with `prefix`."""
        ...

    async def backup(self, target: str | os.PathLike[str]) -> None:
        """Write a copy to `target`; see `SqliteDriver.backup`."""
        ...


class StoredDriver(SqliteDriver):
    """A driver that tells its store when it is over."""

    when_closed: Callable[[], None] | None = None
    _closings = 0

    @property
    def is_given_up(self) -> bool:
        """Whether the file is free for another driver: closed, or given up after a commit of unknown outcome."""
        return not self._closings and not self._namespace.is_open

    async def aclose(self) -> None:
        """Close the file; see `SqliteDriver.aclose`."""
        self._closings += 1
        try:
            await super().aclose()
        finally:
            self._closings -= 1
            if self.when_closed is not None and self.is_given_up:
                self.when_closed()


@dataclass(slots=True)
class Slot:
    """One workflow whose file is in use.

    Attributes:
        turn: Held while the file is opened, deleted or copied.
        driver: The driver that was given out last.
        users: How many tasks have or wait for the turn.
    """

    turn: trio.Lock = field(default_factory=trio.Lock)
    driver: HeldDriver | None = None
    users: int = 0

    @property
    def held(self) -> HeldDriver | None:
        """The driver that has the file, if there is one."""
        return None if self.driver is None or self.driver.is_given_up else self.driver

    @property
    def is_idle(self) -> bool:
        """Whether the slot can be forgotten."""
        return self.users == 0 and self.held is None

    def check_free(self, workflow_id: str) -> None:
        """Make sure that no driver has the file.

        Raises:
            StoreBusyError: One has.
        """
        if self.held is not None:
            raise StoreBusyError(
                f"workflow {workflow_id!r:.200} is already open; use that driver, or close it first",
                path=self.held.path,
            )
