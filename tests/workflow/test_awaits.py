"""Operations that are called and not awaited, or called with arguments that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from harness import Namespace, host
from trio.testing import MockClock

from perdure.workflow import Break, Context, InvalidArgumentError, OperationInProgressError, RunMode


async def work() -> int:
    return 1


async def body(ctx: Context, _: None) -> Break[int]:
    return Break(1)


CALLS: dict[str, Callable[[Context], Coroutine[Any, Any, Any]]] = {
    "step": lambda ctx: ctx.step("a", work),
    "sleep": lambda ctx: ctx.sleep("a", 1),
    "sleep_until": lambda ctx: ctx.sleep_until("a", 1),
    "queue.next": lambda ctx: ctx.queue.next("a"),
    "queue.next_batch": lambda ctx: ctx.queue.next_batch("a"),
    "loop": lambda ctx: ctx.loop("a", body),
}


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("is_last", [True, False])
async def test_a_forgotten_await_is_an_error_that_records_nothing_and_the_mended_code_goes_on(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, operation: str, is_last: bool
) -> None:
    """S6: at the next operation, or at the end of the scope; nothing is recorded."""

    async def forgetful(ctx: Context, _: None) -> None:
        CALLS[operation](ctx)
        if not is_last:
            await ctx.step("b", work)

    async def mended(ctx: Context, _: None) -> str:
        await ctx.step("b", work)
        return "mended"

    async with host(namespace, mode) as process:
        with pytest.raises(OperationInProgressError, match=f"ctx.{operation} 'a'.* not awaited"):
            await process.stop(forgetful)
        assert (await namespace.snapshot()).entries == ()
        await process.restart()
        assert await process.finish(mended) == "mended"


async def test_a_forgotten_await_in_a_loop_is_noticed_when_the_iteration_ends(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6, in the scope of an iteration."""

    async def forgetful_body(ctx: Context, _: None) -> Break[int]:
        ctx.step("inner", work)
        return Break(1)

    async def forgetful(ctx: Context, _: None) -> int:
        return await ctx.loop("rounds", forgetful_body)

    async with host(namespace, mode) as process:
        with pytest.raises(OperationInProgressError, match="'inner'"):
            await process.stop(forgetful)


async def test_a_call_that_is_awaited_later_is_no_error(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6 is about overlap: a coroutine may be kept for a while."""

    async def patient(ctx: Context, _: None) -> int:
        call = ctx.step("a", work)
        assert (await namespace.snapshot()).entries == ()
        return await call

    async with host(namespace, mode) as process:
        assert await process.finish(patient) == 1


async def test_keywords_meant_for_the_step_function_are_refused_with_the_way_to_pass_them(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """Bad input: a fault, not a failure, so the mended code goes on."""

    async def wrong(ctx: Context, _: None) -> int:
        return await ctx.step("a", work, amount=1)  # type: ignore[call-overload,no-any-return]

    async def right(ctx: Context, _: None) -> int:
        return await ctx.step("a", work)

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=r"functools\.partial"):
            await process.stop(wrong)
        await process.restart()
        assert await process.finish(right) == 1
