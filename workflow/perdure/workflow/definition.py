"""Workflows as supervisors know them: a function and the name by which it is found again after a restart."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar, overload

from perdure.workflow.checks import check_function, check_mailbox_limit, check_workflow_name
from perdure.workflow.context import Context
from perdure.workflow.errors import InvalidArgumentError

__all__ = ["Workflow", "WorkflowFunction", "definition_of", "workflow"]

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")

WorkflowFunction: TypeAlias = Callable[[Context, Any], Awaitable[Any]]
"""What runs as a workflow: `async def order(ctx, input)`."""


@dataclass(frozen=True, slots=True)
class Workflow(Generic[InputT, OutputT]):
    """A named workflow; calling it calls the function. Checked as `workflow` says, however it is made.

    Attributes:
        function: `async def function(ctx, input)`.
        name: What it is stored and found under; must not change while such workflows live.
        mailbox_limit: How many messages its mailbox may hold, or `None` for what whoever runs it says (1,000).
    """

    function: Callable[[Context, InputT], Awaitable[OutputT]]
    name: str
    mailbox_limit: int | None = None

    def __post_init__(self) -> None:
        example = "async def order(ctx, input): ..."
        checked = check_function(self.function, "a workflow", example)
        call = getattr(checked, "__call__", None)  # noqa: B004 - asked of an object whose call is a coroutine function
        if not inspect.iscoroutinefunction(checked) and not inspect.iscoroutinefunction(call):
            raise InvalidArgumentError(f"a workflow must be a coroutine function, not {checked!r}; write {example}")
        try:
            inspect.signature(checked).bind(None, None)
        except TypeError:
            raise InvalidArgumentError(
                f"a workflow is called with a context and its input, but {checked!r} does not take these; write {example}"
            ) from None
        check_workflow_name(self.name)
        if self.mailbox_limit is not None:
            check_mailbox_limit(self.mailbox_limit)

    def __call__(self, ctx: Context, input: InputT) -> Awaitable[OutputT]:
        """Call the function itself, as its runner does."""
        return self.function(ctx, input)


@overload
def workflow(function: Callable[[Context, InputT], Awaitable[OutputT]], /) -> Workflow[InputT, OutputT]: ...


@overload
def workflow(
    *, name: str | None = None, mailbox_limit: int | None = None
) -> Callable[[Callable[[Context, InputT], Awaitable[OutputT]]], Workflow[InputT, OutputT]]: ...


def workflow(
    function: Callable[[Context, Any], Awaitable[Any]] | None = None,
    /,
    *,
    name: str | None = None,
    mailbox_limit: int | None = None,
) -> Any:
    """Name a function for recovery: `@workflow`, or `@workflow(name="order-v1")`. Without a name, its `__name__` counts.

    Args:
        function: `async def order(ctx, input)`.
        name: What it is stored and found under.
        mailbox_limit: How many messages a mailbox of its workflows may hold, at least 1; unless given, what
            `open_supervisor(mailbox_limit=)` says.

    Raises:
        InvalidArgumentError: It is not a coroutine function of two arguments, or has no usable name.
    """
    if function is not None:
        return _define(function, None)

    def decorate(function: Callable[[Context, Any], Awaitable[Any]]) -> Workflow[Any, Any]:
        return _define(function, name, mailbox_limit)

    return decorate


def definition_of(given: object) -> Workflow[Any, Any]:
    """The definition of what a user handed over: a `Workflow`, or a coroutine function known by its `__name__`."""
    return given if _is_workflow(given) else _define(given, None)


def _is_workflow(given: object) -> TypeGuard[Workflow[Any, Any]]:
    return isinstance(given, Workflow)


def _define(function: Any, name: str | None, mailbox_limit: int | None = None) -> Workflow[Any, Any]:
    return Workflow(function, getattr(function, "__name__", "") if name is None else name, mailbox_limit)
