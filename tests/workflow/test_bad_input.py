"""Bad input raises at once a typed error that says what to write instead, records nothing, and right code goes on."""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Callable
from datetime import date, datetime, timedelta
from typing import Any

import pytest
import trio
from harness import Namespace, host
from trio.testing import MockClock

from perdure.storage import EncodeError, MemoryDriver, PerdureError
from perdure.workflow import (
    Break,
    Context,
    Continue,
    DuplicateNameError,
    InvalidArgumentError,
    MisuseError,
    RunMode,
    Workflow,
    WorkflowState,
    current_step,
    definition_of,
    load_snapshot,
    run_workflow,
    send_message,
    start_workflow,
    workflow,
)

Call = Callable[[Context], Awaitable[Any]]


async def work() -> str:
    return "done"


async def stop_at_once(ctx: Context, state: Any) -> Any:
    return Break("broken")


BAD_TEXTS = {
    "none": (None, "write for example"),
    "number": (5, "write for example"),
    "bytes": (b"name", "write for example"),
    "empty": ("", "write for example"),
    "surrogate": ("lone \ud800", "decode the bytes"),
    "long": ("x" * 513, "shorten it"),
    "long-in-bytes": ("ü" * 257, "shorten it"),
}
BAD_SECONDS = {
    "negative": -0.001,
    "nan": math.nan,
    "infinite": math.inf,
    "minus-infinite": -math.inf,
    "bool": True,
    "text": "60",
    "huge": 10**400,
    "enormous": 10**5000,
    "too-long": 1e16,
    "timedelta": timedelta(seconds=1),
}
BAD_TIMES = {
    "naive": datetime(2030, 1, 1),
    "date": date(2030, 1, 1),
    "text": "2030-01-01",
    "none": None,
    **BAD_SECONDS,
}
BAD_COUNTS = {"negative": -1, "fraction": 1.5, "bool": True, "text": "1", "too-large": 2**32, "enormous": 10**5000}
BAD_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "number": lambda: 5,
    "text": lambda: "work",
    "called": work,
}

NAMED: dict[str, Callable[[Context, Any], Awaitable[Any]]] = {
    "step": lambda ctx, name: ctx.step(name, work),
    "sleep": lambda ctx, name: ctx.sleep(name, 1.0),
    "sleep_until": lambda ctx, name: ctx.sleep_until(name, 0.0),
    "loop": lambda ctx, name: ctx.loop(name, stop_at_once),
    "queue.next": lambda ctx, name: ctx.queue.next(name),
    "queue.next_batch": lambda ctx, name: ctx.queue.next_batch(name),
}


def _bad_calls() -> dict[str, tuple[Call, type[PerdureError], str]]:
    calls: dict[str, tuple[Call, type[PerdureError], str]] = {}

    def add(what: str, call: Call, hint: str, error: type[PerdureError] = InvalidArgumentError) -> None:
        assert what not in calls
        calls[what] = (call, error, hint)

    for operation, named in NAMED.items():
        for kind, (text, hint) in BAD_TEXTS.items():
            add(f"{operation}: name {kind}", lambda ctx, n=named, t=text: n(ctx, t), hint)
        add(
            f"{operation}: name twice",
            lambda ctx, n=named: n(ctx, "before"),
            "give it another",
            DuplicateNameError,
        )
    for kind, make in BAD_FUNCTIONS.items():
        add(f"step: function {kind}", lambda ctx, m=make: ctx.step("s", m()), r"ctx\.step\(name, fn, argument\)")
        add(f"loop: body {kind}", lambda ctx, m=make: ctx.loop("l", m()), r"ctx\.loop\(name, body, state\)")
    for option in ("timeout", "retry_backoff_base", "retry_backoff_max"):
        for kind, seconds in {**BAD_SECONDS, "none": None}.items():
            options: Any = {option: seconds}
            add(f"step: {option} {kind}", lambda ctx, o=options: ctx.step("s", work, **o), f"write {option}=")
    for kind, count in BAD_COUNTS.items():
        retries: Any = count
        add(f"step: retries {kind}", lambda ctx, c=retries: ctx.step("s", work, max_retries=c), "write max_retries=3")
    for option in ("retry_on_timeout", "ephemeral", "at_most_once"):
        for flag in (1, 0, None, "no", []):
            options = {option: flag}
            add(f"step: {option} {flag!r}", lambda ctx, o=options: ctx.step("s", work, **o), f"write {option}=True")
    contradictions: dict[str, Any] = {"max_retries": 2, "retry_on_timeout": True, "ephemeral": True}
    for option, value in contradictions.items():
        options = {option: value}
        add(
            f"step: at_most_once with {option}",
            lambda ctx, o=options: ctx.step("s", work, at_most_once=True, **o),
            "leave (out|one out)",
        )
    for kind, seconds in {**BAD_SECONDS, "none": None}.items():
        given: Any = seconds
        add(f"sleep: {kind}", lambda ctx, s=given: ctx.sleep("z", s), r'write ctx\.sleep\("z", 60\.0\)')
    for kind, when in BAD_TIMES.items():
        moment: Any = when
        add(f"sleep_until: {kind}", lambda ctx, w=moment: ctx.sleep_until("z", w), r"write ctx\.sleep_until\(")
    for kind, seconds in BAD_SECONDS.items():
        given = seconds
        add(f"queue.next: timeout {kind}", lambda ctx, s=given: ctx.queue.next("q", timeout=s), r"write timeout=60\.0")
        add(
            f"queue.next_batch: timeout {kind}",
            lambda ctx, s=given: ctx.queue.next_batch("q", timeout=s),
            r"write timeout=60\.0",
        )
    names: dict[str, tuple[Any, str]] = {
        "text": ("go", r'write names=\["go"\]'),
        "number": (5, "write names="),
        "no-name": ([], "name at least one message"),
        "bytes": (b"go", "write for example"),
        **{kind: ([text], hint) for kind, (text, hint) in BAD_TEXTS.items() if kind != "bytes"},
    }
    for kind, (wanted, hint) in names.items():
        add(f"queue.next: names {kind}", lambda ctx, w=wanted: ctx.queue.next("q", names=w), hint)
        add(f"queue.next_batch: names {kind}", lambda ctx, w=wanted: ctx.queue.next_batch("q", names=w), hint)
    for kind, count in {**BAD_COUNTS, "zero": 0, "none": None}.items():
        most: Any = count
        add(f"queue.next_batch: count {kind}", lambda ctx, c=most: ctx.queue.next_batch("q", count=c), "write count=10")
        add(
            f"loop: interval {kind}",
            lambda ctx, c=most: ctx.loop("l", stop_at_once, history_prune_interval=c),
            "write history_prune_interval=20",
        )
        if count is not None and count != 0:
            add(
                f"loop: size {kind}",
                lambda ctx, c=most: ctx.loop("l", stop_at_once, history_size=c),
                "write history_size=20",
            )

    def answering(answer: Any) -> Callable[[Context, Any], Awaitable[Any]]:
        async def body(ctx: Context, state: Any) -> Any:
            return answer

        return body

    def plain(ctx: Context, state: Any) -> Any:
        return Break(None)

    add("loop: body plain", lambda ctx: ctx.loop("l", plain), "write `async def body")  # type: ignore[call-overload]
    add("loop: answer", lambda ctx: ctx.loop("l", answering(5)), r"return Continue\(state\)")
    add("loop: class as answer", lambda ctx: ctx.loop("l", answering(Continue)), r"return Continue\(state\)")
    add("loop: None with a state", lambda ctx: ctx.loop("l", answering(None), 1), r"return Continue\(state\)")
    return calls


BAD_CALLS = _bad_calls()


def calling(bad: Call | None) -> Callable[[Context, Any], Awaitable[Any]]:
    """A workflow that makes this call where the right code waits for a message."""

    async def order(ctx: Context, given: Any) -> Any:
        before = await ctx.step("before", work)
        if bad is not None:
            await bad(ctx)
        message = await ctx.queue.next("gate")
        return [given, before, message.body]

    return order


@pytest.mark.parametrize("operation", sorted({what.partition(":")[0] for what in BAD_CALLS}))
async def test_a_bad_call_raises_at_once_and_records_nothing_and_right_code_goes_on(
    operation: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """All bad calls of one operation, one deployment after another, on one workflow: more than a crash loop's limit."""
    calls = {what: bad for what, bad in BAD_CALLS.items() if what.startswith(f"{operation}:")}
    assert len(calls) > 10
    async with host(namespace, mode) as process:
        await process.stop(calling(None), "input")
        await process.restart()
        recorded = await namespace.dump()
        for what, (bad, expected, hint) in calls.items():
            with pytest.raises(expected, match=hint) as caught:
                await process.stop(calling(bad), "other input")
            assert isinstance(caught.value, MisuseError), what
            await process.restart()
            assert await namespace.dump() == recorded, what
        await process.stop(calling(None))
        await process.send("gate", "go")
        assert await process.finish(calling(None)) == ["input", "done", "go"]


@pytest.mark.parametrize("what", ["step: name empty", "sleep: nan", "queue.next: names text", "loop: body called"])
async def test_a_bad_call_that_is_caught_has_ended_the_run_all_the_same(
    what: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S31: an `except Exception` around it swallows nothing."""
    bad, expected, hint = BAD_CALLS[what]

    async def careless(ctx: Context, _: Any) -> str:
        try:
            await bad(ctx)
        except Exception:
            await ctx.step("after", work)
        return "swallowed"

    async with host(namespace, mode) as process:
        with pytest.raises(expected, match=hint):
            await process.stop(careless)
        await process.restart()
        snapshot = await namespace.snapshot()
    await namespace.close()
    assert snapshot.state is WorkflowState.PENDING
    assert snapshot.entries == ()


async def test_current_step_outside_of_a_step_says_where_to_call_it() -> None:
    with pytest.raises(MisuseError, match="call it in the function that you give to"):
        current_step()


# Entry points.


async def right(ctx: Context, given: Any) -> Any:
    return given


def plain_workflow(ctx: Context, given: Any) -> Any:
    return given


async def wrong_arity(ctx: Context) -> None:
    pass


WRONG_RUNS: dict[str, tuple[dict[str, Any], type[PerdureError], str]] = {
    "id none": ({"workflow_id": None}, InvalidArgumentError, '"order-123"'),
    "id number": ({"workflow_id": 5}, InvalidArgumentError, '"order-123"'),
    "id empty": ({"workflow_id": ""}, InvalidArgumentError, '"order-123"'),
    "id surrogate": ({"workflow_id": "\udcff"}, InvalidArgumentError, "decode the bytes"),
    "fn none": ({"fn": None}, InvalidArgumentError, r"async def order\(ctx, input\)"),
    "fn plain": ({"fn": plain_workflow}, InvalidArgumentError, r"async def order\(ctx, input\)"),
    "fn arity": ({"fn": wrong_arity}, InvalidArgumentError, r"async def order\(ctx, input\)"),
    "fn lambda": ({"fn": lambda ctx, given: right(ctx, given)}, InvalidArgumentError, "coroutine function"),
    "input lock": ({"input": threading.Lock()}, EncodeError, "lock"),
    "input object": ({"input": {"a": [object()]}}, EncodeError, "object"),
    "input surrogate": ({"input": "\ud800"}, EncodeError, "surrogate"),
    "input too large": ({"input": "x" * (1 << 20)}, EncodeError, "the workflow's input"),
    "driver none": ({"driver": None}, InvalidArgumentError, r"SqliteDriver\.open"),
    "driver path": ({"driver": "order.sqlite"}, InvalidArgumentError, r"SqliteDriver\.open"),
    "driver data": ({"driver": {}}, InvalidArgumentError, r"SqliteDriver\.open"),
    "driver class": ({"driver": MemoryDriver}, InvalidArgumentError, r"SqliteDriver\.open"),
    "mode": ({"mode": "fast"}, InvalidArgumentError, '"yield" or "live"'),
    "mode none": ({"mode": None}, InvalidArgumentError, '"yield" or "live"'),
    "mode list": ({"mode": ["live"]}, InvalidArgumentError, '"yield" or "live"'),
    "clock": ({"clock": 5}, InvalidArgumentError, r"write for example SystemClock\(\)"),
    "clock class": ({"clock": MockClock}, InvalidArgumentError, r"write for example SystemClock\(\)"),
    "ids": ({"ids": "uuid"}, InvalidArgumentError, "write for example Uuid7Generator"),
}


async def test_a_run_with_wrong_arguments_raises_at_once_and_writes_nothing(
    namespace: Namespace, mode: RunMode
) -> None:
    driver = await namespace.driver()
    arguments: dict[str, Any] = {"workflow_id": "order-1", "fn": right, "input": 1, "driver": driver, "mode": mode}
    for what, (change, expected, hint) in WRONG_RUNS.items():
        with pytest.raises(expected, match=hint) as caught:
            await run_workflow(**{**arguments, **change})
        assert isinstance(caught.value, PerdureError), what
        async with trio.open_nursery() as nursery:
            with pytest.raises(expected, match=hint):
                await start_workflow(nursery, **{**arguments, **change})
        assert driver.writes == 0, what
    assert await namespace.dump() == {}
    assert (await run_workflow(**arguments)).output == 1
    await namespace.close()


async def test_a_workflow_function_that_was_called_already_is_refused(namespace: Namespace, mode: RunMode) -> None:
    driver = await namespace.driver()
    ctx: Any = None
    called: Any = right(ctx, 1)
    with pytest.raises(InvalidArgumentError, match="called already"):
        await run_workflow("order-1", called, 1, driver, mode=mode)
    assert driver.writes == 0
    await namespace.close()


@pytest.mark.parametrize("nursery", [None, 5, trio.Nursery])
async def test_a_start_without_a_nursery_is_refused_before_anything_is_written(
    nursery: Any, namespace: Namespace, mode: RunMode
) -> None:
    driver = await namespace.driver()
    with pytest.raises(InvalidArgumentError, match=r"async with trio\.open_nursery\(\)"):
        await start_workflow(nursery, "order-1", right, 1, driver, mode=mode)
    assert driver.writes == 0
    await namespace.close()


WRONG_MESSAGES: dict[str, tuple[dict[str, Any], type[PerdureError], str]] = {
    **{f"name {kind}": ({"name": text}, InvalidArgumentError, hint) for kind, (text, hint) in BAD_TEXTS.items()},
    **{
        f"id {kind}": ({"id": text}, InvalidArgumentError, hint)
        for kind, (text, hint) in BAD_TEXTS.items()
        if kind != "none"
    },
    "body lock": ({"body": threading.Lock()}, EncodeError, "the body of message 'gate'"),
    "body generator": ({"body": (n for n in ())}, EncodeError, "the body of message 'gate'"),
    "body deep": ({"body": None}, EncodeError, "the body of message 'gate'"),
    "body too large": ({"body": b"x" * (1 << 20)}, EncodeError, "the body of message 'gate'"),
}
_DEEP: list[Any] = []
for _ in range(20_000):
    _DEEP = [_DEEP]
WRONG_MESSAGES["body deep"][0]["body"] = _DEEP


async def test_a_wrong_message_is_refused_and_changes_nothing(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    async with host(namespace, mode) as process:
        await process.stop(calling(None), "input")
        recorded = await namespace.dump()
        for what, (change, expected, hint) in WRONG_MESSAGES.items():
            message = {"name": "gate", "body": 1, "id": None, **change}
            with pytest.raises(expected, match=hint):
                await process.send(message["name"], message["body"], id=message["id"])
            assert await namespace.dump() == recorded, what
        await process.send("gate", "go")
        assert await process.finish(calling(None)) == ["input", "done", "go"]


@pytest.mark.parametrize("driver", [None, 5, {}, "path", MemoryDriver])
async def test_a_message_or_a_snapshot_without_a_driver_is_refused(driver: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"SqliteDriver\.open"):
        await send_message(driver, "go", 1)
    with pytest.raises(InvalidArgumentError, match=r"SqliteDriver\.open"):
        await load_snapshot(driver)


async def test_a_message_with_a_wrong_clock_is_refused(namespace: Namespace) -> None:
    driver = await namespace.driver()
    clock: Any = 5
    with pytest.raises(InvalidArgumentError, match=r"SystemClock\(\)"):
        await send_message(driver, "go", 1, clock=clock)
    assert driver.writes == 0
    await namespace.close()


@pytest.mark.parametrize("wrong", [None, 5, "order", plain_workflow, wrong_arity])
def test_a_definition_of_no_workflow_is_refused(wrong: Any) -> None:
    if wrong is not None:
        with pytest.raises(InvalidArgumentError, match=r"async def order\(ctx, input\)"):
            workflow(wrong)
    for make in (definition_of, workflow(name="x"), lambda given: Workflow(given, "x")):
        with pytest.raises(InvalidArgumentError, match=r"async def order\(ctx, input\)"):
            make(wrong)
