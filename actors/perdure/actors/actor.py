"""An actor: one workflow that is in memory, with the driver that makes it the only writer.

1. An actor is made by bringing a workflow in, and is gone once its driver is closed. In between it runs at most once.
2. Whoever uses an actor holds it (`in_use`); it is closed only when nobody does, so no operation meets a closed driver.
3. How its run ended is kept here for whoever waits, so a thousand waiters cost one look at the file.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import trio

from perdure.actors.catalog import CatalogedDriver
from perdure.actors.slots import Place
from perdure.workflow import Context, Workflow, WorkflowState
from perdure.workflow.activation import Activation, Closing
from perdure.workflow.control import cancel
from perdure.workflow.logs import fields_of
from perdure.workflow.run import ending_error
from perdure.workflow.typed import decode_output

__all__ = ["Actor", "hosted_actor"]

hosted_actor: ContextVar[Actor | None] = ContextVar("perdure_hosted_actor", default=None)
"""The actor whose workflow's code is running."""

_log = logging.getLogger("perdure.actors")


class Actor:
    """A workflow in memory.

    Attributes:
        definition: Its function, or `None` when none is registered under its name.
        is_started: Whether its function was begun.
        is_passivated: Whether it leaves since it was idle, and not since somebody asked for that.
        in_use: How many operations hold it.
        error: The fault or trouble that ended its run, if one did.
        stopped: Set once it is gone.
        waiting_scope: Cancelled when it need not wait for its turn any more (`suspects.py`).
        place: The place that it takes (`slots.py`).
        lendings: How many of its steps wait for other workflows.
        has_lent: Whether it lends its place to them.
    """

    def __init__(
        self, workflow_id: str, driver: CatalogedDriver, activation: Activation, definition: Workflow[Any, Any] | None
    ) -> None:
        self.workflow_id = workflow_id
        self.driver = driver
        self.activation = activation
        self.definition = definition
        self.is_started: bool = False
        self.is_leaving: bool = False
        self.is_passivated: bool = False
        self.in_use: int = 0
        self.error: BaseException | None = None
        self.stopped: trio.Event = trio.Event()
        self.waiting_scope: trio.CancelScope = trio.CancelScope()
        self.place: Place | None = None
        self.lendings: int = 0
        self.has_lent: bool = False
        self._is_unused = trio.Event()

    @property
    def can_run(self) -> bool:
        """Whether its function is to be begun: it is known, due and not begun yet, and the workflow has not ended."""
        return (
            not self.is_started
            and self.definition is not None
            and self.activation.closing is None
            and self.activation.is_due
            and not self.activation.history.state.is_terminal
        )

    @property
    def function(self) -> Callable[[Context, Any], Awaitable[Any]] | None:
        """Its function, if that is known."""
        return None if self.definition is None else self.definition.function

    @property
    def log_fields(self) -> dict[str, object]:
        """What log records about it carry."""
        return fields_of(self.activation.history)

    @property
    def is_usable(self) -> bool:
        """Whether operations may be given to it: it is not leaving, nor evicted or in trouble and about to leave."""
        closing = self.activation.closing
        if closing is None or closing is Closing.EXPIRED:  # that ends the workflow, and may be followed by a rollback
            return not self.is_leaving
        return not self.is_leaving and closing is Closing.CANCELLED and not self.is_started

    @property
    def is_mail_wanted(self) -> bool:
        """Whether it sleeps, durably as well, over a message that it waits for."""
        return self.activation.history.state is WorkflowState.SLEEPING and self.activation.has_wanted_mail

    def evict(self) -> None:
        """Take it out of memory as soon as its function has unwound."""
        self.activation.evict()
        self.waiting_scope.cancel()

    def drain(self) -> None:
        """Take it out of memory as soon as no step's function runs."""
        self.activation.drain()
        self.waiting_scope.cancel()

    async def cancel(self) -> None:
        """End the workflow as cancelled; durable on return."""
        self.waiting_scope.cancel()
        await cancel(self.activation)

    def move_to(self, place: Place) -> None:
        """Own a place, and give back the one that it had."""
        place.is_owned = True
        if self.place is not None:
            self.place.give_back()
        self.place = place

    def hold(self) -> None:
        """Keep it from being closed."""
        self.in_use += 1

    def release(self) -> None:
        """Let it be closed."""
        self.in_use -= 1
        if self.in_use == 0:
            self._is_unused.set()

    @trio.lowlevel.disable_ki_protection
    async def run(self) -> None:
        """Run the function to its end. Errors are kept; `BaseException`s come out."""
        assert self.definition is not None, "only a registered workflow is started"
        try:
            await self.activation.run(self.definition.function, mode="live")
        except Exception as error:
            self.error = error
        finally:
            self.is_leaving = True

    async def close(self) -> None:
        """Close the driver, once nobody holds the actor. Not interrupted by cancellation."""
        with trio.CancelScope(shield=True):
            while self.in_use:
                self._is_unused = trio.Event()
                await self._is_unused.wait()
            try:
                self.driver.settle()
                await self.driver.aclose()
            except Exception as error:
                _log.warning(
                    "workflow %r: its storage did not close: %s", self.workflow_id, error, extra=self.log_fields
                )
            finally:
                if self.place is not None:
                    self.place.give_back()
                self.stopped.set()

    @property
    def is_ended(self) -> bool:
        """Whether the workflow has ended, durably."""
        return self.error is None and self.activation.history.state.is_terminal

    def result(self) -> Any:
        """What an ended workflow returned.

        Raises:
            WorkflowFailedError: It failed.
            WorkflowCancelledError: It was cancelled.
            StoredValueError: The function's annotation says another type than that of what is stored.
        """
        error = ending_error(self.activation)
        if error is not None:
            raise error
        return decode_output(self.function, self.activation.history.output)
