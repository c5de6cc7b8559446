"""`message.complete()`: recording that a message was dealt with.

1. A message that is read is in history from then on, so it is never lost: until it is completed, each run hands it to the
   code again, and it goes back into the mailbox if its branch loses a race or `replay_from_step` forgets its read.
2. Completing is one change of its record, durable on return. No cancellation comes in between: it happened or it did not.
3. Once in a run: a second time is a mistake in the code, and a fault. What an earlier run completed is passed over, and so
   is what an earlier attempt of the same step completed, since that attempt is what is being repeated.
4. What it replies to a request is in the batch that says it was completed. The first completion that is recorded counts, and
   its reply; what a later run or attempt would reply is passed over with it.
5. Only the scope that read a message can say that history still holds it; when that is over and forgotten, it is a fault.
"""

from __future__ import annotations

from typing import cast

import trio

from perdure.storage import encode_value
from perdure.storage.schema import MessageEntry
from perdure.workflow.activation import Closing
from perdure.workflow.errors import FaultError, MessageCompletedError, MisuseError, SuspendSignal
from perdure.workflow.history import Node
from perdure.workflow.lanes import lane_of
from perdure.workflow.plain import to_plain
from perdure.workflow.reads import with_completed
from perdure.workflow.scope import Operation
from perdure.workflow.states import WorkflowState
from perdure.workflow.step import attempt_in_progress

__all__ = ["Completion"]


class Completion:
    """What a message that was read knows of its read.

    Args:
        operation: The read.
        index: Which of the read's messages it is.
        message_id: The message's id.
        node: Where history holds it.
        is_completable: Whether it was read so that it can be completed.
        is_completed: Whether its record says that it was.
    """

    __slots__ = ("_completed_in", "_index", "_is_completable", "_is_recorded", "_message_id", "_node", "_operation")

    def __init__(
        self,
        operation: Operation,
        index: int,
        message_id: str,
        node: Node,
        *,
        is_completable: bool,
        is_completed: bool,
    ) -> None:
        self._operation = operation
        self._index = index
        self._message_id = message_id
        self._node = node
        self._is_completable = is_completable
        self._is_recorded = is_completed
        self._completed_in: tuple[object, int] | None = None

    async def complete(self, reply: object = None) -> None:
        """Record that the message was dealt with, and the reply to a request; see `Message.complete`."""
        activation = self._operation.scope.activation
        attempt = attempt_in_progress(activation)
        lane = lane_of(activation)
        if not self._operation.scope.lane.is_open or (lane is not None and not lane.is_open):
            await activation.commit()  # a race's loser is not to unwind before its winner is durable
            raise SuspendSignal
        # A step that is being stopped may still finish, and what it did then counts; the workflow's own code may not.
        if activation.closing is not None and (attempt is None or activation.closing > Closing.EVICTED):
            raise SuspendSignal
        if attempt is None and activation.is_draining:
            await activation.drained()
        try:
            self._check(attempt or (None, 0))
        except FaultError as error:
            activation.fault(error)
            raise
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            if attempt is None:
                activation.note_cancelled(self._operation.name, self._operation.operation)
            raise
        data = self._encode(reply)
        self._completed_in = attempt or (None, 0)
        if self._is_recorded:
            return
        if activation.is_collecting:
            if self._operation.scope.has_recorded_ahead:
                return  # code that did not complete it got past this place
            raise SuspendSignal
        self._operation.progress()
        self._is_recorded = True
        entry = self._node.entry
        assert entry is not None, "a message that was read is recorded"
        kind = with_completed(cast("MessageEntry", entry.kind), self._path())
        activation.history.change(self._node, kind)
        if data is None:
            await activation.commit()
            return
        activation.requests.answer(self._message_id, data)
        await activation.commit()
        activation.answered(self._message_id, data)

    def _encode(self, reply: object) -> bytes | None:
        """The reply as it is stored, or `None` where nobody waits for one: it is no request, or was answered."""
        activation = self._operation.scope.activation
        if self._is_recorded or activation.is_collecting or not activation.requests.is_open(self._message_id):
            return None
        what = f"the reply to message {self._message_id!r}"
        return encode_value(reply, bytes_max=activation.user_bytes_max, what=what, to_plain=to_plain)

    def _check(self, caller: tuple[object, int]) -> None:
        activation = self._operation.scope.activation
        is_undone = activation.history.state is WorkflowState.ROLLING_BACK and not activation.is_collecting
        if is_undone or not activation.is_running:
            raise MisuseError(
                f"the message at {self._path()} was completed after the run that read it had ended; call complete() in the "
                "workflow's function or in a step"
            )
        if not self._is_completable:
            raise MisuseError(
                f"the message at {self._path()} was not read to be completed; write "
                f"ctx.{self._operation.operation}({self._operation.name!r}, ..., completable=True)"
            )
        earlier = self._completed_in
        if earlier is not None and (earlier[0] is None or earlier[0] is not caller[0] or earlier[1] == caller[1]):
            raise MessageCompletedError(
                f"the message at {self._path()} was completed a second time; call complete() once for each message",
                location=self._path(),
            )
        entry = self._node.entry
        if entry is None or self._operation.scope.activation.history.node_at(entry.location) is not self._node:
            raise MisuseError(
                f"the message at {self._path()} can no longer be completed: history has forgotten its read; call complete() "
                "in the iteration or branch that read it"
            )

    def _path(self) -> str:
        return self._operation.scope.path_text(f"{self._operation.name}:{self._index}")
