"""What becomes of a call to a supervisor that leaves its block, when the code of one of its own workflows made it.

1. Whoever asks from outside is told: `SupervisorClosedError`, or `WorkflowSuspendedError` for a result.
2. A workflow that is hosted here leaves as well, and its step has not failed by that. Nothing is recorded: the call does not
   return, the step counts as resting, the workflow is evicted once its other steps have ended, and goes on at the next start,
   where the step runs again. An `at_most_once` step was begun, so its outcome is unknown then, as after a crash.
3. A task that a step has left behind belongs to no step any more, and is told like everybody else.

Rejected: to let the error out and not to count it. The step's code may have caught it and gone on with something else.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from perdure.actors.errors import SupervisorClosedError
from perdure.workflow import WorkflowSuspendedError
from perdure.workflow.step import rest

if TYPE_CHECKING:
    from perdure.actors.residents import Residents

__all__ = ["rests_with_host"]

MethodT = TypeVar("MethodT", bound=Callable[..., Coroutine[Any, Any, Any]])


class _Front(Protocol):
    _residents: Residents


def rests_with_host(method: MethodT) -> MethodT:
    """Let the method's caller rest, instead of an error, if it is code of a workflow that leaves with this supervisor."""

    @wraps(method)
    async def call(self: _Front, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except (SupervisorClosedError, WorkflowSuspendedError):
            residents = self._residents  # pyright: ignore[reportPrivateUsage]
            actor = residents.calling_actor()
            if actor is not None and residents.is_closing:
                await rest(actor.activation)
            raise

    return cast("MethodT", call)
