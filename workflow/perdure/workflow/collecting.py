"""Running a workflow's function for its handlers only: which completed steps can be undone, and by what.

1. Every operation gives what is recorded, as on replay, and adds what would undo it. What is not recorded, or not finished,
   ends that run or, inside of something finished, the running of that: `Operation.check_is_next` raises the signal.
2. What is finished is no unit here. The functions of settled branches (of a decided race: of the winner) and the bodies of
   retained iterations run once more over what they recorded, one after another; what they come to is on record already.
3. Only an iteration whose starting state is stored can run once more. It is stored for those in which there is something to
   undo, with the loop's advance, and forgotten with the iteration.
4. Nothing is written, not even a name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from perdure.storage.schema import EntryMetadata
from perdure.workflow.errors import FaultError, SuspendSignal
from perdure.workflow.history import History

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation
    from perdure.workflow.context import Context
    from perdure.workflow.scope import Scope
    from perdure.workflow.step import Compensation

__all__ = ["collect", "revisit"]


async def collect(activation: Activation, function: Callable[[Context, Any], Awaitable[Any]]) -> list[Compensation]:
    """What is to be undone, in the order in which to do it. Incomplete if the activation was closed meanwhile.

    Raises:
        FaultError: The code does not fit its history.
    """
    collected: list[Compensation] = []
    activation.collected = collected
    activation.history.is_frozen = True
    try:
        await activation.call(function)
    finally:
        activation.collected = None
        activation.history.is_frozen = False
    return _in_order(activation.history, collected)


def _in_order(history: History, collected: list[Compensation]) -> list[Compensation]:
    """What is not undone yet, last completed first.

    The reference engine gives its steps no number, only a time: they come after the numbered ones that had completed then.
    """
    found: list[tuple[int, int, bool]] = []
    for compensation in collected:
        metadata = history.metadata(compensation.entry_id) or EntryMetadata()
        sequence = history.detail(compensation.entry_id).get("completed", 0)
        found.append((sequence, metadata.completed_at_ms or 0, metadata.rollback_completed_at_ms is None))
    numbered = sorted((completed_at_ms, sequence) for sequence, completed_at_ms, _ in found if sequence)
    times = [completed_at_ms for completed_at_ms, _ in numbered]
    latest = [0, *accumulate((sequence for _, sequence in numbered), max)]
    keyed: list[tuple[tuple[int, int, int], Compensation]] = []
    for index, (sequence, completed_at_ms, is_due) in enumerate(found):
        if is_due:
            key = (
                (sequence, 0, 0) if sequence else (latest[bisect_right(times, completed_at_ms)], completed_at_ms, index)
            )
            keyed.append((key, collected[index]))
    keyed.sort(key=lambda pair: pair[0], reverse=True)
    return [compensation for _, compensation in keyed]


async def revisit(scope: Scope, call: Callable[[], Awaitable[object]]) -> None:
    """Run the function of something finished once more, in the scope over which it ran; what it comes to does not count.

    Raises:
        FaultError: It does not fit what it recorded.
        SuspendSignal: The activation was closed.
    """
    error: BaseException | None = None
    try:
        await call()
    except FaultError:
        raise
    except SuspendSignal:
        pass  # it goes on where it ended then
    except Exception as raised:
        error = raised
    except BaseExceptionGroup as group:
        _, rest = group.split((SuspendSignal, Exception))
        if rest is not None:
            raise rest from None
    if scope.activation.closing is not None:
        raise SuspendSignal
    scope.close(cause=error)
