"""Scopes and operations: where an entry belongs, and that each is asked for once.

1. Names are unique within a scope, on the first run too, since a second entry of the same name could never be replayed.
2. One operation at a time per scope, each awaited before the next is asked for: operations are recorded in the order in
   which they are asked for, and a scope whose operations overlap has no such order. Concurrency is what branches, each
   with a scope of its own, are for.
3. What is recorded in a scope and was not asked for by its end, or before the code goes on to something new, is divergence;
   but for what was recorded after a failure that `recover()` has undone, which is there if the code asks for it.
   The rejected alternative, to look only at the end, ran a renamed step's function (and recorded it) before it noticed.
4. A queue read `q` stores its entries under the derived names `q:count`, `q:deadline` and `q:0`, `q:1`, ...; an entry of the
   user's own by one of these names in the same scope is refused, whichever comes first.
5. A cancellation that is neither ours nor comes from outside the workflow is the workflow's own: a fault (promise 5).
"""

from __future__ import annotations

import re
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, cast

import trio

from perdure.storage import layout
from perdure.storage.schema import (
    KIND_NAMES,
    Entry,
    EntryKind,
    Location,
    MessageEntry,
    RemovedEntry,
    Segment,
    SleepEntry,
)
from perdure.workflow.checks import check_name
from perdure.workflow.errors import (
    DuplicateNameError,
    FaultError,
    HistoryDivergedError,
    MisuseError,
    OperationInProgressError,
    SuspendSignal,
)
from perdure.workflow.failures import ends_process
from perdure.workflow.history import History, Node
from perdure.workflow.lanes import Lane, lane_of, suspend

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation

__all__ = ["Operation", "OperationName", "Scope", "is_of_queue_read", "queue_read_of"]

OperationName: TypeAlias = Literal[
    "step",
    "try_step",
    "try_block",
    "sleep",
    "sleep_until",
    "loop",
    "queue.next",
    "queue.next_batch",
    "join",
    "race",
    "get_version",
    "removed",
    "now",
    "set_attributes",
    "attributes",
    "rollback_checkpoint",
    "send",
    "call",
]
"""The method of the context that was called."""

T = TypeVar("T")
KindT = TypeVar("KindT", bound=EntryKind)

_HINTS: Final[dict[OperationName, str]] = {
    "loop": "in a loop's body, use the context that the body is given",
    "join": "in a branch, use the context that the branch is given",
    "race": "in a branch, use the context that the branch is given",
    "try_block": "in a block, use the context that the block is given",
    "step": "await each operation before the next one, and use no context in the function of a step",
}
_DERIVED: Final = re.compile(r"(?s)(.+):(?:count|deadline|[0-9]+)")


class Scope:
    """One sequence of operations: the root of a workflow, an iteration of a loop, a branch, or a try block.

    Attributes:
        activation: Whose scope it is.
        location: Its place; entries lie directly below.
        key: The stored key of that place.
        node: Its node in history's tree.
        lane: The lane whose operations these are.
        unvisited: Numbers of the recorded names below that were not asked for yet.
        has_checkpoint: Whether it, or a scope around it, has passed a rollback checkpoint.
        can_be_undone: Whether something completed in it that has a handler, as far as this run has seen.
        inner: The scopes of the operation in progress, if that has any.
    """

    __slots__ = (
        "_busy",
        "_derived",
        "_names",
        "_outer",
        "_queues",
        "_unawaited",
        "activation",
        "can_be_undone",
        "has_checkpoint",
        "inner",
        "is_closed",
        "key",
        "lane",
        "location",
        "node",
        "unvisited",
    )

    def __init__(
        self,
        activation: Activation,
        location: Location,
        node: Node,
        *,
        outer: Scope | None = None,
        lane: Lane | None = None,
        is_finished: bool = False,
    ) -> None:
        self.activation: Activation = activation
        self.location: Location = location
        self.key: bytes = layout.entry_key(location)
        self.node: Node = node
        self.lane: Lane = lane or (Lane() if outer is None else outer.lane)
        self.unvisited: set[Segment] = set(node.children)
        if activation.history.passable:
            self.unvisited.difference_update(
                s for s, child in node.children.items() if activation.history.may_be_passed(child)
            )
        self.can_be_undone: bool = False
        self.has_checkpoint: bool = outer is not None and outer.has_checkpoint
        self.inner: dict[Scope, None] = {}
        # What encloses this scope and has recorded entries ahead; it visits none of them while this scope is in progress.
        # What comes after something finished does not matter where that is run once more.
        self._outer: Scope | None = None if is_finished or outer is None else outer.ahead
        self.is_closed: bool = False
        self._busy: tuple[OperationName, str] | None = None
        self._unawaited: tuple[Coroutine[Any, Any, Any], OperationName, object] | None = None
        self._names: dict[str, str] = {}
        self._queues: set[str] = set()
        self._derived: dict[str, str] = {}

    @property
    def is_replaying(self) -> bool:
        """Whether recorded entries are still ahead, here or in the operation in progress, or nothing else is wanted."""
        return bool(self.unvisited) or self.activation.is_collecting or any(scope.is_replaying for scope in self.inner)

    @property
    def ahead(self) -> Scope | None:
        """The innermost scope, this one or one that encloses it, that has recorded entries which were not asked for yet."""
        return self if self.unvisited else self._outer

    @property
    def has_recorded_ahead(self) -> bool:
        """Whether an earlier run got past the place where the scope is now."""
        return self.ahead is not None

    def path_text(self, name: str | int | None = None) -> str:
        """The scope's place, or that of a name in it, for messages."""
        path = self.activation.history.path_of(self.location)
        parts = [repr(part) if isinstance(part, str) else f"#{part}" for part in path]
        if name is not None:
            parts.append(repr(name))
        return " > ".join(parts) or "the workflow's top level"

    def hand_out(self, call: Coroutine[Any, Any, T], name: object, operation: OperationName) -> Coroutine[Any, Any, T]:
        """Give the workflow the coroutine of an operation, to be awaited before anything else is asked for.

        Raises:
            OperationInProgressError: The one before was never awaited.
        """
        if self.activation.closing is not None:  # that an earlier operation is not awaited is no mistake then
            call.close()
            return cast("Coroutine[Any, Any, T]", suspend())
        if not self.lane.is_open and not self.is_closed:
            call.close()
            return cast("Coroutine[Any, Any, T]", self.lane.leave())
        if self.activation.is_draining:
            call.close()
            return cast("Coroutine[Any, Any, T]", self.activation.drained())
        if self._unawaited is not None:
            call.close()
            error = self._forgotten(f"before {operation} {name!r} was asked for; do one thing at a time in a scope")
            self.activation.fault(error)
            raise error
        self._unawaited = call, operation, name
        return call

    def _forgotten(self, when: str) -> OperationInProgressError:
        assert self._unawaited is not None, "an operation was handed out and not begun"
        (call, operation, name), self._unawaited = self._unawaited, None
        call.close()
        what = f"{operation} {name!r}"
        return OperationInProgressError(
            f"ctx.{what} at {self.path_text()} was called but not awaited {when}, and write "
            f"`await ctx.{operation}({name!r}, ...)`",
            name=what,
            in_progress=what,
        )

    def check_open(self, name: str, method: str) -> None:
        """Refuse what is called on the context of a scope whose function has ended."""
        if self.is_closed:
            raise MisuseError(
                f"ctx.{method}({name!r}, ...) was called on the context of a scope that is over; use the context that "
                "the function in progress was given"
            )

    def _is_callers_lane(self) -> bool:
        lane = lane_of(self.activation)
        return self.lane.is_root if lane is None else lane is self.lane

    def claim(self, name: str, operation: OperationName) -> None:
        """Make the name this operation's, or raise."""
        self._unawaited = None
        self.check_open(name, operation)
        if self._busy is not None:
            raise OperationInProgressError(
                f"{operation} {name!r} was started while {self._busy_text()} is in progress at {self.path_text()}; "
                + _HINTS.get(self._busy[0], "await each operation before the next one"),
                name=name,
                in_progress=self._busy_text(),
            )
        if self.activation.lanes > 1 and not self._is_callers_lane():
            raise MisuseError(
                f"ctx.{operation}({name!r}, ...) was called in one branch on the context of another, that of "
                f"{self.path_text()}; use the context that the branch was given"
            )
        earlier = self._names.get(name)
        if earlier is not None:
            raise DuplicateNameError(
                f"{operation} {name!r} has the name of an earlier {earlier} at {self.path_text()}; names are unique within "
                "a scope, so give it another (in a loop, use ctx.loop)",
                name=name,
            )
        if operation in ("queue.next", "queue.next_batch"):
            self.reserve_queue_names(name)
        elif (queue := queue_read_of(name)) is not None:
            if queue in self._queues:
                raise self._alias(queue, name)
            self._derived.setdefault(queue, name)
        self._names[name] = operation
        self._busy = operation, name

    def reserve_queue_names(self, name: str) -> None:
        """Keep the names under which a queue read stores its messages from other entries, or raise."""
        if name in self._derived:
            raise self._alias(name, self._derived[name])
        self._queues.add(name)

    def _alias(self, queue: str, name: str) -> DuplicateNameError:
        return DuplicateNameError(
            f"the queue read {queue!r} stores its messages under names like {queue + ':0'!r}, which the entry {name!r} at "
            f"{self.path_text()} has; rename one of them",
            name=name,
        )

    def _busy_text(self) -> str:
        return "nothing" if self._busy is None else f"{self._busy[0]} {self._busy[1]!r}"

    def release(self) -> None:
        """The operation in progress is over."""
        self._busy = None

    def close(self, *, cause: BaseException | None = None) -> None:
        """The scope's function is over: nothing recorded may be left.

        Raises:
            HistoryDivergedError: The code no longer asks for something that history holds.
            OperationInProgressError: An operation is still in progress.
        """
        self.is_closed = True
        if self._unawaited is not None:
            raise self._forgotten("before the function ended, so it never ran; await every operation")
        if self._busy is not None:
            raise OperationInProgressError(
                f"the function at {self.path_text()} ended while {self._busy_text()} was in progress; await every operation",
                name="",
                in_progress=self._busy_text(),
            )
        if self.unvisited:
            name, node = self.first_unvisited()
            found = _describe_node(node)
            ended = "ended" if cause is None else f"ended with {type(cause).__name__}"
            raise HistoryDivergedError(
                f"history holds {found} {name!r} at {self.path_text()}, but the code {ended} without asking for it; restore "
                f"that operation, or retire it with `await {self.removal_of(name, node)}`",
                location=self.path_text(name),
                found=found,
                asked=None,
            ) from cause

    def first_unvisited(self) -> tuple[str, Node]:
        """Name and place of the recorded entry that the code was to ask for first."""
        number = min(number for number in self.unvisited if isinstance(number, int))
        return self.activation.history.names[number], self.node.children[number]

    def removal_of(self, name: str, node: Node) -> str:
        """The call that retires a recorded entry."""
        entry = node.entry
        if entry is None:
            return f"ctx.removed({name!r}, 'try_block')"
        if isinstance(entry.kind, RemovedEntry):
            return f"ctx.removed({name!r}, {entry.kind.original_type!r})"
        if is_of_queue_read(self.activation.history, node) and (queue := queue_read_of(name)) is not None:
            return f"ctx.removed({queue!r}, 'message')"
        return f"ctx.removed({name!r}, {KIND_NAMES[type(entry.kind)]!r})"


def queue_read_of(name: str) -> str | None:
    """The queue read that would store something under this name, or `None`."""
    match = _DERIVED.fullmatch(name) if ":" in name else None
    return None if match is None else match[1]


def is_of_queue_read(history: History, node: Node) -> bool:
    """Whether an entry that has the name for it was stored by a queue read, and is no sleep of the user's by such a name."""
    entry = node.entry
    if entry is None or not isinstance(entry.kind, MessageEntry | SleepEntry):
        return False
    return isinstance(entry.kind, MessageEntry) or not history.detail(entry.id).get("sleep")


def _child(node: Node, segment: Segment) -> Node:
    child = node.children.get(segment)
    if child is None:
        child = node.children[segment] = Node()
    return child


def _describe_node(node: Node) -> str:
    if node.entry is None:
        return "a try_block"
    kind = node.entry.kind
    return f"a removed {kind.original_type}" if isinstance(kind, RemovedEntry) else f"a {KIND_NAMES[type(kind)]}"


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):  # out of a nursery in a step's function
        return cast("BaseExceptionGroup[BaseException]", error).subgroup(trio.Cancelled) is not None
    return isinstance(error, trio.Cancelled)


class Operation:
    """One call of a context's method, from its check to its end; a context manager.

    Attributes:
        scope: Where it was called.
        name: What it was called.
    """

    __slots__ = ("_number", "name", "operation", "scope")

    def __init__(self, scope: Scope, name: str, operation: OperationName) -> None:
        self.scope: Scope = scope
        self.name: str = name
        self.operation: OperationName = operation
        self._number: int | None = None

    def __enter__(self) -> Operation:
        activation = self.scope.activation
        if activation.closing is not None or not (self.scope.lane.is_open or self.scope.is_closed):
            raise SuspendSignal
        try:
            check_name(self.name, self.operation)
            self.scope.claim(self.name, self.operation)
        except FaultError as error:
            activation.fault(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.scope.release()
        if error is None or not self.scope.lane.is_open:
            return  # what comes out of a loser's unwinding is nobody's
        if isinstance(error, FaultError):
            self.scope.activation.fault(error)
        elif ends_process(error):
            self.scope.activation.interrupt(error)
        elif _is_cancellation(error):
            self.scope.activation.note_cancelled(self.name, self.operation)

    def find(self, kind: type[KindT], name: str | None = None) -> tuple[Node, Entry, KindT] | None:
        """The recorded entry of this operation, or of one of its derived names; counts as asking for it.

        Raises:
            HistoryDivergedError: History holds another kind there.
        """
        scope = self.scope
        number = self._number_of(name)
        scope.unvisited.discard(number)
        node = scope.node.children.get(number)
        if node is None:
            return None
        entry = node.entry
        if entry is None or type(entry.kind) is not kind:
            raise self.diverged(name or self.name, node, "where the code asks for")
        return node, entry, entry.kind

    def find_node(self) -> Node | None:
        """What is recorded under this operation's name, of whatever kind; counts as asking for it. Registers no name."""
        scope = self.scope
        number = scope.activation.history.known_number(self.name)
        if number is None:
            return None
        scope.unvisited.discard(number)
        return scope.node.children.get(number)

    def check_is_block(self) -> None:
        """What is recorded here, if anything is, has no entry of its own.

        Raises:
            HistoryDivergedError: History holds an entry there.
        """
        number = self._number_of(None)
        self.scope.unvisited.discard(number)
        node = self.scope.node.children.get(number)
        if node is not None and node.entry is not None:
            raise self.diverged(self.name, node, "where the code asks for")

    def check_is_next(self) -> None:
        """Nothing new may begin while this scope, or one around it, holds recorded entries that the code did not ask for.

        Raises:
            HistoryDivergedError: There are such entries.
            SuspendSignal: The function is run only for what it did, and this it did not do.
        """
        self.check_order()
        if self.scope.activation.is_collecting:
            raise SuspendSignal

    def check_order(self) -> None:
        """The same for what goes on with something recorded that may be revisited.

        Raises:
            HistoryDivergedError: There are such entries.
        """
        ahead = self.scope.ahead
        if ahead is not None:
            name, node = ahead.first_unvisited()
            raise self.diverged(name, node, "and the code, not having asked for it, goes on to", ahead)

    def diverged(self, name: str, node: Node, how: str, scope: Scope | None = None) -> HistoryDivergedError:
        """The error for a recorded entry that does not go with this operation; `how` says why, before what was asked for."""
        scope = scope or self.scope
        found = _describe_node(node)
        asked = f"{self.operation} {self.name!r}"
        then = "and name the new one otherwise" if name == self.name else f"before {asked}"
        return HistoryDivergedError(
            f"history holds {found} {name!r} at {scope.path_text()}, {how} {asked}; restore the operation that was there "
            f"(a renamed one is another one), or, if it is gone for good, retire it with `await {scope.removal_of(name, node)}` "
            f"{then}",
            location=scope.path_text(name),
            found=found,
            asked=asked,
        )

    def enter(self, segment: Segment | None = None, lane: Lane | None = None, *, is_finished: bool = False) -> Scope:
        """The scope of what this operation runs, at its own place or at a segment below; `leave` it afterwards.

        `is_finished` where it runs once more, for its handlers only, over what it recorded before it finished.
        """
        outer = self.scope
        number = self._number_of(None)
        outer.unvisited.discard(number)
        node, location = _child(outer.node, number), (*outer.location, number)
        if segment is not None:
            node, location = _child(node, segment), (*location, segment)
        scope = Scope(outer.activation, location, node, outer=outer, lane=lane, is_finished=is_finished)
        outer.inner[scope] = None
        return scope

    def leave(self, scope: Scope) -> None:
        """What ran in a scope of this operation is over; a place at which nothing was recorded is none."""
        scope.is_closed = True
        del self.scope.inner[scope]
        if scope.can_be_undone:
            self.scope.can_be_undone = True
        if scope.node.entry is None and not scope.node.children:
            outer = self.scope.node
            parent = (
                outer if len(scope.location) == len(self.scope.location) + 1 else outer.children[self._number_of(None)]
            )
            parent.children.pop(scope.location[-1], None)

    async def check_counts(self) -> None:
        """See that the context was not closed under what this operation ran: else what that came to does not count.

        Raises:
            SuspendSignal: It was.
        """
        if self.scope.activation.closing is not None:
            raise SuspendSignal
        lane = self.scope.lane
        if not lane.is_open:
            await lane.leave()

    def progress(self) -> None:
        """Something of this operation is about to be recorded that another run would not have to do again.

        Raises:
            SuspendSignal: Nothing may be recorded any more.
        """
        if not self.scope.lane.is_open:
            raise SuspendSignal
        self.scope.activation.progress()

    def _number_of(self, name: str | None) -> int:
        if name is not None:
            return self.scope.activation.history.number_of(name)
        if self._number is None:
            self._number = self.scope.activation.history.number_of(self.name)
        return self._number

    def create(self, kind: EntryKind, name: str | None = None) -> Node:
        """Record a new entry of this operation, or of one of its derived names."""
        scope = self.scope
        activation = scope.activation
        number = self._number if name is None and self._number is not None else self._number_of(name)
        scope.unvisited.discard(number)
        node = scope.node.children[number] = Node()
        entry = Entry(activation.ids.next_id(), (*scope.location, number), kind)
        activation.history.put_entry(node, entry, layout.key_below(scope.key, number))
        return node
