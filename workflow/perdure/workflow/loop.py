"""`ctx.loop`: iterations whose history is forgotten as they finish.

1. A loop's entry holds the iteration in progress and the state it began with; a restart goes on there.
2. Each iteration is a scope of its own. A finished one is visited as a unit: it is not run again.
3. Forgetting iterations is in the same batch as the state that makes them superfluous, and costs what is forgotten.
4. An iteration that recorded nothing is not committed by itself; at every prune interval all is.
5. A loop whose body raised stays as it was, since what it raised comes again out of what is recorded of that iteration. So
   there may be recorded entries after a loop that is not finished; only if it goes further are they divergence.
6. Where steps of an iteration can be undone, the state that it began with is kept as long as its history is: to find the
   handlers, bodies of retained iterations run once more (`collecting.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import trio

from perdure.storage.schema import EntryMetadata, EntryStatus, LoopEntry, LoopIteration
from perdure.storage.values import UNDEFINED
from perdure.workflow.checks import check_function
from perdure.workflow.collecting import revisit
from perdure.workflow.errors import InvalidArgumentError, SuspendSignal
from perdure.workflow.history import Node
from perdure.workflow.scope import Operation
from perdure.workflow.typed import Converter, breaks, decode, round_trip, states
from perdure.workflow.types import Break, Continue

if TYPE_CHECKING:
    from perdure.workflow.context import Context

__all__ = ["run_loop"]

_ITERATIONS_MAX = 2**32 - 1


def _encode_state(operation: Operation, converter: Converter | None, state: object) -> tuple[bytes, Any]:
    if state is None and converter is None:
        return UNDEFINED, None
    what = f"the state of loop {operation.name!r}"
    bytes_max = operation.scope.activation.user_bytes_max
    data, state = round_trip(converter, state, bytes_max=bytes_max, what=what, root="state")
    return UNDEFINED if data is None else data, state


def _decode_state(operation: Operation, converter: Converter | None, data: bytes) -> Any:
    return decode(converter, data, what=f"the recorded state of loop {operation.name!r}", root="state")


async def run_loop(
    operation: Operation,
    body: Callable[[Context, Any], Awaitable[Any]],
    state: object,
    prune_interval: int,
    history_size: int,
) -> Any:
    """Run the body until it breaks; its value is durable on return."""
    check_function(body, "a loop's body", "ctx.loop(name, body, state)")
    _check_signature(operation, body)
    state_converter, value_converter = states(body), breaks(body)
    activation = operation.scope.activation
    history = activation.history
    found = operation.find(LoopEntry)
    if found is not None:
        node, entry, kind = found
        metadata = history.metadata(entry.id) or EntryMetadata(status=EntryStatus.RUNNING)
        is_finished = kind.output is not None or metadata.status is EntryStatus.COMPLETED
        if activation.is_collecting:
            await _revisit_iterations(operation, body, node, kind, state_converter, is_finished=is_finished)
        if is_finished:
            await activation.replayed()
            what = f"the recorded value of loop {operation.name!r}"
            return decode(value_converter, kind.output, what=what, root="value")
        loop = _Loop(operation, node, metadata, kind.state, kind.iteration, state_converter, value_converter)
        state = _decode_state(operation, state_converter, kind.state)
    else:
        operation.check_is_next()
        state_data, state = _encode_state(operation, state_converter, state)
        metadata = EntryMetadata(status=EntryStatus.RUNNING, created_at_ms=activation.clock.now_ms())
        node = operation.create(LoopEntry(state_data, 0, None))
        history.put_metadata(node, metadata)
        activation.hold_steps()
        loop = _Loop(operation, node, metadata, state_data, 0, state_converter, value_converter)
    while True:
        answer = await loop.run_iteration(body, state)
        if activation.is_collecting:
            raise SuspendSignal  # the iteration in progress had not come so far
        match answer:
            case Break():
                return await loop.finish(cast("Break[object]", answer).value, history_size)
            case Continue():
                following = cast("Continue[object]", answer).state
                state = await loop.advance(following, prune_interval, history_size)
            case None if loop.state_data == UNDEFINED:
                state = await loop.advance(None, prune_interval, history_size)
            case _:
                what = "None although the loop has a state" if answer is None else f"{answer!r:.80}"
                raise InvalidArgumentError(
                    f"the body of loop {operation.name!r} returned {what}; return Continue(state) to go on, or Break(value)"
                )


async def _revisit_iterations(
    operation: Operation,
    body: Callable[[Context, Any], Awaitable[Any]],
    node: Node,
    kind: LoopEntry,
    converter: Converter | None,
    *,
    is_finished: bool,
) -> None:
    """Run the bodies of retained iterations once more, as far as their starting states are known."""
    from perdure.workflow.context import Context

    entry = node.entry
    assert entry is not None, "the loop is recorded"
    retained = sorted(segment for segment in node.children if isinstance(segment, LoopIteration))
    for segment in retained:
        if segment.iteration < kind.iteration:
            state = operation.scope.activation.history.loop_start(entry.id, segment.iteration)
        else:
            state = kind.state if segment.iteration == kind.iteration and is_finished else None
        if state is None:
            continue
        scope = operation.enter(segment, is_finished=True)
        try:
            await revisit(scope, partial(body, Context(scope), _decode_state(operation, converter, state)))
        finally:
            operation.leave(scope)


def _check_signature(operation: Operation, body: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(body)
    except ValueError:  # it has none that can be told
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise InvalidArgumentError(
            f"the body of loop {operation.name!r} is called with a context and the state, but does not take these; write "
            "`async def body(ctx, state): ...`"
        ) from None


class _Loop:
    """A loop in progress."""

    def __init__(
        self,
        operation: Operation,
        node: Node,
        metadata: EntryMetadata,
        state_data: bytes,
        iteration: int,
        state_converter: Converter | None,
        value_converter: Converter | None,
    ) -> None:
        self._operation = operation
        self._activation = operation.scope.activation
        self._node = node
        self._metadata = metadata
        self._iteration = iteration
        self._state_converter = state_converter
        self._value_converter = value_converter
        self.state_data = state_data
        entry = node.entry
        assert entry is not None, "the loop is recorded"
        self._entry_id = entry.id
        self._location = entry.location
        self._can_be_undone = False
        number = entry.location[-1]
        assert isinstance(number, int), "a loop's location ends with its name"
        self._number = number
        retained = [segment.iteration for segment in node.children if isinstance(segment, LoopIteration)]
        self._oldest = min(retained, default=iteration)

    async def run_iteration(self, body: Callable[[Context, Any], Awaitable[Any]], state: object) -> Any:
        from perdure.workflow.context import Context

        scope = self._operation.enter(LoopIteration(self._number, self._iteration))
        try:
            called = body(Context(scope), state)
            if not hasattr(called, "__await__"):
                raise InvalidArgumentError(
                    f"the body of loop {self._operation.name!r} is a plain function; write `async def body(ctx, state): ...`"
                )
            answer = await called
        except Exception as error:
            if self._activation.closing is None and scope.lane.is_open and scope.unvisited:
                scope.close(cause=error)
            raise
        finally:
            self._can_be_undone = scope.can_be_undone
            self._operation.leave(scope)
        await self._operation.check_counts()
        scope.close()
        return answer

    async def advance(self, state: object, prune_interval: int, history_size: int) -> Any:
        """Go on to the next iteration; returns the state as it is stored."""
        self._operation.check_order()
        activation = self._activation
        began_with, iteration = self.state_data, self._iteration
        self.state_data, state = _encode_state(self._operation, self._state_converter, state)
        self._iteration += 1
        if self._iteration > _ITERATIONS_MAX:
            raise InvalidArgumentError(
                f"loop {self._operation.name!r} reached its limit of 2**32 iterations; break before"
            )
        self._operation.progress()
        if activation.history.checkpoints and (self._can_be_undone or self._holds_completions(iteration)):
            activation.history.put_loop_start(self._entry_id, iteration, began_with)
        activation.history.change(self._node, LoopEntry(self.state_data, self._iteration, None))
        if self._iteration % prune_interval == 0:
            self._prune(self._iteration - history_size)
            await activation.commit()
        else:
            await trio.lowlevel.checkpoint()
        return state

    def _holds_completions(self, iteration: int) -> bool:
        """Whether a step that can be undone is recorded in an iteration: it may lie in something that replay passed over."""
        node = self._node.children.get(LoopIteration(self._number, iteration))
        return node is not None and self._activation.history.holds_completions(node)

    async def finish(self, value: object, history_size: int) -> Any:
        self._operation.check_order()
        activation = self._activation
        what = f"the value that loop {self._operation.name!r} broke with"
        bytes_max = activation.user_bytes_max - len(self.state_data)
        data, value = round_trip(self._value_converter, value, bytes_max=bytes_max, what=what, root="value")
        self._operation.progress()
        activation.history.change(self._node, LoopEntry(self.state_data, self._iteration, data))
        self._metadata.status = EntryStatus.COMPLETED
        self._metadata.completed_at_ms = activation.clock.now_ms()
        activation.history.put_metadata(self._node, self._metadata)
        self._prune(self._iteration + 1 - history_size)
        await activation.commit()
        return value

    def _prune(self, keep_from: int) -> None:
        if keep_from > self._oldest:
            self._activation.history.prune_iterations(self._node, self._location, self._oldest, keep_from)
            self._oldest = keep_from
