"""`explore_crashes`: a workflow runs to its end, with its process dying at every write, and comes to the same end each time.

All of it happens in a worker thread, in virtual time: no clock, no fixture and no plugin is needed, and none is disturbed.

Rejected: to kill real processes. A kill every few milliseconds for each of a thousand runs takes minutes, and hits no chosen
write; `tests/crash` does it for the engine itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

import trio

from perdure.actors import WorkflowLike
from perdure.testing.asked import TIMEOUT_S, WRITES_MAX, Asked, MailLike, RecoveryCrashes
from perdure.testing.bridge import Link, in_thread
from perdure.testing.differences import ASPECTS, Aspect
from perdure.testing.errors import ExplorationError, VirtualTimeError
from perdure.testing.explorer import Exploration, Explorer
from perdure.testing.scenario import FinishedRun
from perdure.testing.strays import watching
from perdure.workflow import Context, WorkflowState

__all__ = ["Exploration", "explore_crashes", "explore_crashes_now"]

InputT = TypeVar("InputT")


async def explore_crashes(
    workflow: Callable[[Context, InputT], Awaitable[Any]],
    input: InputT | None = None,
    *,
    messages: Iterable[MailLike] = (),
    seeds: int | Iterable[int] = 1,
    workflows: Iterable[WorkflowLike] = (),
    ends_as: WorkflowState | str | None = None,
    cancel_at: float | None = None,
    timeout: float = TIMEOUT_S,
    writes_max: int = WRITES_MAX,
    recovery_crashes: RecoveryCrashes = "one",
    compare: Collection[Aspect] = ASPECTS,
    ignore: Collection[str] = (),
    allow_interruptions: bool = False,
    check: Callable[[FinishedRun], object] | None = None,
    keep_globals: bool = False,
    modules: Iterable[ModuleType] = (),
    workflow_id: str | None = None,
    only: str | None = None,
    **options: Any,
) -> Exploration:
    """Run a workflow to its end, with a crash at every write; it has to come to the same end each time.

        async def test_an_order_survives_every_crash() -> None:
            await explore_crashes(order, {"sku": 7}, messages=[("shipped", "TRACK-1")])

    Compared are how the workflows end, what they return, their histories without ids and times, and what happened in each
    `EffectLedger`. Every run has an empty disk, a clock and a world of its own; every process begins with the plain globals of
    the workflows' modules as they were first: numbers, text, lists, dictionaries, sets and the like, what these hold, and what
    functions cache. Attributes of classes and of other objects are not put back, nor what other modules hold. Plain functions of
    steps run in place; nothing real is waited for.

    Works in any async test, under Trio or asyncio, in real or virtual time. Cancelled, it ends the run in progress, and waits
    for that.

    Args:
        workflow: The workflow.
        input: Its input.
        messages: What is sent to it, in order: `(name, body)`, or `Mail(name, body, at=3600.0)`. Each again until acknowledged.
        seeds: Of Trio's scheduler: how many (from 0), or which. Each explores another order of tasks, compared with itself; a
            run that ends otherwise is right as well if one of some further orders ends so without a crash.
        workflows: Further workflows, which it calls.
        ends_as: How it has to end: `completed` unless `cancel_at` is given, `failed` or `cancelled`. Runs of workflows that fail
            for another reason would all be alike.
        cancel_at: When everything that has not ended is cancelled, in seconds after the start; for what never ends by itself.
        timeout: Within how many seconds of virtual time it has to end.
        writes_max: How many writes a process may make.
        recovery_crashes: Whether the next process dies, too: `one`, once for each write, after a death before it, at a write of
            its own that moves on from run to run; `all`, after either death, at every write, which takes the square of the
            time; `none`.
        compare: What has to be alike: some of `state`, `output`, `history`, `effects`.
        ignore: Names of entries whose values may differ, as they are not repeatable.
        allow_interruptions: Whether the workflow may take another way, and end otherwise, where an at-most-once step was
            interrupted. No effect may happen more often than without a crash, and `check` is called all the same.
        check: Called with each `FinishedRun`, the one without a crash first; raises what is wrong with it.
        keep_globals: Leave the globals as they are. Then what only a dead process knew is not found.
        modules: Further modules with globals that end with a process.
        workflow_id: Its id; its name with `-1` unless given.
        only: One run, as an error names it: `only="3/after+0/before@seed7"`.
        options: What `open_supervisor` takes besides, such as `max_live=1`.

    Returns:
        What was explored: explored equals counted.

    Raises:
        ExplorationError: An `AssertionError`, which is one of the next four.
        RecoveryDiffersError: A run with a crash ended otherwise. The text is the story.
        NotRepeatableError: The workflow does not even do the same twice without a crash.
        UnexpectedEndingError: It ends in another state than `ends_as`, already without a crash.
        EndlessRunError: A run did not come to an end.
        EffectThreadError: A thread that a step started had an effect, and does not know in which run.
        InvalidArgumentError: An argument is wrong, or `ignore`, or `faults` of a ledger, names what there never was.
    """
    __tracebackhide__ = True
    asked = Asked.of(
        workflow,
        input,
        messages=messages,
        seeds=seeds,
        workflows=workflows,
        ends_as=ends_as,
        cancel_at=cancel_at,
        timeout=timeout,
        writes_max=writes_max,
        recovery_crashes=recovery_crashes,
        compare=compare,
        ignore=ignore,
        allow_interruptions=allow_interruptions,
        check=check,
        keep_globals=keep_globals,
        modules=modules,
        workflow_id=workflow_id,
        only=only,
        options=options,
    )
    try:
        with watching():  # in the caller's thread, which is outside
            return await in_thread(lambda link: Explorer(asked, link).explore())
    except ExplorationError as error:
        raise error.with_traceback(None) from error.__cause__  # the kit's own frames tell a user nothing


def explore_crashes_now(
    workflow: Callable[[Context, InputT], Awaitable[Any]],
    input: InputT | None = None,
    *,
    messages: Iterable[MailLike] = (),
    seeds: int | Iterable[int] = 1,
    workflows: Iterable[WorkflowLike] = (),
    ends_as: WorkflowState | str | None = None,
    cancel_at: float | None = None,
    timeout: float = TIMEOUT_S,
    writes_max: int = WRITES_MAX,
    recovery_crashes: RecoveryCrashes = "one",
    compare: Collection[Aspect] = ASPECTS,
    ignore: Collection[str] = (),
    allow_interruptions: bool = False,
    check: Callable[[FinishedRun], object] | None = None,
    keep_globals: bool = False,
    modules: Iterable[ModuleType] = (),
    workflow_id: str | None = None,
    only: str | None = None,
    **options: Any,
) -> Exploration:
    """`explore_crashes` for plain code, such as a test under Hypothesis: the same arguments, the same errors. Blocks.

    Raises:
        VirtualTimeError: It is called within a Trio run, which it would block.
    """
    __tracebackhide__ = True
    if trio.lowlevel.in_trio_run():
        raise VirtualTimeError("this would block Trio; write `await explore_crashes(...)`")
    asked = Asked.of(
        workflow,
        input,
        messages=messages,
        seeds=seeds,
        workflows=workflows,
        ends_as=ends_as,
        cancel_at=cancel_at,
        timeout=timeout,
        writes_max=writes_max,
        recovery_crashes=recovery_crashes,
        compare=compare,
        ignore=ignore,
        allow_interruptions=allow_interruptions,
        check=check,
        keep_globals=keep_globals,
        modules=modules,
        workflow_id=workflow_id,
        only=only,
        options=options,
    )
    try:
        return Explorer(replace(asked, call="explore_crashes_now"), Link()).explore()
    except ExplorationError as error:
        raise error.with_traceback(None) from error.__cause__
