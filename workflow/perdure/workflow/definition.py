"""Workflows as supervisors know them: a function and the name by which it is found again after a restart."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar, overload

from perdure.workflow.checks import NAME_BYTES_MAX, check_function
from perdure.workflow.context import Context
from perdure.workflow.errors import InvalidArgumentError

__all__ = ["Workflow", "WorkflowFunction", "definition_of", "workflow"]

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")

WorkflowFunction: TypeAlias = Callable[[Context, Any], Awaitable[Any]]
"""What runs as a workflow: `async def order(ctx, input)`."""


@dataclass(frozen=True, slots=True)
class Workflow(Generic[InputT, OutputT]):
    """A named workflow; calling it calls the function.

    Attributes:
        function: `async def function(ctx, input)`.
        name: What it is stored and found under; must not change while such workflows live.
    """

    function: Callable[[Context, InputT], Awaitable[OutputT]]
    name: str

    def __call__(self, ctx: Context, input: InputT) -> Awaitable[OutputT]:
        """Call the function itself, as its runner does."""
        return self.function(ctx, input)


@overload
def workflow(function: Callable[[Context, InputT], Awaitable[OutputT]], /) -> Workflow[InputT, OutputT]: ...


@overload
def workflow(
    *, name: str | None = None
) -> Callable[[Callable[[Context, InputT], Awaitable[OutputT]]], Workflow[InputT, OutputT]]: ...


def workflow(function: Callable[[Context, Any], Awaitable[Any]] | None = None, /, *, name: str | None = None) -> Any:
    """Name a function for recovery: `@workflow`, or `@workflow(name="order-v1")`. Without a name, its `__name__` counts.

    Raises:
        InvalidArgumentError: It is not a coroutine function of two arguments, or has no usable name.
    """
    if function is not None:
        return _define(function, None)

    def decorate(function: Callable[[Context, Any], Awaitable[Any]]) -> Workflow[Any, Any]:
        return _define(function, name)

    return decorate


def definition_of(given: object) -> Workflow[Any, Any]:
    """The definition of what a user handed over: a `Workflow`, or a coroutine function known by its `__name__`."""
    return given if _is_workflow(given) else _define(given, None)


def _is_workflow(given: object) -> TypeGuard[Workflow[Any, Any]]:
    return isinstance(given, Workflow)


def _define(function: object, name: str | None) -> Workflow[Any, Any]:
    example = "async def order(ctx, input): ..."
    checked = check_function(function, "a workflow", example)
    if not inspect.iscoroutinefunction(checked) and not inspect.iscoroutinefunction(getattr(checked, "__call__", None)):  # noqa: B004
        raise InvalidArgumentError(f"a workflow must be a coroutine function, not {checked!r}; write {example}")
    try:
        inspect.signature(checked).bind(None, None)
    except TypeError:
        raise InvalidArgumentError(
            f"a workflow is called with a context and its input, but {checked!r} does not take these; write {example}"
        ) from None
    chosen = getattr(checked, "__name__", "") if name is None else name
    if not isinstance(chosen, str) or not chosen or chosen == "<lambda>" or len(chosen.encode()) > NAME_BYTES_MAX:
        raise InvalidArgumentError(
            f'{chosen!r} cannot be a workflow\'s name: it has to be found by it after a restart. Write @workflow(name="order")'
        )
    return Workflow(checked, chosen)  # type: ignore[arg-type]
