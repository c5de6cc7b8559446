"""What a story says of where a difference comes from is so, and helps (S39)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from threading import Event
from typing import Any

import pytest
import trio

from perdure.testing import EffectLedger, EndlessRunError, RecoveryDiffersError, explore_crashes
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    RollbackContext,
    StepInterruptedError,
    current_step,
    workflow,
)

bank = EffectLedger("bank")
kept: dict[str, int] = {}


async def found(function: Callable[[Context, Any], Awaitable[Any]], **arguments: Any) -> RecoveryDiffersError:
    with pytest.raises(RecoveryDiffersError) as caught:
        await explore_crashes(function, **arguments)
    return caught.value


async def charge(content: Any = None) -> str:
    return str(bank.record("charge", content, key=current_step().idempotency_key, returns="pay-1"))


async def charge_without_key(content: Any = None) -> str:
    return str(bank.record("charge", content, returns="pay-1"))


async def fail() -> None:
    raise CriticalError("sold out")


async def test_content_that_was_lost_is_no_matter_of_keys() -> None:
    """S39: the key is right, the content is not; and `None` is told where something else was to be expected."""

    async def keep() -> None:
        kept["cents"] = 5

    @workflow
    async def forgetful(ctx: Context, _: None) -> None:
        await ctx.step("keep", keep)
        await ctx.sleep("a-while", 10)
        await ctx.step("pay", charge, kept.get("cents"))

    error = await found(forgetful)
    assert error.differences[:2] == (
        "bank: charge 5 happened not at all; without a crash, once",
        "bank: charge None happened once; without a crash, not at all",
    )
    assert "its content was 5 without a crash, and is None" in str(error).replace("\n", " ")
    assert "effect     bank: charge None (in step 'pay', with a key)" in error.story
    assert "key than before" not in str(error)


async def test_an_effect_of_a_rollback_is_told_as_such() -> None:
    async def undo(ctx: RollbackContext, output: str) -> None:
        bank.record("refund", output)

    @workflow
    async def saga(ctx: Context, _: None) -> None:
        await ctx.rollback_checkpoint("here")
        await ctx.step("pay", charge, 5, rollback=undo)
        await ctx.step("reserve", fail)

    error = await found(saga, ends_as="failed")
    assert "bank: refund 'pay-1' AGAIN (in the rollback of step 'pay', no key)" in error.story
    assert "The rollback of step 'pay' had its effect" in str(error)
    assert "Hand the service ctx.idempotency_key" in str(error).replace("\n", " ")
    assert "outside of any step" not in str(error)


async def test_a_plain_function_undoes_a_step_in_its_rollback_too() -> None:
    def undo(ctx: RollbackContext, output: str) -> None:
        bank.record("refund", output, key=ctx.idempotency_key)

    @workflow
    async def saga(ctx: Context, _: None) -> None:
        await ctx.rollback_checkpoint("here")
        await ctx.step("pay", charge, 5, rollback=undo)
        await ctx.step("reserve", fail)

    explored = await explore_crashes(saga, ends_as="failed")
    paid, refunded = explored.first.effects["bank"]
    assert (paid.is_in_step, paid.is_rollback) == (True, False)
    assert (refunded.is_in_step, refunded.is_rollback) == (False, True)
    assert (refunded.workflow_id, refunded.path, refunded.attempt) == ("saga-1", ("pay",), 1)


async def test_another_step_that_does_what_an_interrupted_one_may_have_done() -> None:
    @workflow
    async def mailing(ctx: Context, _: None) -> None:
        try:
            await ctx.step("pay", charge_without_key, 5, at_most_once=True)
        except StepInterruptedError:
            await ctx.step("again", charge_without_key, 5)

    text = " ".join(str(await found(mailing, allow_interruptions=True)).split())
    assert "bank: 'charge' had happened in step 'pay' already, and happened once more in step 'again'" in text
    assert "ran again" not in text
    assert "no effect may happen more often" in text
    assert "write allow_interruptions=True" not in text


async def test_the_same_effect_of_several_steps_is_told_of_the_one_that_did_it_again() -> None:
    async def body(ctx: Context, number: int) -> Continue[int] | Break[int]:
        await ctx.step("pay", charge_without_key, 5)
        return Continue(number + 1) if number < 1 else Break(number)

    @workflow
    async def instalments(ctx: Context, _: None) -> None:
        await ctx.loop("months", body, 0)

    text = " ".join(str(await found(instalments)).split())
    assert "Step 'months/0/pay' had its effect and the process died" in text
    assert "had happened in step" not in text


async def test_one_death_is_told_where_one_is_enough() -> None:
    """S39: all single deaths come before any two."""
    runs: list[int] = []

    @workflow
    async def paying(ctx: Context, _: None) -> None:
        await ctx.step("first", charge, 1)
        await ctx.step("second", charge, 2)

    explored = await explore_crashes(paying, check=lambda run: runs.append(len(run.crashes)))
    assert runs == sorted(runs)
    assert runs.count(1) == 2 * explored.write_points
    assert runs.count(2) > 0


async def test_two_deaths_are_told_as_two() -> None:
    def check(run: Any) -> None:
        assert len(run.crashes) < 2, "it died twice"

    @workflow
    async def paying(ctx: Context, _: None) -> None:
        await ctx.step("first", charge, 1)

    error = await found(paying, check=check)
    first, second = error.only.removesuffix("@seed0").split("+")
    of_first, of_second = (f"{each.split('/')[1]} write {each.split('/')[0]}" for each in (first, second))
    assert f"does not survive 2 crashes: process 1 died {of_first}, process 2 died {of_second}." in str(error)


async def test_a_race_that_another_branch_wins_after_a_crash() -> None:
    """The winner was interrupted and takes its time again; no order of tasks without a crash brings that, so it is told."""

    @workflow
    async def racing(ctx: Context, _: None) -> str:
        async def left(child: Context) -> str:
            return await child.step("ask", ask, 1.0)

        async def right(child: Context) -> str:
            await child.step("look", ask, 0.6)
            return await child.step("ask", ask, 0.6)

        async def ask(seconds: float) -> str:
            await bank.perform("ask", key=current_step().idempotency_key, seconds=seconds)
            return "an offer"

        return (await ctx.race("offers", {"left": left, "right": right})).winner

    text = " ".join(str(await found(racing, compare=["output"])).split())
    assert "Race 'offers' was won by 'right', without a crash by 'left'" in text
    assert "let the branches differ by more" in text
    await explore_crashes(racing, compare=["state"])


async def test_a_step_that_waits_for_a_real_thread_is_told_so() -> None:
    """Virtual time runs on while a thread works, so the run is endless; why, is said."""
    begun = Event()

    async def step() -> None:
        await trio.to_thread.run_sync(partial(begun.wait, 0.2))

    @workflow
    async def threaded(ctx: Context, _: None) -> None:
        await ctx.step("wait", step)

    with pytest.raises(EndlessRunError, match=r"waits for a real thread .*hand the plain function itself"):
        await explore_crashes(threaded)
