"""`ctx.call`: another workflow, run to its end, whose result is recorded.

1. It is stored as a step. Entry and open call (`calls.py`) are durable before the child exists; its outcome, and that the
   call is not open any more, are one batch. So a crash in between finds the child by the same id, or makes it.
2. The child is made once: its id is derived from the caller's seed and the place, or given. What exists under it is joined
   if it is the same workflow with an equal input; else the call fails. Only a child that the call's workflow made is ever
   cancelled by it.
3. While the child runs the branch is parked, so its workflow may leave memory. It is woken by the child's end, which is
   written into its own namespace first (`notices.py`); it asks nobody, and a thousand calls cost no more than each does.
4. A child that fails or is cancelled fails the call, which is a failure like a step's: caught by `try_block`, reset by
   `recover()`. Recovered, the call recovers a child that failed; for one that was cancelled it makes another, unless its
   id is given.
5. A host that is leaving, or the storage of the child, is nothing that the call fails by.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from perdure.storage import StorageError, decode_value
from perdure.storage.errors import EncodeError
from perdure.storage.schema import Entry, EntryMetadata, EntryStatus, StepEntry
from perdure.workflow.calls import ChildOutcome, OnParentEnd, OpenCall
from perdure.workflow.checks import ms_ceil
from perdure.workflow.derived import derive_child_id
from perdure.workflow.errors import (
    CallCycleError,
    ChildCancelledError,
    ChildFailedError,
    ErrorInfo,
    InvalidArgumentError,
    StepCriticalError,
    StepError,
    WorkflowCancelledError,
)
from perdure.workflow.failures import cut_text, describe, info_from_map, info_from_text, info_to_map
from perdure.workflow.history import History, Node, order_of_creation
from perdure.workflow.host import CallRefusal, CallRequest, HostLeavingError, host_of
from perdure.workflow.logs import fields_of
from perdure.workflow.states import WorkflowState
from perdure.workflow.typed import Converter, decode, encode_input, returns
from perdure.workflow.types import ChildInfo
from perdure.workflow.waits import Wait

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation
    from perdure.workflow.definition import Workflow
    from perdure.workflow.scope import Operation

__all__ = ["PAUSE_MAX_S", "PAUSE_S", "asked", "check_on_parent_end", "children_of", "run_call"]

T = TypeVar("T")

PAUSE_S: Final = 1.0
"""The first pause before something is asked of another workflow again, in seconds; each is twice the one before."""

PAUSE_MAX_S: Final = 60.0
"""The longest of these pauses, in seconds."""

_COMPLETED: Final = WorkflowState.COMPLETED.value
_CANCELLED: Final = WorkflowState.CANCELLED.value

_log = logging.getLogger("perdure.workflow")


def check_on_parent_end(given: object) -> OnParentEnd:
    """What is to become of the child.

    Raises:
        InvalidArgumentError: It is none of the two.
    """
    if given == "cancel":
        return "cancel"
    if given == "leave":
        return "leave"
    raise InvalidArgumentError(f'on_parent_end must be "cancel" or "leave", not {given!r:.80}')


async def asked(operation: Operation, question: Callable[[], Awaitable[T]]) -> T:
    """What the host says to an operation; nothing goes on if the workflow is left or the branch has lost meanwhile.

    Raises:
        SuspendSignal: That is so.
    """
    activation, lane = operation.scope.activation, operation.scope.lane
    if not lane.is_open:
        await lane.leave()
    try:
        answer = await question()
    except HostLeavingError:
        await activation.drained()
    if not lane.is_open:
        await lane.leave()
    activation.check_may_record()
    return answer


async def run_call(
    operation: Operation, workflow: object, input: object, workflow_id: str | None, policy: OnParentEnd
) -> Any:
    """The recorded outcome of the call, or its child's, once that has ended."""
    activation = operation.scope.activation
    history = activation.history
    found = operation.find(StepEntry)
    if found is None:
        operation.check_is_next()
        definition = host_of(operation).find_workflow(workflow)
        return await _Call(operation, definition, input, workflow_id, policy, None).run()
    node, entry, kind = found
    if "call" not in history.detail(entry.id):
        raise operation.diverged(operation.name, node, "which called no workflow, where the code asks for")
    metadata = history.metadata(entry.id) or EntryMetadata()
    if kind.output is not None or metadata.status is EntryStatus.COMPLETED:
        await activation.replayed()
        return _decode(operation, _converter(workflow, operation), kind.output)
    if metadata.status is EntryStatus.EXHAUSTED:
        await activation.replayed()
        raise _recorded_failure(history, operation.name, entry.id, metadata)
    operation.check_is_next()
    definition = host_of(operation).find_workflow(workflow)
    call = _Call(operation, definition, input, workflow_id, policy, node)
    call.check_recorded()
    return await call.run()


def _converter(workflow: object, operation: Operation) -> Converter | None:
    from perdure.workflow.definition import definition_of

    if isinstance(workflow, str):  # a call that is recorded needs no host
        host = operation.scope.activation.host
        return None if host is None else returns(host.find_workflow(workflow).function)
    return returns(definition_of(workflow).function)


def _decode(operation: Operation, converter: Converter | None, output: bytes | None) -> Any:
    return decode(converter, output, what=f"the recorded result of call {operation.name!r}", root="result")


def _recorded_failure(history: History, name: str, entry_id: str, metadata: EntryMetadata) -> StepError:
    detail = history.detail(entry_id)
    info = info_from_map(detail["error"]) if "error" in detail else info_from_text(metadata.error or "Error")
    return _error(name, info, entry_id, detail["call"])


def _error(name: str, info: ErrorInfo, entry_id: str, about: dict[str, Any]) -> StepError:
    """The error that a failed call raises, built from stored facts alone: the same on every run."""
    child_id = str(about.get("child", ""))
    facts: dict[str, Any] = {
        "step_name": name,
        "attempts": 1,
        "error": info,
        "kind": "critical",
        "entry_id": entry_id,
    }
    match about.get("failure"):
        case "failed":
            return ChildFailedError(info.message, workflow_id=child_id, **facts)
        case "cancelled":
            return ChildCancelledError(info.message, workflow_id=child_id, **facts)
        case "cycle":
            return CallCycleError(info.message, chain=tuple(about.get("chain", ())), **facts)
        case _:
            text = cut_text(f"call {name!r} of workflow {child_id!r} failed: {info}")
            return StepCriticalError(text, **facts)


@dataclass(slots=True)
class _Call:
    """One call in this activation, whose outcome is not recorded."""

    operation: Operation
    definition: Workflow[Any, Any]
    input: object
    workflow_id: str | None
    policy: OnParentEnd
    node: Node | None
    pause_s: float = PAUSE_S

    @property
    def activation(self) -> Activation:
        return self.operation.scope.activation

    @property
    def history(self) -> History:
        return self.activation.history

    @property
    def entry_id(self) -> str:
        assert self.node is not None, "the call is recorded"
        assert self.node.entry is not None, "the call is recorded"
        return self.node.entry.id

    def check_recorded(self) -> None:
        """See that the code asks for what was called.

        Raises:
            HistoryDivergedError: It asks for another workflow, or another id.
        """
        about = self.history.detail(self.entry_id)["call"]
        recorded_id = about["child"] if about.get("given") else None
        if about["workflow"] == self.definition.name and recorded_id == self.workflow_id:
            return
        assert self.node is not None, "the call is recorded"
        called = f"which called {about['workflow']!r}" + ("" if recorded_id is None else f" as {recorded_id!r}")
        wanted = f"{self.definition.name!r}" + ("" if self.workflow_id is None else f" as {self.workflow_id!r}")
        raise self.operation.diverged(self.operation.name, self.node, f"{called}, where the code calls {wanted} in")

    async def run(self) -> Any:
        """Call, wait for the end, and record it."""
        call = None if self.node is None else self.history.calls.get(self.entry_id)
        if call is None:
            call = await self.open()
        elif call.is_spawned and call.outcome is None:
            await self.look_after(call)
        while call.outcome is None and not call.is_spawned:
            call = await self.start(call)
        while call.outcome is None:
            await self.activation.park(Wait(signal=("child", call.child_id)), self.operation)
        return await self.record(call, call.outcome)

    async def open(self) -> OpenCall:
        """Record the call; durable on return. One that was given up or reset keeps its child's id."""
        activation, history = self.activation, self.history
        self.operation.progress()
        now_ms = activation.clock.now_ms()
        if self.node is None:
            self.node = self.operation.create(StepEntry(None, None))
            child_id = self.workflow_id if self.workflow_id is not None else self.derived_id(0)
            about: dict[str, Any] = {"workflow": self.definition.name, "child": child_id}
            if self.workflow_id is not None:
                about["given"] = True
            metadata = EntryMetadata(created_at_ms=now_ms)
            is_again = False
        else:
            about = history.detail(self.entry_id)["call"]
            child_id = about["child"]
            metadata = history.metadata(self.entry_id) or EntryMetadata(created_at_ms=now_ms)
            is_again = True
        metadata.attempts += 1
        metadata.last_attempt_at_ms = now_ms
        history.put_metadata(self.node, metadata)
        self.put_about(about)
        lane = self.operation.scope.lane
        call = OpenCall(self.entry_id, child_id, self.policy, self.workflow_id is not None, lane.is_raced, is_again)
        history.calls.open(call)
        try:
            encode_input(self.definition.function, self.input, bytes_max=activation.user_bytes_max)
        except EncodeError as error:
            raise await self.fail(_without_stack(error)) from error
        await activation.commit()
        return call

    def derived_id(self, fresh: int) -> str:
        history = self.history
        path = (*history.path_of(self.operation.scope.location), self.operation.name)
        return derive_child_id(history.workflow_id, history.seed or b"", path, history.generation, fresh)

    def put_about(self, about: dict[str, Any], **failure: Any) -> None:
        self.history.put_detail(self.entry_id, {**failure, "call": about})

    async def start(self, call: OpenCall) -> OpenCall:
        """Have the child made, or find it. The call is as before if that is to be tried again."""
        request = CallRequest(self.activation, call, self.definition, self.input)
        try:
            answer = await asked(self.operation, partial(host_of(self.operation).start_child, request))
        except StorageError as error:
            await self.pause(error)
            return call
        if isinstance(answer, ChildOutcome) and answer.state == _CANCELLED and call.is_again and not call.is_given:
            return await self.replace(call)
        call.is_spawned = True
        self.take(call, answer)
        if isinstance(answer, CallRefusal):
            raise await self.refused(answer)
        self.history.calls.open(call)  # durable with what comes next
        return call

    async def look_after(self, call: OpenCall) -> None:
        """See that nothing has become of a child that was started in an earlier life of this process."""
        host = host_of(self.operation)
        while call.outcome is None:
            try:
                answer = await asked(self.operation, partial(host.look_after, self.history.workflow_id, call.child_id))
            except StorageError as error:
                await self.pause(error)
                continue
            self.take(call, answer)
            if isinstance(answer, CallRefusal):
                raise await self.refused(answer)
            return

    def take(self, call: OpenCall, answer: object) -> None:
        """What is told meanwhile, and so is durable, goes before what was found."""
        if isinstance(answer, ChildOutcome) and call.outcome is None:
            call.outcome = answer

    async def pause(self, error: StorageError) -> None:
        """Wait a little, durably, before something is asked again."""
        _log.info(
            "workflow %r: call %r waits %g seconds, as the storage of what it calls fails: %s",
            self.history.workflow_id,
            self.operation.name,
            self.pause_s,
            error,
            extra=fields_of(self.history, (*self.history.path_of(self.operation.scope.location), self.operation.name)),
        )
        until_ms = self.activation.clock.now_ms() + ms_ceil(self.pause_s)
        self.pause_s = min(2 * self.pause_s, PAUSE_MAX_S)
        await self.activation.park(Wait(until_ms), self.operation)

    async def replace(self, call: OpenCall) -> OpenCall:
        """The child was cancelled when the call was given up: another one takes its place; durable on return."""
        self.operation.progress()
        about = dict(self.history.detail(self.entry_id)["call"])
        about["fresh"] = about.get("fresh", 0) + 1
        about["child"] = self.derived_id(about["fresh"])
        self.put_about(about)
        self.history.calls.close(call.entry_id)
        fresh = self.history.calls.open(replace(call, child_id=about["child"], is_again=False, outcome=None))
        await self.activation.commit()
        return fresh

    async def record(self, call: OpenCall, outcome: ChildOutcome) -> Any:
        """Record what came of the child, as the call's own outcome; durable on return."""
        if outcome.state == _COMPLETED:
            return await self.complete(outcome.output)
        about = dict(self.history.detail(self.entry_id)["call"])
        about["failure"] = outcome.state
        if outcome.state == _CANCELLED:
            text = f"workflow {call.child_id!r} was cancelled"
            info = ErrorInfo(WorkflowCancelledError.__name__, text, None, {"child": call.child_id})
        else:
            stored = info_from_map({} if outcome.error is None else decode_value(outcome.error))
            info = replace(stored, metadata={"child": call.child_id, **stored.metadata})
        raise await self.fail(info, about)

    async def complete(self, output: bytes | None) -> Any:
        activation, history = self.activation, self.history
        self.operation.progress()
        assert self.node is not None, "the call is recorded"
        metadata = history.metadata(self.entry_id) or EntryMetadata()
        metadata.status = EntryStatus.COMPLETED
        metadata.error = None
        metadata.completed_at_ms = activation.clock.now_ms()
        history.change(self.node, StepEntry(output, None))
        history.put_metadata(self.node, metadata)
        history.calls.close(self.entry_id)
        await activation.commit()
        return _decode(self.operation, returns(self.definition.function), output)

    async def refused(self, refusal: CallRefusal) -> StepError:
        about = dict(self.history.detail(self.entry_id)["call"])
        about["failure"] = "refused"
        if refusal.chain:
            about |= {"failure": "cycle", "chain": list(refusal.chain)}
        return await self.fail(refusal.error, about)

    async def fail(self, info: ErrorInfo, about: dict[str, Any] | None = None) -> StepError:
        """Record that the call failed; durable on return. Returns the error to raise."""
        history = self.history
        self.operation.progress()
        assert self.node is not None, "the call is recorded"
        about = about or {**history.detail(self.entry_id)["call"], "failure": "refused"}
        text = cut_text(str(info))
        metadata = history.metadata(self.entry_id) or EntryMetadata()
        metadata.status = EntryStatus.EXHAUSTED
        metadata.error = text
        history.change(self.node, StepEntry(None, text))
        history.put_metadata(self.node, metadata)
        self.put_about(about, kind="critical", error=info_to_map(info))
        history.calls.close(self.entry_id)
        await self.activation.commit()
        return _error(self.operation.name, info, self.entry_id, about)


def _without_stack(error: Exception) -> ErrorInfo:
    return replace(describe(error), stack=None)


def children_of(history: History) -> tuple[ChildInfo, ...]:
    """The workflows that one has called, in the order of the calls, as far as its history holds them."""
    found: list[tuple[Entry, ChildInfo]] = []
    for entry in history.entries():
        about: dict[str, Any] | None = history.detail(entry.id).get("call")
        if about is None or about.get("failure") in ("refused", "cycle"):
            continue
        call = history.calls.get(entry.id)
        outcome: str | None = about.get("failure")
        if call is not None:
            outcome = None if call.outcome is None else call.outcome.state
        elif isinstance(entry.kind, StepEntry) and outcome is None:
            metadata = history.metadata(entry.id)
            is_done = metadata is not None and metadata.status is EntryStatus.COMPLETED
            outcome = _COMPLETED if is_done else None
        info = ChildInfo(about["child"], about["workflow"], history.path_of(entry.location), cast("Any", outcome))
        found.append((entry, info))
    order = order_of_creation(entry for entry, _ in found)
    return tuple(info for _, info in sorted(found, key=lambda pair: order(pair[0])))
