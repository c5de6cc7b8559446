"""What `open_supervisor` is given, checked: everything that is wrong is said before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from os import PathLike
from typing import Any, Literal, cast

from perdure.actors.limits import WorkflowLimit, check_limits
from perdure.actors.retention import check_retention
from perdure.actors.slots import default_max_live, lent_max_of
from perdure.storage import CodedStore, FileStore, Store, ValueCodec
from perdure.storage.descriptors import raise_descriptor_limit
from perdure.workflow import Clock, Context, InvalidArgumentError, SystemClock, Workflow, definition_of
from perdure.workflow.checks import check_count, check_duration, check_mailbox_limit
from perdure.workflow.hooks import Hooks

__all__ = ["Options", "WorkflowLike", "check_options"]

WorkflowLike = Workflow[Any, Any] | Callable[[Context, Any], Awaitable[Any]]
"""A workflow as users hand it over: `@workflow`-made, or a coroutine function known by its `__name__`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a supervisor works with; see `open_supervisor` for what each means.

    Attributes:
        store: Where its workflows are; codes their data, if that was asked for.
        definitions: The registered workflows, by name.
        grace: Seconds.
        idle_timeout: Seconds; infinity for never.
        max_live: How many workflows may run at once.
        lent_max: How many of them may lend their places at once.
        mailbox_limit: How many messages a mailbox may hold.
        limits: By the names of workflows.
        hooks: What is told of all workflows, if anything is.
        clock: Where the time comes from.
        retention: Milliseconds for which ended workflows are kept, by state.
    """

    store: Store
    definitions: dict[str, Workflow[Any, Any]]
    grace: float
    idle_timeout: float
    max_live: int
    lent_max: int
    mailbox_limit: int
    limits: Mapping[str, WorkflowLimit]
    hooks: Hooks | None
    clock: Clock
    retention: Mapping[str, int]


def check_options(
    store: str | PathLike[str] | Store,
    workflows: Iterable[WorkflowLike],
    *,
    durability: Literal["full", "normal"],
    codec: ValueCodec | None,
    grace: float,
    idle_timeout: float | None,
    max_live: int | None,
    mailbox_limit: int,
    limits: Mapping[WorkflowLike | str, WorkflowLimit] | None,
    hooks: Hooks | None,
    clock: Clock | None,
    retention: Mapping[str, float | timedelta] | None,
) -> Options:
    """The options, or an `InvalidArgumentError`; raises the process's limit of descriptors as far as it may be."""
    definitions = _definitions(workflows)
    checked_store = _check_store(_file_store(store, durability))
    if max_live is not None:
        check_count(max_live, "max_live", least=1, example="max_live=1000")
    descriptors = raise_descriptor_limit()
    live = default_max_live(descriptors) if max_live is None else max_live
    return Options(
        store=checked_store if codec is None else _coded(checked_store, codec),
        definitions=definitions,
        grace=check_duration(grace, "grace", "grace=10.0"),
        idle_timeout=inf if idle_timeout is None else check_duration(idle_timeout, "idle_timeout", "idle_timeout=60.0"),
        mailbox_limit=check_mailbox_limit(mailbox_limit),
        limits=check_limits(limits, definitions),
        hooks=hooks,
        clock=SystemClock() if clock is None else _check_clock(clock),
        retention=check_retention(retention),
        max_live=live,
        lent_max=lent_max_of(descriptors, live),
    )


def _definitions(workflows: object) -> dict[str, Workflow[Any, Any]]:
    definitions: dict[str, Workflow[Any, Any]] = {}
    for given in _check_list(workflows):
        definition = definition_of(given)
        if definition.name in definitions:
            raise InvalidArgumentError(
                f'two workflows are named {definition.name!r}; give one another name with @workflow(name="...")'
            )
        definitions[definition.name] = definition
    return definitions


def _file_store(store: object, durability: Literal["full", "normal"]) -> object:
    if durability not in ("full", "normal"):
        raise InvalidArgumentError(f'durability must be "full" or "normal", not {durability!r}')
    if not isinstance(store, str | PathLike):
        return store
    path = cast("str | PathLike[str]", store)
    if not os.fspath(path):
        raise InvalidArgumentError('the directory must not be empty; write open_supervisor("data/")')
    return FileStore(path, durability=durability)


def _coded(store: Store, codec: ValueCodec) -> Store:
    try:
        return CodedStore(store, codec)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(str(error)) from error


def _check_list(workflows: object) -> Iterable[object]:
    if callable(workflows) or isinstance(workflows, str) or not isinstance(workflows, Iterable):
        raise InvalidArgumentError(f"workflows= takes a list of workflows, not {workflows!r}; write workflows=[order]")
    return cast("Iterable[object]", workflows)


def _check_clock(clock: object) -> Clock:
    if isinstance(clock, type) or not (hasattr(clock, "now_ms") and hasattr(clock, "wait_until_ms")):
        raise InvalidArgumentError(
            f"clock= takes an object with now_ms() and wait_until_ms(), not {clock!r}; leave it out for the system's clock"
        )
    return cast("Clock", clock)


def _check_store(store: object) -> Store:
    if isinstance(store, type) or not isinstance(store, Store):
        raise InvalidArgumentError(
            f'a directory or a Store is needed, not {type(store).__name__}; write open_supervisor("data/")'
        )
    return store
