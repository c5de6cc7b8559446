"""The line that an exploration prints repeats what it found, with all that was given; or says what to add to the call (S39)."""

from __future__ import annotations

import datetime
import re
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from perdure.testing import EffectLedger, FinishedRun, Mail, RecoveryDiffersError, explore_crashes, explore_crashes_now
from perdure.testing.repeating import as_code
from perdure.workflow import Context, CriticalError, StepInterruptedError, workflow

bank = EffectLedger("bank")


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Order:
    colour: Colour
    made: datetime.datetime
    lines: tuple[int, ...] = ()


async def charge(content: Any = None) -> None:
    bank.record("charge", content)


async def fail() -> None:
    raise CriticalError("sold out")


@workflow
async def plain(ctx: Context, content: Any) -> None:
    await ctx.step("pay", charge, content)


@workflow
async def ordering(ctx: Context, order: Order) -> None:
    await ctx.step("pay", charge, order.colour.value)


@workflow
async def failing(ctx: Context, _: None) -> None:
    await ctx.step("pay", charge, 1)
    await ctx.step("fail", fail)


@workflow
async def waiting(ctx: Context, _: None) -> None:
    await ctx.step("pay", charge, 1)
    await ctx.queue.next("never")


@workflow
async def part(ctx: Context, _: int) -> Any:
    await ctx.step("pay", charge, 1)
    return (await ctx.queue.next("go")).body


@workflow
async def whole(ctx: Context, _: None) -> Any:
    return await ctx.call("part", part, 1, workflow_id="the-part")


@workflow
async def retrying(ctx: Context, _: None) -> None:
    try:
        await ctx.step("pay", charge, 1, at_most_once=True)
    except StepInterruptedError:
        await ctx.step("pay-again", charge, 1)


def once(run: FinishedRun) -> None:
    assert len(run.effects["bank"]) < 2, "it happened twice"


ORDER = Order(Colour.RED, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), (1,))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (plain, {}),
        (plain, {"input": b"\x00\xff"}),
        (ordering, {"input": ORDER}),
        (plain, {"workflow_id": "mine", "idle_timeout": 5, "writes_max": 100, "timeout": 50.0, "modules": [sys]}),
        (plain, {"input": {"a": [1, None, {2}]}, "check": once, "compare": ["state"], "keep_globals": True}),
        (failing, {"ends_as": "failed"}),
        (waiting, {"cancel_at": 100.0}),
        (waiting, {"cancel_at": 100.0, "ends_as": "cancelled"}),
        (whole, {"workflows": [part], "messages": [Mail("go", b"x", to="the-part", at=5, id="first")]}),
        (retrying, {"allow_interruptions": True, "ignore": ["pay"]}),
    ],
)
async def test_the_line_finds_the_same_again(function: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(RecoveryDiffersError) as caught:
        await explore_crashes(function, **arguments)
    match = re.search(
        r"To repeat this run alone, add only=\"\S+\" to your call, or write:\n  await (.*)\n", str(caught.value)
    )
    assert match is not None, str(caught.value)
    for name in arguments.keys() - {"input"}:
        assert f"{name}=" in match[1]
    with pytest.raises(RecoveryDiffersError) as again:
        await eval(match[1], {**globals(), "sys": sys})
    assert str(again.value) == str(caught.value)


def test_in_plain_code_the_line_is_plain_code() -> None:
    with pytest.raises(RecoveryDiffersError) as caught:
        explore_crashes_now(plain, 5)
    line = str(caught.value).splitlines()[-1].strip()
    assert line.startswith("explore_crashes_now(plain, 5, only=")
    with pytest.raises(RecoveryDiffersError) as again:
        eval(line)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("content", ["x" * 1000, {"nan": float("nan")}])
async def test_what_is_no_code_is_not_shown_as_such(content: Any) -> None:
    """S39: no line is better than one that repeats something else."""
    with pytest.raises(RecoveryDiffersError) as caught:
        await explore_crashes(plain, content, check=lambda run: once(run))
    assert str(caught.value).endswith(
        f'To repeat this run alone, add this to your call:\n  only="{caught.value.only}"\n'
    )
    assert "await explore_crashes" not in str(caught.value)


def test_values_as_code() -> None:
    for value in (
        None,
        1,
        -2.5,
        "a'b",
        b"\xff",
        (1,),
        (),
        [],
        set(),
        {2, 1},
        {"a": (1, 2)},
        ORDER,
        Colour.RED,
        once,
        sys,
    ):
        code = as_code(value)
        assert code is not None, value
        assert eval(code) == value

    @dataclass
    class Local:
        kind: Any

    assert as_code(Local([Colour.RED])) == "Local(kind=[Colour.RED])"
    for other in (object(), lambda: None, Local(object()), [float("inf")], print, {"a": {1: object()}}):
        assert as_code(other) is None
