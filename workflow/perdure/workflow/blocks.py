"""`ctx.try_step` and `ctx.try_block`: failures as values.

1. Neither has an entry of its own: what they return is made anew on every run from what is recorded of the steps, joins and
   races inside, so it is the same.
2. Only failures that are recorded can be caught: exceptions of the workflow's own code pass, as do faults and signals.
3. A block is a scope: its function runs again on replay, over the recorded entries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from perdure.workflow.checks import check_function
from perdure.workflow.errors import (
    ErrorInfo,
    FailureKind,
    InvalidArgumentError,
    JoinError,
    RaceError,
    RollbackError,
    StepError,
)
from perdure.workflow.failures import describe
from perdure.workflow.scope import Operation
from perdure.workflow.types import BlockFailure, BlockOk, StepFailure

__all__ = ["BLOCK_CATCH", "STEP_CATCH", "BlockCatchKind", "check_catch", "run_block", "step_failure"]

BlockCatchKind: TypeAlias = Literal["step", "join", "race", "rollback"]
"""What a try block catches: failures of steps, of joins, of races, and `RollbackError`, raised in a step or in the block."""

STEP_CATCH: Final[tuple[FailureKind, ...]] = ("critical", "timeout", "exhausted", "interrupted")
"""What `ctx.try_step` catches unless told otherwise: all but `rollback`."""

BLOCK_CATCH: Final[tuple[BlockCatchKind, ...]] = ("step", "join", "race")
"""What `ctx.try_block` catches unless told otherwise."""

_STEP_KINDS: Final = frozenset(get_args(FailureKind))
_BLOCK_KINDS: Final = frozenset(get_args(BlockCatchKind))


def check_catch(catch: object, operation: Literal["try_step", "try_block"]) -> frozenset[str]:
    """The kinds to catch.

    Raises:
        InvalidArgumentError: They are no collection, or one is no kind.
    """
    kinds, usual = (_STEP_KINDS, STEP_CATCH) if operation == "try_step" else (_BLOCK_KINDS, BLOCK_CATCH)
    if isinstance(catch, str) or not isinstance(catch, Iterable):
        raise InvalidArgumentError(f"catch must be a tuple of kinds, not {catch!r:.80}; write catch={usual}")
    given = list(cast("Iterable[object]", catch))
    for kind in given:
        if kind not in kinds:
            raise InvalidArgumentError(f"{operation} cannot catch {kind!r:.80}, only {', '.join(sorted(kinds))}")
    return frozenset(cast("list[str]", given))


def step_failure(error: StepError) -> StepFailure:
    """A step's failure as a value."""
    return StepFailure(error.kind, error.step_name, error.attempts, error.error)


async def run_block(
    operation: Operation, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...], catch: frozenset[str]
) -> BlockOk[Any] | BlockFailure:
    """Run the block's function in a scope of its own, over what is recorded of it."""
    from perdure.workflow.context import Context

    check_function(function, "a block's function", "ctx.try_block(name, fn, argument)")
    activation = operation.scope.activation
    operation.check_is_block()
    if activation.is_collecting and activation.history.known_number(operation.name) is None:
        operation.check_is_next()
    scope = operation.enter()
    try:
        called = function(Context(scope), *args)
        if not hasattr(called, "__await__"):
            raise InvalidArgumentError(
                f"the function of try_block {operation.name!r} is a plain function; write `async def block(ctx): ...`"
            )
        value = await called
    except Exception as error:
        if activation.closing is None and scope.lane.is_open:
            scope.close(cause=error)
        failure = _failure(operation.name, error, catch)
        if failure is None:
            raise
        await operation.check_counts()
        return failure
    finally:
        operation.leave(scope)
    await operation.check_counts()
    scope.close()
    return BlockOk(value)


def _failure(block: str, error: Exception, catch: frozenset[str]) -> BlockFailure | None:
    match error:
        case StepError():
            kind = "rollback" if error.kind == "rollback" else "step"
            failure = step_failure(error)
            found = BlockFailure("step", error.step_name, error.error, failure)
        case JoinError():
            kind, found = "join", BlockFailure("join", error.name, _info(error))
        case RaceError():
            kind, found = "race", BlockFailure("race", error.name, _info(error))
        case RollbackError():
            kind, found = "rollback", BlockFailure("block", block, _info(error))
        case _:
            return None
    return found if kind in catch else None


def _info(error: Exception) -> ErrorInfo:
    # Without the stack, which is that of this run: a failure that replays as it was has no part that does not.
    described = describe(error)
    return ErrorInfo(described.name, described.message, None, described.metadata)
