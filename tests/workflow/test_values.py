"""Values: what a workflow sees on its first run is what it sees on every later one, in value and in type."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from harness import Namespace, host
from trio.testing import MockClock

from perdure.workflow import (
    Break,
    Context,
    Continue,
    RunMode,
    StepCriticalError,
    WorkflowFailedError,
    WorkflowState,
)

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def make(name: str, value: Any) -> Any:
    calls.append(name)
    return value


def form(value: Any) -> Any:
    """The value as something that tells apart whatever is not the same: types, zones, signs and NaNs too."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    if isinstance(value, dict):
        return kind, [(form(key), form(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return kind, [form(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(form(item)) for item in value)
    if isinstance(value, datetime):
        return kind, value.isoformat(), value.utcoffset()
    return kind, repr(value)


# Empty values.

EMPTY: dict[str, Any] = {"none": None, "zero": 0, "text": "", "list": [], "dict": {}, "false": False}


@pytest.mark.parametrize("empty", EMPTY)
async def test_an_empty_value_runs_once_and_stays_itself(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, empty: str
) -> None:
    """S7: out of a step, out of a loop, as a loop's state, as input and as the workflow's result."""
    value = EMPTY[empty]
    seen: list[Any] = []
    bodies: list[Any] = []

    async def workflow(ctx: Context, given: Any) -> Any:
        async def body(inner: Context, state: Any) -> Continue[Any] | Break[Any]:
            bodies.append(state)
            got = await inner.step("inside", make, "inside", value)
            return Continue(state) if len(bodies) == 1 else Break(got)

        stepped = await ctx.step("step", make, "step", value)
        later = await ctx.step("ephemeral", make, "ephemeral", value, ephemeral=True)
        broken = await ctx.loop("loop", body, value)
        await ctx.queue.next("wait", names=["go"])
        seen.append([given, stepped, later, broken])
        return stepped

    async with host(namespace, mode) as process:
        await process.stop(workflow, value)
        ran = list(calls)
        assert ran == ["step", "ephemeral", "inside", "inside"]
        recorded = await namespace.dump()
        for _ in range(2):
            await process.restart()
            await process.stop(workflow, value)
        await process.restart()
        assert await namespace.dump() == recorded, "replay wrote something"
        await process.send("go")
        output = await process.finish(workflow, value)
        await process.restart()
        again = await process.finish(workflow, value)
        snapshot = await namespace.snapshot()
    assert calls == ran, "it ran again"
    assert len(bodies) == 2, "a finished loop was entered again"
    for got in (output, again, snapshot.output, *seen[0], *bodies):
        assert form(got) == form(value)


# Values of every kind.

BIG = 2**200 + 1
VALUES: dict[str, Any] = {
    "tuple": (1, ("a", (2.5, None))),
    "set": {1, "two", (3, 4)},
    "frozenset": frozenset({1, 2}),
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"abc"),
    "utc": datetime(2024, 2, 29, 12, 30, 1, 123456, tzinfo=UTC),
    "whole second": datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
    "before 1970": datetime(1900, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    "offset": datetime(2024, 2, 29, 12, 30, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    "decimals": [Decimal("1.10"), Decimal("-0"), Decimal("1E+30"), Decimal("NaN"), Decimal("-Infinity")],
    "fraction": Fraction(-3, 7),
    "uuid": UUID("12345678-1234-5678-8234-567812345678"),
    "integers": [0, -1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**64), BIG, -BIG],
    "floats": [math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 1.0, 1e300],
    "keys": {1: "a", -0.5: "b", (1, "x"): {b"k": {None: {True: []}}}, UUID(int=7): {"deep": {2**70: ()}}},
    "texts": ["", "\x00", "🎉", "é", "e\u0301", "שלום", "x" * 70_000],
    "nested": {"a": [{"b": ({"c": {1, 2}},)}]},
}


@pytest.mark.parametrize("name", VALUES)
async def test_the_first_run_sees_the_value_and_type_that_replay_sees(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, name: str
) -> None:
    """S8: out of a step, as a loop's state and value, as a message's body, as the workflow's input."""
    value = VALUES[name]
    seen: list[Any] = []

    async def workflow(ctx: Context, given: Any) -> Any:
        states: list[Any] = []

        async def body(inner: Context, state: Any) -> Continue[Any] | Break[Any]:
            states.append(state)
            if len(states) == 1 and not seen:
                return Continue(value)
            return Break(state)

        message = await ctx.queue.next("message", names=["early"])
        stepped = await ctx.step("step", make, "step", value)
        looped = await ctx.loop("loop", body, value)
        seen.append([form(got) for got in (given, message.body, stepped, looped)])
        seen.extend(form(state) for state in states)
        await ctx.queue.next("wait", names=["go"])
        return stepped

    async with host(namespace, mode) as process:
        await process.send("early", value)
        await process.stop(workflow, value)
        first, *states = seen
        assert all(state == first[2] for state in states), "a loop's state is not as a step's value"
        assert all(got == first[2] for got in first), "a value depends on how it came"
        seen.clear()
        await process.restart()
        await process.send("go")
        output = await process.finish(workflow, value)
        assert seen[0] == first, "replay saw something else"
        await process.restart()
        assert form(await process.finish(workflow, value)) == form(output) == first[2]
        (entry,) = [entry for entry in (await namespace.snapshot()).entries if entry.path == ("step",)]
        assert form(entry.data["output"]) == first[2]
    assert calls == ["step"]
    if name not in ("tuple", "frozenset", "bytearray", "keys", "nested"):
        assert first[2] == form(value), "a storable value changed"


async def test_types_that_cbor_lacks_come_back_as_the_plain_type_on_the_first_run_too(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: what a tuple, a frozenset and a bytearray become."""

    async def workflow(ctx: Context, _: object) -> list[str]:
        got = [await ctx.step(name, make, name, VALUES[name]) for name in ("tuple", "frozenset", "bytearray")]
        return [type(value).__name__ for value in got]

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == ["list", "set", "bytes"]


async def test_changing_a_value_afterwards_changes_no_history(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: neither the value a step returned, nor the one its caller got, nor a loop's state, nor a message's body."""
    shared: dict[str, Any] = {"list": [1], "set": {1}}
    seen: list[Any] = []

    async def give_shared() -> dict[str, Any]:
        calls.append("step")
        return shared

    async def workflow(ctx: Context, given: Any) -> Any:
        got = await ctx.step("step", give_shared)
        later = await ctx.step("later", give_shared, ephemeral=True)
        message = await ctx.queue.next("message", names=["early"])

        async def body(inner: Context, state: Any) -> Break[Any]:
            state["list"].append("changed in the body")
            await inner.step("inside", make, "inside", state)
            state["list"].append("changed after the step")
            return Break(shared)

        looped = await ctx.loop("loop", body, shared)
        seen.append([form(value) for value in (given, got, later, message.body, looped)])
        for value in (given, got, later, message.body, looped, shared):
            value["list"].append("changed")
            value["set"].clear()
        await ctx.queue.next("wait", names=["go"])
        return got

    async with host(namespace, mode) as process:
        await process.send("early", shared)
        await process.stop(workflow, shared)
        recorded = {entry.path: entry.data for entry in (await namespace.snapshot()).entries}
        assert recorded["step",]["output"] == recorded["later",]["output"] == {"list": [1], "set": {1}}
        assert recorded["loop",]["output"] == recorded["loop",]["state"] == {"list": [1], "set": {1}}
        assert recorded["loop", 0, "inside"]["output"]["list"] == [1, "changed in the body"]
        shared.update({"list": [], "set": set()})
        await process.restart()
        await process.send("go")
        output = await process.finish(workflow, shared)
        assert output == {"list": [1, "changed"], "set": set()}
    assert seen[0] == seen[1]
    assert all(value == seen[0][0] for value in seen[0])
    assert calls == ["step", "step", "inside"]


# Values that cannot be stored.


class Opaque:
    """A class unknown to the codec."""


UNSTORABLE: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "lock": (threading.Lock, ("lock",)),
    "generator": (lambda: (number for number in range(3)), ("generator",)),
    "file": (lambda: Path(__file__).open(encoding="utf-8"), ("TextIOWrapper",)),  # noqa: SIM115
    "object": (Opaque, ("Opaque",)),
    "inside": (lambda: {"a": [1, Opaque()]}, ("Opaque", '["a"][1]')),
    "naive": (lambda: datetime(2024, 1, 1), ("datetime",)),
    "surrogate": (lambda: "\ud800", ("str", "surrogate")),
    "large": (lambda: b"x" * 1_100_000, ("1100005", str(976 * 1024 - 4096))),
    "deep": (lambda: _nested(101), ("100",)),
}


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("what", UNSTORABLE)
async def test_an_unstorable_result_fails_the_step_at_once_naming_step_and_type(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, what: str
) -> None:
    """S9: terminal error, no second run, the workflow is `failed` and stays it."""
    build, parts = UNSTORABLE[what]
    kept: list[Any] = []

    async def build_it() -> Any:
        calls.append("build")
        kept.append(build())
        return kept[-1]

    async def workflow(ctx: Context, _: object) -> Any:
        return await ctx.step("make-it", build_it)

    async with host(namespace, mode) as process:
        for _ in range(3):
            with pytest.raises(WorkflowFailedError) as caught:
                await process.finish(workflow)
            await process.restart()
        snapshot = await namespace.snapshot()
        alarm = await (await namespace.driver()).get_alarm(process.workflow_id)
    for value in kept:
        if hasattr(value, "close"):
            value.close()
    assert calls == ["build"]
    assert snapshot.state is WorkflowState.FAILED
    assert alarm is None
    assert snapshot.error is not None
    assert snapshot.error == caught.value.error
    for part in ("'make-it'", *parts):
        assert part in snapshot.error.message
    (entry,) = snapshot.entries
    assert entry.metadata is not None
    assert (entry.metadata.status.name, entry.metadata.attempts) == ("EXHAUSTED", 1)


async def test_a_workflow_can_catch_an_unstorable_result_and_sees_the_same_after_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9: it is an error like another, of one class and text on every run."""
    seen: list[tuple[str, str, int]] = []

    async def workflow(ctx: Context, _: object) -> str:
        try:
            await ctx.step("make-it", make, "made", Opaque())
        except StepCriticalError as error:
            seen.append((str(error), error.error.name, error.attempts))
        await ctx.queue.next("wait", names=["go"])
        return "went on"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == "went on"
    assert calls == ["made"]
    assert seen[0] == seen[1]
    assert seen[0][1:] == ("ValueEncodeError", 1)


async def test_the_largest_result_that_fits_is_stored_and_one_byte_more_is_not(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9: the limit is exact, and what is within it is never refused by the driver."""
    largest = 976 * 1024 - 4096 - 5  # five bytes say that it is bytes, and how many

    async def workflow(ctx: Context, size: int) -> int:
        got = await ctx.step("n" * 512, make, "made", b"x" * size)
        await ctx.queue.next("wait", names=["go"])
        return len(got)

    async with host(namespace, mode) as process:
        await process.stop(workflow, largest)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow, largest) == largest
    too_large = Namespace(namespace.kind, namespace.path.parent)
    async with host(too_large, mode) as process:
        with pytest.raises(WorkflowFailedError, match=f"takes {largest + 6} bytes"):
            await process.finish(workflow, largest + 1)


@pytest.mark.parametrize("place", ["result", "state", "next state", "loop value"])
async def test_an_unstorable_value_of_the_workflow_itself_fails_it(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, place: str
) -> None:
    """S9: what the function returns, a loop's state and a loop's value; the error says which, and the end is final."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def body(inner: Context, _: object) -> Continue[Any] | Break[Any]:
            calls.append("body")
            return Break(Opaque()) if place == "loop value" else Continue(Opaque())

        if place == "result":
            return Opaque()
        return await ctx.loop("polling", body, Opaque() if place == "state" else 1)

    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError) as caught:
            await process.finish(workflow)
        await process.restart()
        ran = list(calls)
        with pytest.raises(WorkflowFailedError):
            await process.finish(workflow)
        snapshot = await namespace.snapshot()
    assert calls == ran
    assert snapshot.state is WorkflowState.FAILED
    assert snapshot.error == caught.value.error
    assert "Opaque" in caught.value.error.message
    assert ("workflow's result" if place == "result" else "'polling'") in caught.value.error.message
