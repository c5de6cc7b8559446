"""A workflow that is run in a nursery of the caller's, as a place to send messages to.

1. There is one activation at a time, and it is never closed to be loaded again, so nothing has to be held.
2. Once the run is over nobody reads: who waits for room or for a reply is sent away, and told to run the workflow again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from perdure.workflow.activation import Activation
from perdure.workflow.desk import Desk
from perdure.workflow.errors import WorkflowSuspendedError
from perdure.workflow.senders import ended_error, full_error

__all__ = ["LocalSite"]


class LocalSite:
    """Where one workflow is run.

    Args:
        usable: Gives its activation, and nothing else runs between its return and the next checkpoint.

    Attributes:
        desk: Where messages for it are handed in.
    """

    def __init__(self, usable: Callable[[], Awaitable[Activation]]) -> None:
        self._usable = usable
        self.desk: Desk = Desk(self)

    def open(self) -> None:
        """A run begins."""
        self.desk.senders.open()
        self.desk.askers.open()

    def close(self, activation: Activation, error: BaseException | None) -> None:
        """The run is over; after an error, what the activation says did not all become durable."""
        history = activation.history
        workflow_id, state = history.workflow_id, history.state
        desk = self.desk
        if state.is_terminal and error is None:
            desk.senders.close(lambda: ended_error(history))
            desk.askers.ask_to_look(workflow_id)  # which says that it has ended, if the reply is not there
            return
        why = "" if error is None else f" ({type(error).__name__}: {error})"
        desk.senders.close(lambda: full_error(workflow_id, activation.mailbox_limit))
        desk.askers.close(
            lambda: WorkflowSuspendedError(
                f"workflow {workflow_id!r} is {state.value} and not run here now{why}, so nobody replies; ask again with the "
                "same id once it has been run",
                workflow_id=workflow_id,
                state=state.value,
            )
        )

    def visiting(self, workflow_id: str) -> AbstractAsyncContextManager[Activation]:
        """See `Site`."""
        return self._visiting()

    @asynccontextmanager
    async def _visiting(self) -> AsyncGenerator[Activation]:
        yield await self._usable()

    async def ensure_running(self, workflow_id: str) -> None:
        """See `Site`. Whoever started the workflow runs it."""

    def hold(self, workflow_id: str) -> object:
        """See `Site`."""
        return None

    async def let_go(self, held: Any) -> None:
        """See `Site`."""
