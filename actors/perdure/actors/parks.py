"""Writing late parks: that a workflow waits, once it has waited for a while.

1. A workflow that parks right after it has recorded something, as between two messages, is durably `running` until then
   (`Activation.is_parked_late`). Should the process die meanwhile, it is activated at the next start and parks again:
   needlessly, but nothing is lost.
2. One task writes the parks of all workflows, `DELAY_S` or so after they began. So a wait costs no task and no timer, and
   a workflow that is sent one message after another seldom pays for a park.
3. Whoever tells the outside where a workflow stands, or takes it out of memory, has its park written first (`settled`,
   `close`); whoever looks at many through the catalog calls `flush`.
4. A write that fails ends its activation, whose run tells; here it goes on with the others.

Rejected: to write the park together with the catalog's row, some time later. The two are in different files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from perdure.workflow.activation import Activation
from perdure.workflow.failures import sole_exception

__all__ = ["DELAY_S", "LateParks"]

DELAY_S: Final = 0.2
"""How long a workflow waits, at least, before that is written, in seconds."""


class LateParks:
    """The workflows of one supervisor that have parked, and whose park is not written.

    Args:
        on_interrupt: Called with what came out of a hook and is meant for the program.
    """

    def __init__(self, on_interrupt: Callable[[BaseException], None]) -> None:
        self._on_interrupt = on_interrupt
        self._parked: dict[Activation, None] = {}
        self._has_some = trio.Event()

    def note(self, activation: Activation) -> None:
        """It has parked late; called each time."""
        self._parked[activation] = None
        if not self._has_some.is_set():
            self._has_some.set()

    async def flush(self) -> None:
        """Write what is parked now; the catalog's rows say so once the keeper has written them."""
        for activation in list(self._parked):
            await self._write(activation)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Write the parks of those that stay parked, for ever."""
        while True:
            await self._has_some.wait()
            await trio.sleep(DELAY_S)
            self._has_some = trio.Event()
            parked_by = trio.current_time() - DELAY_S
            for activation in list(self._parked):
                if activation.is_parked_late and (activation.quiet_since or 0.0) > parked_by:
                    self._has_some.set()  # it has just parked: later
                else:
                    await self._write(activation)

    async def _write(self, activation: Activation) -> None:
        self._parked.pop(activation, None)
        if activation.is_parked_late:
            try:
                await activation.settled()
            except Exception:
                return  # the activation is closed by it
            except trio.Cancelled:
                raise
            except BaseException as error:
                self._on_interrupt(sole_exception(error))
