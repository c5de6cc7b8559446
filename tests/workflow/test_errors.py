"""Errors of every shape: stored within bounds, readable after a restart, and raised alike on every run."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import trio
from harness import Namespace, host
from trio.testing import MockClock

from perdure.workflow import (
    Context,
    CriticalError,
    ErrorInfo,
    RollbackError,
    RunMode,
    StepCriticalError,
    StepError,
    StepExhaustedError,
    StepTimeoutError,
    WorkflowFailedError,
    WorkflowState,
    current_step,
)

TEXT_BYTES_MAX = 64 * 1024
MARK = "… [cut]"


class TwoArgumentsError(Exception):
    """Its constructor takes two arguments, so it cannot be rebuilt from its message."""

    def __init__(self, order: str, cents: int) -> None:
        super().__init__(f"order {order} costs {cents} too much")
        self.order = order
        self.cents = cents


class AttributesError(Exception):
    """Attributes that can be kept, and some that cannot."""

    def __init__(self) -> None:
        super().__init__("declined")
        self.code = 402
        self.reason = "insufficient funds"
        self.ratio = 0.5
        self.final = True
        self.nothing = None
        self.card = object()
        self.trail = [1, 2]


class UnreadableError(Exception):
    """Its own text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class CardError(CriticalError):
    """A critical error of the user's own."""


def raise_two_arguments() -> None:
    raise TwoArgumentsError("A-1", 300)


def raise_attributes() -> None:
    raise AttributesError


def raise_chained() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise LookupError("no such order") from error


def raise_large() -> None:
    raise ValueError("漢字é" * 131_072)


def raise_unreadable() -> None:
    raise UnreadableError


def raise_surrogate() -> None:
    raise ValueError("broken \udcff text")


def raise_empty() -> None:
    raise ValueError


def raise_deep(depth: int = 400) -> None:
    if depth == 0:
        raise ValueError("deep down")
    raise_deep(depth - 1)


def raise_group_of_one() -> None:
    try:
        raise TwoArgumentsError("B-2", 5)
    except TwoArgumentsError as error:
        raise ExceptionGroup("group", [error]) from None


def raise_group() -> None:
    raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])


ERRORS: dict[str, tuple[Callable[[], None], str, str, dict[str, Any]]] = {
    "two arguments": (
        raise_two_arguments,
        "TwoArgumentsError",
        "order A-1 costs 300 too much",
        {"order": "A-1", "cents": 300},
    ),
    "attributes": (
        raise_attributes,
        "AttributesError",
        "declined",
        {"code": 402, "reason": "insufficient funds", "ratio": 0.5, "final": True, "nothing": None},
    ),
    "chained": (raise_chained, "LookupError", "no such order", {}),
    "unreadable": (raise_unreadable, "UnreadableError", "<str() of it raised RuntimeError>", {}),
    "surrogate": (raise_surrogate, "ValueError", "broken ? text", {}),
    "empty": (raise_empty, "ValueError", "", {}),
    "deep": (raise_deep, "ValueError", "deep down", {}),
    "group of one": (
        raise_group_of_one,
        "TwoArgumentsError",
        "order B-2 costs 5 too much",
        {"order": "B-2", "cents": 5},
    ),
    "group": (raise_group, "ExceptionGroup", "several (2 sub-exceptions)", {}),
}


async def stored_error(namespace: Namespace, mode: RunMode, function: Any) -> tuple[ErrorInfo, WorkflowFailedError]:
    """Run a workflow that fails; what is stored, and what a run in a new process raises."""
    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError):
            await process.finish(function)
        await process.restart()
        snapshot = await namespace.snapshot()
        with pytest.raises(WorkflowFailedError) as caught:
            await process.finish(function)
    assert snapshot.state is WorkflowState.FAILED
    assert snapshot.error is not None
    return snapshot.error, caught.value


@pytest.mark.parametrize("which", ERRORS)
async def test_an_error_of_the_workflow_is_readable_after_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, which: str
) -> None:
    """S10: state, name, message, metadata and a bounded stack."""
    throw, name, message, metadata = ERRORS[which]

    async def workflow(ctx: Context, _: object) -> None:
        throw()

    stored, raised = await stored_error(namespace, mode, workflow)
    assert (stored.name, stored.message, stored.metadata) == (name, message, metadata)
    assert stored.stack is not None
    assert throw.__name__ in stored.stack
    assert len(stored.stack.encode()) <= TEXT_BYTES_MAX
    assert raised.error == stored
    assert (raised.name, raised.message, raised.stack, raised.metadata) == (name, message, stored.stack, metadata)
    assert raised.__cause__ is None, "no original is left after a restart"


async def test_the_stack_of_a_chained_error_tells_of_both(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10: one from a chain keeps its cause in the stack."""

    async def workflow(ctx: Context, _: object) -> None:
        raise_chained()

    stored, _ = await stored_error(namespace, mode, workflow)
    assert stored.stack is not None
    assert "KeyError: 'missing'" in stored.stack
    assert "LookupError: no such order" in stored.stack


@pytest.mark.parametrize("in_step", [True, False])
async def test_a_megabyte_of_message_is_kept_to_64_kib_cut_between_characters_and_marked(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, in_step: bool
) -> None:
    """S10: a non-ASCII message of 1 MB, in the workflow's error and in every stored text."""

    async def fail() -> None:
        raise_large()

    async def workflow(ctx: Context, _: object) -> None:
        if in_step:
            await ctx.step("fail", fail, max_retries=0)
        else:
            raise_large()

    stored, raised = await stored_error(namespace, mode, workflow)
    original = "漢字é" * 131_072
    assert len(original.encode()) == 1_048_576
    kept = stored.message.removesuffix(MARK)
    assert kept != stored.message, "not marked"
    if in_step:
        assert "漢字é" * 8_000 in stored.message
    else:
        assert original.startswith(kept)
    assert TEXT_BYTES_MAX - 4 < len(stored.message.encode()) <= TEXT_BYTES_MAX
    assert "\ufffd" not in kept, "a character was cut in two"
    assert raised.error == stored
    for key, value in (await namespace.dump()).items():
        assert len(value) < 5 * TEXT_BYTES_MAX, f"unbounded: {key.hex()}"
    await namespace.close()


# The errors of steps, on the first run and on replay.


def facts(error: StepError) -> dict[str, Any]:
    """All that can be known of a step's error."""
    return {
        "class": type(error),
        "text": str(error),
        "step": error.step_name,
        "attempts": error.attempts,
        "kind": error.kind,
        "entry": error.entry_id,
        "error": error.error,
        "pickled": {
            key: value for key, value in vars(pickle.loads(pickle.dumps(error))).items() if not key.startswith("_")
        },
    }


async def check_replayed_alike(
    namespace: Namespace, mode: RunMode, fail: Callable[[], Any], error_class: type[StepError], **options: Any
) -> tuple[dict[str, Any], BaseException | None]:
    """A workflow that catches a step's error, waits, and is restarted; the error, and its cause on the first run."""
    seen: list[dict[str, Any]] = []
    causes: list[BaseException | None] = []
    runs: list[int] = []

    async def counted() -> None:
        runs.append(current_step().attempt)
        await fail()

    async def workflow(ctx: Context, _: object) -> str:
        try:
            await ctx.step("fail", counted, **options)
        except StepError as error:
            seen.append(facts(error))
            causes.append(error.__cause__)
        await ctx.queue.next("wait", names=["go"])
        return "went on"

    async with host(namespace, mode) as process:
        while not seen:
            await process.stop(workflow)
            await process.advance(1)
        first_runs = list(runs)
        await process.restart()
        await process.stop(workflow)
        await process.send("go")
        assert await process.finish(workflow) == "went on"
    assert runs == first_runs, "the failed step ran again"
    assert len(seen) >= 2
    assert all(later == seen[0] for later in seen), "replay raised something else"
    assert seen[0]["class"] is error_class
    assert all(cause is None for cause in causes[1:])
    assert runs == list(range(1, seen[0]["attempts"] + 1))
    return seen[0], causes[0]


@pytest.mark.parametrize("which", ERRORS)
async def test_a_failed_step_raises_the_same_class_with_the_same_data_on_replay(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, which: str
) -> None:
    """S10: exhausted after one attempt; the original is the cause on the first run only."""
    throw, name, message, metadata = ERRORS[which]

    async def fail() -> None:
        throw()

    error, cause = await check_replayed_alike(namespace, mode, fail, StepExhaustedError, max_retries=0)
    info = error["error"]
    assert (info.name, info.message, info.metadata) == (name, message, metadata)
    assert throw.__name__ in info.stack
    assert len(info.stack.encode()) <= TEXT_BYTES_MAX
    assert len(error["text"].encode()) <= TEXT_BYTES_MAX
    assert cause is not None
    assert throw.__name__ in "".join(traceback.format_exception(cause))


async def test_an_exhausted_step_raises_its_last_error_alike_on_replay(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10: after retries."""

    async def fail() -> None:
        raise TwoArgumentsError("C", current_step().attempt)

    error, _ = await check_replayed_alike(namespace, mode, fail, StepExhaustedError, max_retries=2)
    assert error["attempts"] == 3
    assert error["error"].metadata == {"order": "C", "cents": 3}


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (CardError("declined", code=51), "critical"),
        (RollbackError("undo it"), "rollback"),
        (ExceptionGroup("group", [ValueError("other"), CardError("declined", code=51)]), "critical"),
        (ExceptionGroup("group", [ExceptionGroup("inner", [RollbackError("undo it")])]), "rollback"),
    ],
)
async def test_a_critical_step_raises_alike_on_replay(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, raised: Exception, kind: str
) -> None:
    """S10: critical and rollback errors, out of groups too; one attempt."""

    async def fail() -> None:
        raise raised

    error, cause = await check_replayed_alike(namespace, mode, fail, StepCriticalError)
    assert (error["kind"], error["attempts"]) == (kind, 1)
    assert cause is raised
    if isinstance(raised, CardError):
        assert error["error"].metadata == {"code": 51}


async def test_a_step_that_timed_out_raises_alike_on_replay(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10: a timeout."""

    async def fail() -> None:
        await trio.sleep(60)

    error, _ = await check_replayed_alike(namespace, mode, fail, StepTimeoutError, timeout=2)
    assert (error["kind"], error["attempts"]) == ("timeout", 1)


@pytest.mark.parametrize("which", ERRORS)
async def test_a_critical_error_left_uncaught_ends_the_workflow_under_its_own_name(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, which: str
) -> None:
    """S10: what is stored is the step's last error, or the user's own critical error, with its data."""
    throw, name = ERRORS[which][:2]

    async def fail() -> None:
        try:
            throw()
        except Exception as error:
            raise CardError(f"stopped by {name}", code=7) from error

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("fail", fail)

    stored, raised = await stored_error(namespace, mode, workflow)
    assert (stored.name, stored.message, stored.metadata) == ("CardError", f"stopped by {name}", {"code": 7})
    assert raised.error == stored


async def test_an_exhausted_step_left_uncaught_names_class_and_message_of_the_last_error(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10: the workflow's error says what the step's was, after a restart too."""

    async def fail() -> None:
        raise TwoArgumentsError("D", current_step().attempt)

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("fail", fail, max_retries=1)

    stored, raised = await stored_error(namespace, mode, workflow)
    assert stored.name == "StepExhaustedError"
    assert "TwoArgumentsError: order D costs 2 too much" in stored.message
    assert stored.metadata["step_name"] == "fail"
    assert stored.metadata["attempts"] == 2
    assert raised.error == stored
