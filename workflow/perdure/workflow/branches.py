"""Branches of joins and races: functions that run beside each other, each in a lane and a scope of its own.

1. The parent's entry, which names all branches, is durable before a branch's first step function runs, and before the
   first wait. The branches' names are registered in the order given, whatever order the scheduler runs them in.
2. What comes of a branch is caught inside its own task, and recorded there; groups of exceptions are never searched.
   What ends the task all the same (a cancellation, a dying process) ends the operation, as itself and not in a group.
3. A branch that ends while others run or wait makes its status durable at once; branches that end together share a batch.
4. An error is stored with the parent entry as text, as the reference does, and as data in the parent's detail, so that the
   failure of a join or race is the same on every run. What all branches store together has to fit into one value, so each
   may use an equal share of half of it for its error.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, cast, overload

import trio

from perdure.storage import encode_value
from perdure.storage.errors import EncodeError
from perdure.storage.schema import Branch as BranchRecord
from perdure.storage.schema import BranchStatus, JoinEntry, RaceEntry
from perdure.workflow.checks import check_branch_name, check_function
from perdure.workflow.collecting import revisit
from perdure.workflow.errors import (
    ErrorInfo,
    FaultError,
    HistoryDivergedError,
    InvalidArgumentError,
    SuspendSignal,
    ValueTypeError,
)
from perdure.workflow.failures import (
    causes_of,
    cut_text,
    describe,
    info_from_map,
    info_from_text,
    info_to_map,
    sole_exception,
)
from perdure.workflow.history import Node
from perdure.workflow.lanes import Lane, enter_lane
from perdure.workflow.scope import Operation, Scope
from perdure.workflow.typed import decode, returns, round_trip

if TYPE_CHECKING:
    from perdure.workflow.context import Context

__all__ = [
    "BRANCHES_MAX",
    "Branch",
    "BranchFunction",
    "Fork",
    "JoinResult",
    "Outcome",
    "check_branches",
    "diverged_branches",
    "recorded_value",
    "run_tasks",
]

BRANCHES_MAX: Final = 2048
"""Most branches of one join or race: their names and statuses are one stored value."""

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
X = TypeVar("X")

BranchFunction: TypeAlias = "Callable[[Context], Awaitable[Any]]"
"""What runs as a branch: `async def branch(ctx)`."""


@dataclass(frozen=True, slots=True, eq=False)
class Branch(Generic[T_co]):
    """A branch of a join, as an object whose type the result remembers: `result[branch]` is what its function returns.

    Attributes:
        name: Unique among the branches.
        function: `async def function(ctx)`.
    """

    name: str
    function: Callable[[Context], Awaitable[T_co]]


class JoinResult(dict[str, T]):
    """The values of a join by branch name, in the order given; `result[branch]` with a `Branch` has that branch's type."""

    @overload
    def __getitem__(self, branch: Branch[X], /) -> X: ...

    @overload
    def __getitem__(self, branch: str, /) -> T: ...

    def __getitem__(self, branch: Branch[Any] | str, /) -> Any:
        """The value of one branch."""
        return super().__getitem__(branch.name if isinstance(branch, Branch) else branch)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a branch's function: a value, or an error."""

    value: Any = None
    error: Exception | None = None


def check_branches(given: object, operation: str) -> dict[str, BranchFunction]:
    """The branches by name, in the order given.

    Raises:
        InvalidArgumentError: They are not branches, too many, none, or two have one name.
    """
    example = f'ctx.{operation}("fetch", {{"user": fetch_user, "posts": fetch_posts}})'
    pairs: list[tuple[object, object]]
    if isinstance(given, Mapping):
        pairs = list(cast("Mapping[object, object]", given).items())
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes):
        pairs = []
        for branch in cast("Iterable[object]", given):
            if not isinstance(branch, Branch):
                raise InvalidArgumentError(
                    f"{operation} takes a dict or Branch objects, not {branch!r:.80}; write {example}"
                )
            pairs.append((branch.name, branch.function))
    else:
        raise InvalidArgumentError(
            f"{operation} takes its branches as a dict, not as {type(given).__name__}; write {example}"
        )
    branches: dict[str, BranchFunction] = {}
    for name, function in pairs:
        checked = check_branch_name(name, operation)
        if checked in branches:
            raise InvalidArgumentError(f"two branches of one {operation} are named {checked!r}; name each differently")
        branches[checked] = cast("BranchFunction", _check_branch(function, checked, example))
    if not branches:
        raise InvalidArgumentError(f"{operation} needs at least one branch; write {example}")
    if len(branches) > BRANCHES_MAX:
        raise InvalidArgumentError(
            f"{operation} takes at most {BRANCHES_MAX} branches, not {len(branches)}; split them into several, each in a "
            "branch of its own"
        )
    return branches


def _check_branch(function: object, name: str, example: str) -> object:
    checked = check_function(function, f"the function of branch {name!r}", example)
    try:
        inspect.signature(checked).bind(None)
    except TypeError:
        raise InvalidArgumentError(
            f"the function of branch {name!r} is called with a context and nothing else, and cannot be; write "
            "`async def branch(ctx): ...`, and bind what it takes beside with functools.partial or a closure"
        ) from None
    except ValueError:  # it has no signature that can be told
        pass
    return checked


async def run_tasks(tasks: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run all in a nursery; what ends them leaves as itself, not in a group, if it is one thing."""
    try:
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)
    except BaseExceptionGroup as group:
        _, rest = group.split(trio.Cancelled)
        if rest is None:
            await trio.lowlevel.checkpoint_if_cancelled()  # which raises it anew, for all branches at once
            raise
        raise sole_exception(rest) from None


class Fork:
    """The branches of one join or race: what is recorded of them, and the running of those that are not settled.

    Attributes:
        node: The parent's entry.
        records: What is recorded of each branch, in the order given; changed in place.
        errors: The exceptions of the branches that failed in this process.
    """

    def __init__(self, operation: Operation, node: Node, functions: Mapping[str, BranchFunction]) -> None:
        entry = node.entry
        assert entry is not None, "the parent is recorded"
        assert isinstance(entry.kind, JoinEntry | RaceEntry), "only these have branches"
        self.node = node
        self.records: dict[str, BranchRecord] = entry.kind.branches
        self.errors: dict[str, Exception] = {}
        self._operation = operation
        self._activation = operation.scope.activation
        self._functions = functions
        self._converters = {name: returns(function) for name, function in functions.items()}
        self._entry_id = entry.id
        self._running: set[str] = set()
        self._is_handed_over = False
        self._detail_bytes = len(encode_value(self._activation.history.detail(entry.id)))
        bytes_max = self._activation.user_bytes_max
        self._share = bytes_max // 2 // len(self.records)
        self._free = bytes_max - sum(
            len(name.encode()) + 16 + (self._share if record.status <= BranchStatus.RUNNING else _size(record))
            for name, record in self.records.items()
        )
        if self._free < 0:
            raise InvalidArgumentError(
                f"the names of the branches of {operation.operation} {operation.name!r} take too much room; shorten them"
            )

    def unsettled(self) -> list[str]:
        """The names of the branches whose functions are to be run."""
        return [name for name, record in self.records.items() if record.status <= BranchStatus.RUNNING]

    async def run(
        self,
        names: Sequence[str],
        settle: Callable[[str, Outcome], Awaitable[None]],
        scopes: Mapping[str, trio.CancelScope] | None = None,
        lanes: Mapping[str, Lane] | None = None,
    ) -> None:
        """Run the functions of these branches at once, and hand each outcome to `settle`, in the branch's own task."""
        activation = self._activation
        activation.fork(len(names))
        self._running.update(names)
        tasks: list[Callable[[], Awaitable[None]]] = []
        for name in names:
            lane = lanes[name] if lanes is not None else Lane(self._operation.scope.lane)
            tasks.append(self._task(name, lane, settle, scopes[name] if scopes is not None else None))
        await run_tasks(tasks)
        await self._operation.check_counts()

    def _task(
        self,
        name: str,
        lane: Lane,
        settle: Callable[[str, Outcome], Awaitable[None]],
        cancel_scope: trio.CancelScope | None,
    ) -> Callable[[], Awaitable[None]]:
        number = self._activation.history.number_of(name)
        scope = self._operation.enter(number, lane)

        async def task() -> None:
            enter_lane(self._activation, lane)
            try:
                if cancel_scope is None:
                    await self._run_branch(name, scope, settle)
                else:
                    with cancel_scope:
                        await self._run_branch(name, scope, settle)
            finally:
                self._operation.leave(scope)
                lane.end(self._operation.scope.lane)
                if name in self._running:
                    self._stop(name)

        task.__qualname__ = f"branch {name!r} of {self._operation.operation} {self._operation.name!r}"
        return task

    async def revisit(self, names: Iterable[str]) -> None:
        """Run the functions of settled branches once more, one after another, for the handlers of the steps in them."""
        from perdure.workflow.context import Context

        above = self._operation.scope.lane
        for name in names:
            lane = Lane(above)
            scope = self._operation.enter(self._activation.history.number_of(name), lane, is_finished=True)
            try:
                await revisit(scope, partial(self._functions[name], Context(scope)))
            finally:
                self._operation.leave(scope)
                lane.end(above)

    async def settled(self, name: str) -> None:
        """The branch is over and recorded: make that durable. The last one runs on for the parent."""
        self._stop(name)
        await self._activation.settle()

    def hand_over(self, name: str) -> None:
        """This branch runs on for the parent; each of the others ends when it has unwound."""
        self._running.discard(name)
        self._is_handed_over = True
        self._activation.end_lane(hands_over=True)

    def _stop(self, name: str) -> None:
        self._running.discard(name)
        hands_over = not self._running and not self._is_handed_over
        self._is_handed_over = self._is_handed_over or hands_over
        self._activation.end_lane(hands_over=hands_over)

    async def _run_branch(self, name: str, scope: Scope, settle: Callable[[str, Outcome], Awaitable[None]]) -> None:
        try:
            outcome = await self._call(name, scope)
            if outcome is not None:
                await settle(name, outcome)
        except SuspendSignal:
            return

    async def _call(self, name: str, scope: Scope) -> Outcome | None:
        """What the branch's function came to; `None` if it was stopped."""
        from perdure.workflow.context import Context

        activation = self._activation
        value: Any = None
        error: Exception | None = None
        try:
            called = self._functions[name](Context(scope))
            if not hasattr(called, "__await__"):
                raise InvalidArgumentError(
                    f"the function of branch {name!r} is a plain function; write `async def branch(ctx): ...`"
                )
            value = await called
        except Exception as raised:
            error = raised
        except BaseExceptionGroup as group:
            _, rest = group.split((SuspendSignal, Exception))
            if rest is not None:
                raise rest from None
            raise SuspendSignal from group
        if activation.closing is not None or not scope.lane.is_open:
            return None  # the context was closed under the function: what it came to does not count
        try:
            scope.close(cause=error)
            if isinstance(error, FaultError):
                raise error
        except FaultError as fault:
            activation.fault(fault)
            return None
        return Outcome(value, error)

    # What is recorded of a branch.

    def record(self, name: str, outcome: Outcome) -> Any:
        """Record what came of a branch; returns the value as it is stored, or the exception that stands for it."""
        self._operation.progress()
        error = outcome.error
        if error is None:
            free = self._free + self._share
            what = f"the value of branch {name!r} of {self._operation.operation} {self._operation.name!r}"
            try:
                data, value = round_trip(self._converters[name], outcome.value, bytes_max=free, what=what, root="value")
            except (EncodeError, ValueTypeError) as unstorable:
                error = unstorable
            else:
                self._free = free - len(data or b"")
                self._put(name, BranchRecord(BranchStatus.COMPLETED, data, None))
                return value
        self.errors[name] = error
        info = _bounded(describe(error), self._share)
        record = BranchRecord(BranchStatus.FAILED, None, cut_text(str(info), max(self._share, _LEAST)))
        self._free += self._share - _size(record)
        self._put(name, record)
        self._record_detail(name, {"error": info_to_map(info), "causes": causes_of(error)})
        return error

    def _record_detail(self, name: str, kept: dict[str, Any]) -> None:
        history = self._activation.history
        detail = history.detail(self._entry_id)
        self._detail_bytes += len(name.encode()) + len(encode_value(kept))
        if self._detail_bytes <= self._activation.user_bytes_max:  # else the text in the record has to do, on every run
            detail.setdefault("branches", {})[name] = kept
            history.touch_detail(self._entry_id, detail)

    def _put(self, name: str, record: BranchRecord) -> None:
        self.records[name] = record
        self._activation.history.touch(self.node)

    def mark(self, name: str, status: BranchStatus) -> None:
        """Record another status of a branch that has no outcome."""
        self._put(name, BranchRecord(status, None, None))

    def failures(self) -> tuple[dict[str, ErrorInfo], list[str]]:
        """Every failed branch's error as it is stored, and the ids of the entries that caused them."""
        detail = self._activation.history.detail(self._entry_id)
        stored: dict[str, Any] = detail.get("branches", {})
        errors: dict[str, ErrorInfo] = {}
        causes: dict[str, None] = {self._entry_id: None}
        for name, record in self.records.items():
            if record.status is not BranchStatus.FAILED:
                continue
            kept: dict[str, Any] | None = stored.get(name)
            if kept is None:
                errors[name] = info_from_text(record.error or "Error: no reason was recorded")
            else:
                errors[name] = info_from_map(kept.get("error"))
                causes.update(dict.fromkeys(kept.get("causes", ())))
        return errors, list(causes)

    def cause(self) -> Exception | None:
        """The exceptions behind the failure, where they are still in this process."""
        errors = [self.errors[name] for name in self.records if name in self.errors]
        if len(errors) <= 1:
            return errors[0] if errors else None
        return ExceptionGroup(f"branches of {self._operation.operation} {self._operation.name!r} failed", errors)


_LEAST: Final = 100


def _size(record: BranchRecord) -> int:
    return len(record.output or b"") + len((record.error or "").encode())


def _bounded(info: ErrorInfo, bytes_max: int) -> ErrorInfo:
    """The error, cut so that its stored form takes about `bytes_max` bytes: the stack goes first, then the attributes."""
    if len(encode_value(info_to_map(info))) <= bytes_max:
        return info
    room = max(bytes_max // 2, _LEAST)
    message = cut_text(info.message, room)
    stack = None if info.stack is None else cut_text(info.stack, room)
    bounded = ErrorInfo(cut_text(info.name, room), message, stack, info.metadata)
    if len(encode_value(info_to_map(bounded))) <= bytes_max:
        return bounded
    return ErrorInfo(bounded.name, message)


def diverged_branches(operation: Operation, recorded: Iterable[str], asked: Iterable[str]) -> HistoryDivergedError:
    """The error for branches that are not those of the record."""
    scope = operation.scope
    had, has = list(recorded), list(asked)
    gone = [name for name in had if name not in has]
    new = [name for name in has if name not in had]
    what = " and ".join(
        part
        for part in (
            f"it recorded {', '.join(map(repr, gone))}, which the code does not have" if gone else "",
            f"the code has {', '.join(map(repr, new))}, which it did not record" if new else "",
        )
        if part
    )
    return HistoryDivergedError(
        f"the branches of {operation.operation} {operation.name!r} at {scope.path_text()} are not those of history: {what}; "
        f"run the recorded ones, or choose by `await ctx.get_version(...)` between the old {operation.operation} and a new one "
        "of another name",
        location=scope.path_text(operation.name),
        found=", ".join(had),
        asked=", ".join(has),
    )


def recorded_value(operation: Operation, name: str, function: BranchFunction, record: BranchRecord) -> Any:
    """The value of a branch that completed, typed by its function's annotation.

    Raises:
        StoredValueError: It does not fit the annotation that the function has now.
    """
    what = f"the recorded value of branch {name!r} of {operation.operation} {operation.name!r}"
    return decode(returns(function), record.output, what=what, root="value")
