"""Bringing workflows back: at the start those that were at work or became due, later those whose time comes.

1. The catalog knows who is due. A live workflow keeps its own time; its row, 0 or its alarm, is passed over here.
2. `floor_ms` is where to look from: everything due before it was tried. A workflow that leaves memory asleep lowers it.
3. Due rows are read a page at a time, as fast as they are activated (`dispatch.py`), so that neither memory nor the start
   depends on how many there are.
4. Trouble with the catalog is logged and tried again; it never ends the supervisor.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from perdure.actors.catalog import CatalogKeeper
from perdure.actors.residents import Residents
from perdure.storage import StorageError, Store
from perdure.workflow import Clock

__all__ = ["AlarmWatch"]

_PAGE: Final = 64
_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 30.0

_log = logging.getLogger("perdure.actors")


class AlarmWatch:
    """Activates dormant workflows when they are due."""

    def __init__(self, store: Store, keeper: CatalogKeeper, clock: Clock) -> None:
        self._store = store
        self._keeper = keeper
        self._clock = clock
        self._floor_ms = 0
        self._waiting = trio.CancelScope()

    def expect(self, alarm_ms: int) -> None:
        """A workflow went to sleep out of memory; it is to be woken then."""
        self._floor_ms = min(self._floor_ms, max(1, alarm_ms))
        self._waiting.cancel()

    def look_again(self) -> None:
        """The catalog was put right; whoever is due in it is due again."""
        self._floor_ms = 0
        self._waiting.cancel()

    @trio.lowlevel.enable_ki_protection
    async def run(self, residents: Residents) -> None:
        """Recover, then wake, for ever."""
        pause_s = _PAUSE_S
        while True:
            try:
                await self._activate_due(residents)
                pause_s = _PAUSE_S
                await self._until_next()
            except StorageError as error:
                _log.warning("the catalog fails, so workflows that are due wait %g seconds: %s", pause_s, error)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _until_next(self) -> None:
        """Wait until a dormant workflow is due, or the next one to be so may be another."""
        with trio.CancelScope() as self._waiting:
            await self._keeper.flush()  # who went to sleep during the look is in the catalog as one that is at work
            next_ms = await self._store.next_wake_ms(since_ms=self._floor_ms)
            if next_ms is None:
                await trio.sleep_forever()
            else:
                await self._clock.wait_until_ms(next_ms)

    async def _activate_due(self, residents: Residents) -> None:
        await self._keeper.flush()
        since_ms, after = self._floor_ms, None
        # Raised before the look: whoever goes to sleep meanwhile, due already, lowers it again.
        self._floor_ms = self._clock.now_ms() + 1
        try:
            while due := await self._store.find_due(self._clock.now_ms(), since_ms=since_ms, after=after, limit=_PAGE):
                for row in due:
                    if not residents.is_running(row.workflow_id) and not residents.is_held(row):
                        await residents.dispatcher.recover(row.workflow_id)
                since_ms, after = due[-1].next_wake_ms or 0, due[-1].workflow_id
        except BaseException:
            self._floor_ms = min(self._floor_ms, since_ms)
            raise
