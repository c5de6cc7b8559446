"""`explore_crashes` finds what does not survive a crash, tells it, and lets what is right pass."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.testing import (
    CrashPoint,
    EffectKeyError,
    EffectLedger,
    EndlessRunError,
    Exploration,
    FinishedRun,
    Mail,
    NotRepeatableError,
    RecoveryDiffersError,
    UnexpectedEndingError,
    VirtualTimeError,
    explore_crashes,
    explore_crashes_now,
)
from perdure.testing.differences import are_the_same
from perdure.testing.ledger import Effect as OneEffect
from perdure.testing.outline import Alike, is_same
from perdure.testing.scenario import Scenario
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    InvalidArgumentError,
    RollbackContext,
    StepInterruptedError,
    Workflow,
    WorkflowState,
    current_step,
    workflow,
)
from perdure.workflow.checks import is_coroutine_function

bank = EffectLedger("bank")
shop = EffectLedger("shop", repeats=["show"])

Effect = Callable[..., Awaitable[Any]]


async def charge(cents: int) -> str:
    return str(bank.record("charge", cents, returns="pay-1"))


async def charge_once(cents: int) -> str:
    return str(bank.record("charge", cents, key=current_step().idempotency_key, returns="pay-1"))


def ship_once(payment: str) -> str:
    return str(shop.record("ship", payment, key=current_step().idempotency_key, returns="TRACK-1"))


@workflow
async def order(ctx: Context, cents: int) -> list[Any]:
    payment = await ctx.step("charge-card", charge_once, cents)
    packed = await ctx.queue.next("packed")
    return [payment, packed.body, await ctx.step("ship", ship_once, payment)]


@workflow
async def careless(ctx: Context, cents: int) -> str:
    payment = await ctx.step("charge-card", charge, cents)
    await ctx.sleep("a-while", 3600)
    return payment


class TestWhatIsRight:
    """S39: it comes to the same end, whatever its process does."""

    async def test_an_order_needs_nothing_else(self) -> None:
        explored = await explore_crashes(order, 1999, messages=[("packed", "by me")])
        assert explored.seeds == (0,)
        assert explored.first.output == ["pay-1", "by me", "TRACK-1"]
        assert explored.write_points >= 8
        assert 2 * explored.write_points + 2 <= explored.runs <= 3 * explored.write_points + 2
        assert explored.crashes >= 3 * explored.write_points
        assert (bank.count("charge"), shop.count("ship")) == (1, 1)

    async def test_every_primitive(self) -> None:
        """Steps that are retried, joins, races, loops, sleeps, messages, versions, attributes, the time, chance."""
        bank_that_fails = EffectLedger("bank", faults={"charge": "applied", ("charge", 3): "refused"})

        async def pay(cents: int) -> str:
            return str(bank_that_fails.record("charge", cents, key=current_step().idempotency_key, returns="pay-1"))

        async def left(ctx: Context) -> str:
            return await ctx.step("pay", pay, 1)

        async def right(ctx: Context) -> str:
            await ctx.sleep("nap", 20)
            return (await ctx.queue.next("packed")).body

        async def body(ctx: Context, state: int) -> Continue[int] | Break[int]:
            await ctx.step("ship", ship_once, f"parcel {state}")
            return Continue(state + 1) if state < 2 else Break(state)

        @workflow
        async def everything(ctx: Context, _: None) -> list[Any]:
            version = await ctx.get_version("new-way", 2)
            joined = await ctx.join("both", {"left": left, "right": right})
            raced = await ctx.race("first", {"left": left, "right": right})
            looped = await ctx.loop("parcels", body, 0)
            begun = await ctx.now("now")
            late = await ctx.queue.next_batch("late", timeout=60)
            await ctx.set_attributes("stage", {"stage": "done"})
            chance = [ctx.random("dice").random(), str(ctx.uuid("id"))]
            assert begun > 0
            return [version, dict(joined), raced.winner, looped, late, chance]

        explored = await explore_crashes(everything, messages=[("packed", "by me")])
        assert explored.first.output[:5] == [2, {"left": "pay-1", "right": "by me"}, "left", 2, []]

    async def test_branches_that_act_at_the_same_moment(self) -> None:
        """S39: which one comes first is not the crash's doing; without one, either does."""

        async def take(ctx: Context) -> int:
            return (await ctx.queue.next("q")).body

        async def pay(ctx: Context) -> str:
            return await ctx.step("pay", charge_once, 5)

        async def give(ctx: Context) -> str:
            return await ctx.step("give", ship_once, "for nothing")

        @workflow
        async def at_once(ctx: Context, _: None) -> int:
            taken = await ctx.join("both", {"a": take, "b": take})
            await ctx.race("first", {"pay": pay, "give": give})
            return sum(dict(taken).values())

        explored = await explore_crashes(at_once, messages=[("a", 1), ("b", 2)])
        assert explored.first.output == 3
        assert explored.reordered > 0
        assert str(explored).endswith(f"all end alike, {explored.reordered} of them as another schedule")
        assert explored.runs > 3 * explored.write_points + 2
        again = await explore_crashes(at_once, messages=[("a", 1), ("b", 2)], only="0/after")
        assert (again.crashes, again.reordered) in {(1, 0), (1, 1)}

    async def test_what_is_rolled_back(self) -> None:
        async def undo(ctx: RollbackContext, output: str) -> None:
            bank.record("refund", output, key=ctx.idempotency_key)

        async def fail() -> None:
            raise CriticalError("sold out")

        @workflow
        async def saga(ctx: Context, _: None) -> None:
            await ctx.rollback_checkpoint("here")
            await ctx.step("charge", charge_once, 5, rollback=undo)
            await ctx.step("reserve", fail)

        explored = await explore_crashes(saga, ends_as="failed")
        assert explored.first.state is WorkflowState.FAILED
        assert [effect.name for effect in explored.first.effects["bank"]] == ["charge", "refund"]

    async def test_children_and_what_they_are_sent(self) -> None:
        @workflow
        async def child(ctx: Context, cents: int) -> str:
            payment = await ctx.step("charge", charge_once, cents)
            return payment + str((await ctx.queue.next("go")).body)

        @workflow
        async def parent(ctx: Context, _: None) -> str:
            return await ctx.call("pay", child, 5, workflow_id="the-child")

        explored = await explore_crashes(parent, workflows=[child], messages=[Mail("go", 7, at=30, to="the-child")])
        assert explored.first.output == "pay-17"
        assert [str(ending) for ending in explored.first.others.values()] == ["completed: 'pay-17'"]

    async def test_what_never_ends_by_itself_is_cancelled(self) -> None:
        async def handle(ctx: Context, count: int) -> Continue[int]:
            message = await ctx.queue.next("cents")
            await ctx.step("charge", charge_once, message.body)
            return Continue(count + 1)

        @workflow
        async def agent(ctx: Context, _: None) -> None:
            await ctx.loop("messages", handle, 0)

        mail = [Mail("cents", 5), Mail("cents", 6, at=10), Mail("cents", 7, at=86400)]
        explored = await explore_crashes(agent, messages=mail, cancel_at=7 * 86400)
        assert explored.first.state is WorkflowState.CANCELLED
        assert [effect.content for effect in explored.first.effects["bank"]] == [5, 6, 7]

    async def test_effects_that_may_repeat(self) -> None:
        async def show() -> None:
            shop.record("show", "50 %")

        @workflow
        async def report(ctx: Context, _: None) -> None:
            await ctx.step("show", show)

        explored = await explore_crashes(report)
        assert explored.first.effects["shop"][0].name == "show"

    async def test_a_step_that_was_interrupted_where_that_is_allowed(self) -> None:
        """S22: at most once; what happens then is the workflow's to say, and `check` tells what holds."""

        async def post() -> int:
            shop.record("letter")
            return 1

        @workflow
        async def mailing(ctx: Context, _: None) -> str:
            try:
                return f"{await ctx.step('post', post, at_most_once=True)} letters"
            except StepInterruptedError:
                return "somebody has to look"

        seen: set[str] = set()

        def check(run: FinishedRun) -> None:
            assert len(run.effects.get("shop", ())) <= 1
            seen.add(run.output)

        explored = await explore_crashes(mailing, allow_interruptions=True, check=check)
        assert seen == {"1 letters", "somebody has to look"}
        assert 0 < explored.interrupted < explored.runs
        with pytest.raises(RecoveryDiffersError, match="allow_interruptions=True"):
            await explore_crashes(mailing)


async def found(function: Callable[[Context, Any], Awaitable[Any]], **arguments: Any) -> RecoveryDiffersError:
    """What an exploration finds; the line that it prints repeats it."""
    with pytest.raises(RecoveryDiffersError) as caught:
        await explore_crashes(function, **arguments)
    error = caught.value
    with pytest.raises(RecoveryDiffersError) as again:
        await explore_crashes(function, **arguments, only=error.only)
    assert (again.value.differences, again.value.story) == (error.differences, error.story)
    assert f'only="{error.only}")' in str(error)
    return error


remembered: dict[str, Any] = {}
counted = 0


@cache
def looked_up() -> list[str]:
    return []


class TestWhatIsWrong:
    """S39: it is found, and the line that is printed repeats it."""

    async def test_an_effect_without_a_key(self) -> None:
        error = await found(careless, input=1999)
        assert error.differences == ("bank: charge 1999 happened twice; without a crash, once",)
        assert "idempotency_key" in str(error)
        assert "AGAIN (in step 'charge-card', no key)" in error.story
        assert re.search(r"CRASH +before write \d+: step 'charge-card' is recorded: 'pay-1'", error.story)

    async def test_an_effect_outside_of_a_step(self) -> None:
        @workflow
        async def hasty(ctx: Context, _: None) -> None:
            await ctx.sleep("a-while", 60)
            bank.record("charge", 5, key="always-the-same")
            shop.record("ship", "it")
            await ctx.sleep("a-while-more", 60)

        error = await found(hasty)
        assert error.differences[0] == "shop: ship 'it' happened twice; without a crash, once"
        assert "outside of any step's function" in str(error)

    async def test_a_key_that_is_another_one_each_time(self) -> None:
        attempts = 0

        async def pay() -> None:
            nonlocal attempts
            attempts += 1
            bank.record("charge", 5, key=f"attempt {attempts}")

        @workflow
        async def inventive(ctx: Context, _: None) -> None:
            await ctx.step("pay", pay)

        error = await found(inventive)
        assert "'charge' came with another key than before" in str(error)

    async def test_state_in_a_global_that_only_the_dead_process_had(self) -> None:
        async def remember() -> None:
            remembered["token"] = "secret"

        @workflow
        async def forgetful(ctx: Context, _: None) -> Any:
            await ctx.step("remember", remember)
            await ctx.sleep("a-while", 60)
            return remembered.get("token")

        remembered["before"] = 1
        error = await found(forgetful)
        assert "ended as completed: None; without a crash, as completed: 'secret'" in error.differences[0]
        assert remembered == {"before": 1}, "what an exploration leaves is what it found"
        await explore_crashes(forgetful, keep_globals=True)
        assert remembered == {"before": 1, "token": "secret"}
        remembered.clear()

    async def test_state_in_a_cache_and_in_a_counter(self) -> None:
        async def look() -> None:
            global counted
            counted += 1
            looked_up().append("secret")

        @workflow
        async def forgetful(ctx: Context, _: None) -> Any:
            await ctx.step("look", look)
            await ctx.sleep("a-while", 60)
            return [counted, *looked_up()]

        error = await found(forgetful)
        assert "ended as completed: [0]; without a crash, as completed: [1, 'secret']" in error.differences[0]

    async def test_a_message_that_was_kept_in_memory_only(self) -> None:
        @workflow
        async def careless_inbox(ctx: Context, _: None) -> Any:
            async def take(child: Context) -> None:
                remembered["body"] = (await child.queue.next("go")).body

            async def use(child: Context) -> Any:
                await child.sleep("a-while", 60)
                return remembered.pop("body", "lost")

            joined = await ctx.join("both", {"take": take, "use": use})
            return joined["use"]

        assert "lost" in (await found(careless_inbox, messages=[("go", 5)])).differences[0]

    async def test_code_that_swallows_the_death(self) -> None:
        """What a dead process does in `except BaseException` and `finally` reaches neither disk nor world."""

        async def pay() -> str:
            try:
                await trio.sleep(10)
            except BaseException:
                bank.record("charge", 5)
                raise
            finally:
                with trio.CancelScope(shield=True):
                    await bank.perform("charge", 6, seconds=1)
            return "paid"

        @workflow
        async def clinging(ctx: Context, _: None) -> str:
            return await ctx.step("pay", pay)

        error = await found(clinging)
        assert error.differences == ("bank: charge 6 happened twice; without a crash, once",)

    async def test_a_step_by_another_name_after_a_restart(self) -> None:
        @workflow
        async def fickle(ctx: Context, _: None) -> None:
            await ctx.step("mark", mark, ephemeral=True)  # recorded with the next step, so that no death comes between
            name = "first" if remembered.get("ran") else "second"
            await ctx.step(name, nothing)
            await ctx.sleep("a-while", 60)

        async def mark() -> None:
            remembered["ran"] = True

        async def nothing() -> None:
            return

        error = await found(fickle)
        assert "stuck: HistoryDivergedError" in error.differences[0]
        assert "outside of steps it has to be deterministic" in str(error)

    async def test_what_only_a_second_death_brings_out(self) -> None:
        """A step that looks whether it was begun before, and takes two deaths for a reason to do it anew."""
        world = EffectLedger("world", repeats=["begun"])

        async def careful_once() -> None:
            begun = world.count("begun")
            world.record("begun")
            world.record("done", key="again" if begun == 2 else "once")

        @workflow
        async def twice(ctx: Context, _: None) -> None:
            await ctx.step("work", careful_once)

        await explore_crashes(twice, recovery_crashes="none")
        error = await found(twice, recovery_crashes="all")
        assert error.differences == ("world: done happened twice; without a crash, once",)
        assert error.only.count("/") == 2

    async def test_a_check_of_the_test_s_own(self) -> None:
        def check(run: FinishedRun) -> None:
            assert len(run.crashes) < 2, "it died twice"

        error = await found(order, input=5, messages=[("packed", 1)], check=check)
        assert error.differences[0].startswith("check: it died twice")
        assert "+" in error.only

    async def test_an_order_of_tasks_excuses_no_more_than_itself(self) -> None:
        """S39: where branches may come in either order, an effect that happens twice is in none of them."""

        async def take(ctx: Context) -> int:
            body = (await ctx.queue.next("q")).body
            await ctx.step("charge", charge, 1)
            return body

        @workflow
        async def at_once(ctx: Context, _: None) -> int:
            return sum(dict(await ctx.join("both", {"a": take, "b": take})).values())

        error = await found(at_once, messages=[("a", 1), ("b", 2)])
        assert error.differences[0] == "bank: charge 1 happened 3 times; without a crash, twice"

    async def test_an_order_of_tasks_that_fails_is_no_measure(self) -> None:
        """S39: of two ends that come without a crash only those count that were asked for."""

        async def pick(ctx: Context) -> str:
            return await ctx.step("pick", lambda: "a straw")

        @workflow
        async def luck(ctx: Context, _: None) -> str:
            winner = (await ctx.race("first", {"left": pick, "right": pick})).winner
            if winner == "right":
                raise CriticalError("no luck")
            return winner

        seeds = list[int]()
        for seed in range(8):
            try:
                await explore_crashes(luck, only=f"no crash@seed{seed}")
                seeds.append(seed)
            except UnexpectedEndingError:
                pass
        assert 0 < len(seeds) < 8
        error = await found(luck, seeds=seeds)
        assert error.differences[0].startswith("it ended as failed: CriticalError: no luck")


async def test_what_check_finds_in_another_order_without_a_crash_is_not_blamed_on_one() -> None:
    async def branch(ctx: Context) -> None:
        await ctx.step("pay", charge_once, 1)

    @workflow
    async def racing(ctx: Context, _: None) -> None:
        await ctx.race("race", {"left": branch, "right": branch})

    def check(run: FinishedRun) -> None:
        assert len(run.effects["bank"]) == 1, "both paid"

    with pytest.raises(AssertionError, match="both paid") as caught:
        await explore_crashes(racing, check=check)
    assert not isinstance(caught.value, RecoveryDiffersError)
    assert "no crash@seed" in "".join(caught.value.__notes__)


class TestWhatCannotBeExplored:
    async def test_a_child_that_was_not_named(self) -> None:
        @workflow
        async def child(ctx: Context, _: None) -> None: ...

        @workflow
        async def parent(ctx: Context, _: None) -> None:
            await ctx.call("child", child)

        with pytest.raises(UnexpectedEndingError, match=r"explore_crashes\(parent, \.\.\., workflows=\[\.\.\.\]\)"):
            await explore_crashes(parent)

    async def test_a_workflow_that_is_not_the_same_twice(self) -> None:
        calls: list[int] = []

        async def count() -> int:
            calls.append(1)
            return len(calls)

        @workflow
        async def counting(ctx: Context, _: None) -> int:
            return await ctx.step("count", count)

        with pytest.raises(NotRepeatableError, match="before any crash") as caught:
            await explore_crashes(counting)
        assert any("step 'count'" in difference for difference in caught.value.differences)
        assert "ctx.now()" in str(caught.value)
        explored = await explore_crashes(counting, ignore=["count"], compare=["state", "history", "effects"])
        assert explored.write_points > 3

    async def test_a_workflow_that_throws_dice_is_not_called_wrong(self) -> None:
        """They fall alike without a crash, and otherwise after one; then what was seen once is not seen again."""
        thrown: list[int] = []

        async def throw() -> str:
            thrown.append(1)
            return "head" if len(thrown) == 3 else "tail"

        @workflow
        async def gambling(ctx: Context, _: None) -> str:
            return await ctx.step("throw", throw)

        with pytest.raises(NotRepeatableError, match="the second ends otherwise after the same crash") as caught:
            await explore_crashes(gambling)
        assert caught.value.differences[0] == "it ended as completed: 'tail'; the first time, as completed: 'head'"
        assert caught.value.only != "no crash@seed0"

    async def test_a_workflow_that_does_not_write_the_same_twice(self) -> None:
        """It records the same; but writes are what crashes are counted by."""
        runs: list[FinishedRun] = []

        @workflow
        async def hesitant(ctx: Context, _: None) -> None:
            await ctx.step("first", trio.lowlevel.checkpoint, ephemeral=bool(runs))  # then it goes with the next write
            await ctx.step("second", trio.lowlevel.checkpoint)

        with pytest.raises(NotRepeatableError, match=r"in the first run") as caught:
            await explore_crashes(hesitant, check=runs.append)
        assert caught.value.only == "no crash@seed0"

    async def test_a_workflow_that_waits_for_what_never_comes(self) -> None:
        with pytest.raises(EndlessRunError, match=r"order-1.*messages=.*no crash@seed0") as caught:
            await explore_crashes(order, 5)
        assert caught.value.only == "no crash@seed0"

    async def test_a_workflow_that_records_for_ever_without_a_pause(self) -> None:
        @workflow
        async def ceaseless(ctx: Context, _: None) -> None:
            number = 0
            while True:
                await ctx.step(f"step-{number}", trio.lowlevel.checkpoint)
                number += 1

        with pytest.raises(EndlessRunError, match="it has made 30 writes and goes on"):
            await explore_crashes(ceaseless, writes_max=30)

    async def test_a_workflow_that_goes_on_for_ever(self) -> None:
        async def again(ctx: Context, _: None) -> None:
            await ctx.sleep("tick", 1)

        @workflow
        async def ticking(ctx: Context, _: None) -> None:
            await ctx.loop("ticks", again)

        with pytest.raises(EndlessRunError, match=r"made 200 writes.*cancel_at="):
            await explore_crashes(ticking, writes_max=200)

    async def test_a_workflow_that_fails_where_it_was_to_complete(self) -> None:
        async def fail() -> None:
            raise CriticalError("sold out")

        @workflow
        async def failing(ctx: Context, _: None) -> None:
            await ctx.step("fail", fail)

        with pytest.raises(UnexpectedEndingError, match=r"sold out.*ends_as='failed'") as caught:
            await explore_crashes(failing)
        assert caught.value.state is WorkflowState.FAILED
        assert (await explore_crashes(failing, ends_as="failed")).write_points > 3

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"messages": ["go"]}, r"messages=\[\('paid', 1999\)\]"),
            ({"messages": [Mail("go", at=-1)]}, "at="),
            ({"seeds": 0}, r"not 0\. Write seeds=5"),
            ({"seeds": ["a"]}, "seeds=5"),
            ({"ends_as": "running"}, "ends_as='failed'"),
            ({"only": "third"}, "only='3/after"),
            ({"only": "3/during"}, "'before' or 'after'"),
            ({"compare": ["times"]}, "compare="),
            ({"ignore": "step"}, r"ignore=\['step'\]"),
            ({"recovery_crashes": "some"}, "recovery_crashes='all'"),
            ({"writes_max": "x"}, "not 'x'; write writes_max=2000"),
            ({"writes_max": 0}, "at least 1"),
            ({"seed": 3}, "takes seed=3; write seeds="),
            ({"max_lives": 3}, "write max_live="),
            ({"nonsense": 3}, "leave nonsense= out"),
            ({"clock": None}, "leave clock= out"),
            ({"workflow_id": ""}, "id"),
            ({"timeout": -1}, "timeout"),
            ({"timeout": 0}, r"timeout=86400\.0"),
            ({"writes_max": 0}, "writes_max=2000"),
            ({"seeds": [-1]}, "seeds=5"),
            ({"only": "no crash@seed-1"}, "only='3/after"),
            ({"compare": []}, "compare="),
            ({"check": 3}, "check=nobody_pays_twice"),
            ({"check": charge_once}, r"def check\(run\): assert"),
            ({"compare": None}, r"not None; write compare="),
            ({"messages": Mail("packed")}, r"messages takes several, not Mail.*messages=\[\('paid', 1999\)\]"),
            ({"messages": None}, "messages takes several, not None"),
            ({"modules": ["shop"]}, r"modules=\[shop\]"),
            ({"modules": 3}, r"modules=\[shop\]"),
            ({"workflows": careless}, r"workflows=\[parcel\]"),
            ({"ignore": 3}, "ignore="),
            ({"seed": 3}, "seeds="),
            ({"durability": "full"}, "leave durability= out"),
        ],
    )
    async def test_bad_arguments_say_what_to_write(self, arguments: dict[str, Any], says: str) -> None:
        with pytest.raises((InvalidArgumentError, ValueError), match=says):
            await explore_crashes(order, 5, **arguments)

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"check": lambda run: False}, r"check returned False.*assert"),
            ({"ignore": ["nonsense", "charge-card"]}, r"ignore=\['nonsense'\] names no entry"),
            ({"ignore": ["nonsense"], "only": "0/after@seed0"}, r"ignore=\['nonsense'\] names no entry"),
            ({"only": "99/before@seed0"}, r"no write 99 .*only='\d+/after@seed0'"),
        ],
    )
    async def test_what_would_never_be_met_is_told(self, arguments: dict[str, Any], says: str) -> None:
        """S39: an argument that changes nothing, and a check that cannot fail, are mistakes in the test."""
        with pytest.raises(InvalidArgumentError, match=says):
            await explore_crashes(order, 5, messages=[("packed", 1)], recovery_crashes="none", **arguments)

    async def test_two_ledgers_of_one_name_do_not_hide_each_other(self) -> None:
        """S39: a careless charge on one of them would be told as the effects of the other."""
        twin = EffectLedger("bank")

        async def mail() -> None:
            twin.record("mail", key=current_step().idempotency_key)

        @workflow
        async def two(ctx: Context, _: None) -> None:
            await ctx.step("charge", charge, 5)
            await ctx.step("mail", mail)

        with pytest.raises(InvalidArgumentError, match="2 ledgers are called 'bank'"):
            await explore_crashes(two)

    async def test_a_ledger_that_each_attempt_makes_anew_is_told(self) -> None:
        async def pay() -> None:
            EffectLedger("of the attempt").record("charge")

        @workflow
        async def forgetting(ctx: Context, _: None) -> None:
            await ctx.step("pay", pay)

        with pytest.raises(InvalidArgumentError, match="outside of functions"):
            await explore_crashes(forgetting)


class _Money:
    """Equal by what it holds, and looks like no other."""

    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Money) and other.cents == self.cents

    __hash__ = None  # type: ignore[assignment]


class _Parcel:
    """Equal to none but itself, and has no text of its own."""


class _Mute:
    """Equal to all of its kind, and its text cannot be had."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mute)

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise ValueError("no")


class _Array:
    """As arrays are: to ask whether two are equal gives no yes or no."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "array([1, 2])"


@dataclass(frozen=True)
class _Payment:
    """As one that holds a secret: its text does not say all that counts."""

    payee: str
    cents: Any = field(repr=False)


class _Row:
    """As of many libraries: equal to none but itself, with a text that tells a part of what it holds."""

    def __init__(self, cents: Any, mark: object = None) -> None:
        self.cents = cents
        self.mark = mark

    def __repr__(self) -> str:
        return "Row()"


class _Table(_Row):
    """As arrays are that are too long to be shown whole: neither `==` nor the text can tell."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


class TestContentOfEffects:
    """What a ledger was given is compared with `==`, as it says."""

    def paying(self, content: Callable[[], Any], *, with_key: bool = True) -> Workflow[Any, Any]:
        def pay() -> None:
            bank.record("pay", content(), key=current_step().idempotency_key if with_key else None)

        @workflow(name="paying")
        async def paying(ctx: Context, _: None) -> None:
            await ctx.step("pay", pay)

        return paying

    @pytest.mark.parametrize("with_key", [True, False])
    @pytest.mark.parametrize("content", [partial(_Money, 5), _Mute, _Array, partial(float, "nan"), lambda: next(_ones)])
    async def test_what_is_equal_is_the_same_however_it_looks(self, content: Callable[[], Any], with_key: bool) -> None:
        code = self.paying(content, with_key=with_key)
        if with_key:
            assert (await explore_crashes(code)).crashes
        else:
            with pytest.raises(
                RecoveryDiffersError, match=r"bank: pay .* happened twice; without a crash, once"
            ) as caught:
                await explore_crashes(code)
            assert " AGAIN (in step 'pay'" in caught.value.story

    @pytest.mark.parametrize("with_key", [True, False])
    async def test_what_is_like_no_other_is_named_as_the_cause(self, with_key: bool) -> None:
        with pytest.raises(NotRepeatableError, match=r"_Parcel object at 0x\w+>\] happened .*make it a dataclass\)"):
            await explore_crashes(self.paying(lambda: [_Parcel()], with_key=with_key))

    async def test_a_wrong_amount_that_its_text_does_not_show_is_found(self) -> None:
        def pay() -> None:
            bank.record("charge", _Payment("shop", remembered.get("cents", 0)), key=current_step().idempotency_key)

        error = await found(self.forgetful(pay))
        looks_like_it = (
            "_Payment(payee='shop') happened not at all; without a crash, once (what looks the same is not equal"
        )
        assert f"bank: charge {looks_like_it}" in error.differences[0]
        assert "was in memory only" in str(error)

    async def test_a_wrong_output_that_its_text_does_not_show_is_found(self) -> None:
        async def finish(ctx: Context) -> _Payment:
            return _Payment("shop", remembered.get("cents", 0))

        error = await found(self.forgetful(finish), compare=["output"])
        assert "(what looks the same is not equal to it" in error.differences[0]

    async def test_a_key_is_not_good_for_another_amount_that_its_text_does_not_show(self) -> None:
        bank.record("charge", _Payment("shop", 1999), key="k")
        bank.record("charge", _Payment("shop", 1999), key="k")
        with pytest.raises(EffectKeyError, match="what looks the same is not equal to it"):
            bank.record("charge", _Payment("shop", 0), key="k")

    def forgetful(self, then: Callable[..., Any]) -> Workflow[Any, Any]:
        async def remember() -> None:
            remembered["cents"] = 1999

        @workflow(name="forgetful")
        async def forgetful(ctx: Context, _: None) -> _Payment | None:
            await ctx.step("remember", remember)
            await ctx.sleep("a-while", 60)
            if is_coroutine_function(then):
                return await then(ctx)  # type: ignore[no-any-return]
            await ctx.step("then", then)
            return None

        return forgetful

    @pytest.mark.parametrize(
        ("one", "other", "same"),
        [
            (_Payment("a", 5), _Payment("a", 5), True),
            (_Payment("a", 5), _Payment("a", 6), False),
            (_Payment("a", float("nan")), _Payment("a", float("nan")), True),
            ([float("nan"), 1], [float("nan"), 1], True),
            ([float("nan"), _Payment("a", 5)], [float("nan"), _Payment("a", 6)], False),
            (_Row(5), _Row(5), True),
            (_Row(5), _Row(6), False),
            ([_Row("a", "a")], [_Row("a", "".join(["a"]))], True),
            (_Row(5, threading.Lock()), _Row(5, threading.Lock()), True),
            (_Payment("a", threading.Lock()), _Payment("a", threading.Lock()), False),
            (_Table([5]), _Table([5]), True),
            (_Table([5]), _Table([6]), False),
            (_Table(len), _Table(lambda: 5), False),
        ],
    )
    def test_where_equality_cannot_tell_it_is_what_it_looks_like_and_holds(
        self, one: object, other: object, same: bool
    ) -> None:
        assert (is_same(one, other), Alike(one) == Alike(other)) == (same, same)

    async def test_many_effects_in_another_order_are_the_same(self) -> None:
        """And with a thousand it takes no time to see that."""

        def effects(numbers: Iterable[int], cents: int = 5) -> list[OneEffect]:
            return [OneEffect("pay", _Payment(f"{n}", cents), None, None, (), 0, 0, 0) for n in numbers]

        assert are_the_same(effects(range(1000)), effects(reversed(range(1000))))
        assert are_the_same(effects([]), [])
        assert not are_the_same(effects([1, 2]), effects([1, 2], cents=6))
        assert not are_the_same(effects([1, 2, 2]), effects([1, 1, 2]))
        assert not are_the_same(effects([1, 2]), effects([1]))


_ones: Iterator[Any] = cycle([1, 1.0, True])


class TestHowItIsCalled:
    @settings(max_examples=3)
    @given(cents=st.integers(1, 10_000), seed=st.integers(0, 2**32 - 1))
    def test_in_plain_code_under_hypothesis(self, cents: int, seed: int) -> None:
        explored = explore_crashes_now(order, cents, messages=[("packed", 1)], seeds=[seed])
        assert explored.first.effects["bank"][0].content == cents

    def test_in_plain_code_the_story_of_a_failure_tells_nothing_of_the_kit(self) -> None:
        """What the workflow failed with has nothing to do with how the exploration was called."""

        async def fail() -> None:
            raise CriticalError("sold out")

        @workflow
        async def failing(ctx: Context, _: None) -> None:
            await ctx.step("fail", fail)

        with pytest.raises(UnexpectedEndingError) as caught:
            explore_crashes_now(failing)
        assert "sold out" in str(caught.value)
        assert "During handling" not in str(caught.value)
        assert "perdure/testing" not in str(caught.value)

    async def test_plain_code_in_trio_is_refused(self) -> None:
        with pytest.raises(VirtualTimeError, match="await explore_crashes"):
            explore_crashes_now(order, 5)

    async def test_in_real_time_under_a_timeout_it_lets_go(self) -> None:
        """Cancelled, it ends the run in progress, here one without end; nothing goes on behind its caller's back."""
        ticks: list[float] = []
        ticked = threading.Event()

        async def tick(ctx: Context, _: None) -> None:
            ticks.append(trio.current_time())
            ticked.set()
            await ctx.sleep("tick", 1)

        @workflow
        async def ticking(ctx: Context, _: None) -> None:
            await ctx.loop("ticks", tick)

        async def cancel_once_it_ticks(scope: trio.CancelScope) -> None:
            await trio.to_thread.run_sync(ticked.wait, 60)  # however long a busy machine takes for that
            await trio.sleep(0.1)
            scope.cancel()

        with trio.fail_after(60), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_once_it_ticks, scope)
                await explore_crashes(ticking, writes_max=10**9)
        assert scope.cancelled_caught
        count = len(ticks)
        await trio.sleep(0.05)
        assert len(ticks) == count > 0

    async def test_no_time_passes_in_virtual_time(self, autojump_clock: trio.testing.MockClock) -> None:
        with trio.fail_after(5):
            await explore_crashes(order, 5, messages=[("packed", 1)])
        assert trio.current_time() == 0

    async def test_each_seed_is_an_order_of_its_own(self) -> None:
        """S39: what comes first is the schedule's to say; a run is compared with the one of its own schedule."""
        firsts: set[str] = set()

        @workflow
        async def racing(ctx: Context, _: None) -> str:
            async def branch(child: Context) -> str:
                return await child.step("mark", mark)

            async def mark() -> str:
                return current_step().path[1]  # type: ignore[return-value]

            raced = await ctx.race("first", {"left": branch, "right": branch})
            return raced.winner

        def check(run: FinishedRun) -> None:
            if not run.crashes:
                firsts.add(run.output)

        explored = await explore_crashes(
            racing, seeds=range(8), check=check, recovery_crashes="none", compare=["state"]
        )
        assert explored.seeds == tuple(range(8))
        assert firsts == {"left", "right"}

    async def test_options_of_the_supervisor_are_passed_on(self) -> None:
        explored = await explore_crashes(order, 5, messages=[("packed", 1)], max_live=1, idle_timeout=0)
        assert explored.first.output[0] == "pay-1"

    async def test_every_write_of_every_recovery(self) -> None:
        one = await explore_crashes(nothing_much, recovery_crashes="one")
        every = await explore_crashes(nothing_much, recovery_crashes="all")
        none = await explore_crashes(nothing_much, recovery_crashes="none")
        assert none.runs == 2 + 2 * none.write_points
        assert none.runs < one.runs <= 2 + 3 * one.write_points < every.runs

    @pytest.mark.parametrize(
        ("only", "says"), [("0/after+400/before", "process 2 makes"), ("300/after", "no write 300")]
    )
    async def test_a_run_that_is_there_no_more_is_the_argument_s_fault(self, only: str, says: str) -> None:
        """Code that has changed since makes other writes; that is nothing to accuse it of."""
        with pytest.raises(InvalidArgumentError, match=says):
            await explore_crashes(nothing_much, only=only)

    @pytest.mark.parametrize(("crashes", "only"), [(0, "no crash@seed0"), (1, "0/before@seed0")])
    async def test_whatever_a_check_raises_names_its_run(self, crashes: int, only: str) -> None:
        def check(run: FinishedRun) -> None:
            if len(run.crashes) == crashes:
                raise ValueError("not like that")

        with pytest.raises(ValueError, match="not like that") as caught:
            await explore_crashes(nothing_much, check=check)
        assert f'only="{only}"' in caught.value.__notes__[0]

    async def test_a_death_elsewhere_than_planned_is_not_counted_as_explored(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S39: counted is where the disk says that a process died."""
        planned = Scenario.run

        def run(self: Scenario, crashes: Sequence[CrashPoint], seed: int) -> FinishedRun:
            return planned(self, [CrashPoint(each.write, "after") for each in crashes], seed)

        monkeypatch.setattr(Scenario, "run", run)
        with pytest.raises(AssertionError, match=r"explored is not counted: \[\(0, 'before'\)"):
            await explore_crashes(nothing_much)

    def test_errors_survive_pickling(self) -> None:
        error = RecoveryDiffersError("text", only="3/after@seed0", differences=("a",), story="s")
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.only, again.differences, again.story) == ("text", "3/after@seed0", ("a",), "s")
        assert isinstance(again, AssertionError)

    async def test_an_exploration_says_how_much_it_was(self) -> None:
        explored = await explore_crashes(nothing_much)
        assert isinstance(explored, Exploration)
        assert str(explored) == (
            f"{explored.write_points} writes, {explored.runs} runs, {explored.crashes} crashes, one schedule: all end alike"
        )


@workflow
async def nothing_much(ctx: Context, _: None) -> None:
    await ctx.rollback_checkpoint("here")
