"""Messages that a race's loser had read: back in the mailbox, at their place, with the batch that decides the race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from harness import Crash, Namespace, crashes, host
from trio.testing import MockClock

from perdure.storage import layout
from perdure.workflow import Context, Message, RunMode, WorkflowState


async def mailbox_keys(namespace: Namespace) -> list[int]:
    return [layout.parse_message_key(key) for key, _ in await (await namespace.driver()).list(layout.MAILBOX_PREFIX)]


def race_of(completed: int, *, is_nested: bool = False) -> Any:
    """A race whose loser reads `go` twice and completes so many of them; then all that is left is read."""

    async def loser(ctx: Context) -> None:
        first = await ctx.queue.next("first", names=["go"], completable=True)
        if completed > 0:
            await first.complete()
        second = await ctx.queue.next_batch("second", names=["go"], count=2, completable=True)
        for message in second[: max(0, completed - 1)]:
            await message.complete()
        await ctx.sleep("long", 1_000_000)

    async def outer_loser(ctx: Context) -> None:
        if is_nested:
            await ctx.join("inner", {"one": loser, "two": lambda ctx: ctx.sleep("too", 1_000_000)})
        else:
            await loser(ctx)

    async def winner(ctx: Context) -> Any:
        return (await ctx.queue.next("end", names=["end"])).body

    async def order(ctx: Context, _: Any) -> Any:
        result = await ctx.race("race", {"loser": outer_loser, "winner": winner})
        rest = await ctx.queue.next_batch("rest", count=100, timeout=1)
        return [result.value, [message.body for message in rest]]

    return order


class TestRace:
    @pytest.mark.parametrize("is_nested", [False, True])
    @pytest.mark.parametrize("completed", [0, 1, 2, 3])
    async def test_what_a_loser_read_and_did_not_complete_is_read_by_others_in_its_turn(
        self, completed: int, is_nested: bool, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27, S28, S29: nothing is lost with a loser, and what was completed does not come back; over restarts."""
        order = race_of(completed, is_nested=is_nested)
        async with host(namespace, mode) as process:
            await process.stop(order)
            for number in range(3):
                await process.send("go", number)
                await process.send("other", 10 + number)
                await process.stop(order)
                await process.restart()
            await process.stop(order)
            await process.send("go", 3)
            await process.stop(order)
            await process.restart()
            await process.send("end", "won")
            value, rest = await process.finish(order)
            assert value == "won"
            sent = [0, 10, 1, 11, 2, 12, 3]
            taken = [0, 1, 2][:completed] if completed < 3 else [0, 1]
            assert [body for body in rest if body < 10] == [body for body in sent if body < 10 and body not in taken]
            assert [body for body in rest if body >= 10] == [10, 11, 12]
            assert rest == [body for body in sent if body in rest], "each at the place that it had"
            assert await mailbox_keys(namespace) == []
            assert await process.finish(order) == [value, rest]
        await namespace.close()

    async def test_a_branch_beside_the_race_that_waits_for_it_gets_it(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26, S29: a message that comes back ends a wait, as one that is sent does."""

        async def loser(ctx: Context) -> None:
            await ctx.queue.next("read", names=["go"])
            await ctx.sleep("long", 1_000_000)

        async def winner(ctx: Context) -> None:
            await ctx.queue.next("end", names=["end"])

        async def racing(ctx: Context) -> str:
            return (await ctx.race("race", {"loser": loser, "winner": winner})).winner

        async def waiting(ctx: Context) -> Any:
            await ctx.sleep("a moment", 1)
            return (await ctx.queue.next("read", names=["go"])).body

        async def order(ctx: Context, _: Any) -> Any:
            return dict(await ctx.join("join", {"racing": racing, "waiting": waiting}))

        async with host(namespace, mode) as process:
            await process.send("go", "hello")
            await process.stop(order)
            await process.advance(2)
            stopped = await process.stop(order)
            assert stopped.waiting_for_messages == ("end", "go")
            await process.send("end")
            assert await process.finish(order) == {"racing": "winner", "waiting": "hello"}

    async def test_it_is_in_the_batch_that_decides_the_race(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27, S29: given back and forgotten together."""
        order = race_of(0)
        async with host(namespace, mode) as process:
            await process.send("go", 1)
            await process.stop(order)
            assert await mailbox_keys(namespace) == []
            await process.send("end", "won")
            await process.stop(order)
            driver = await namespace.driver()
            key = layout.message_key(0)
            (deciding,) = [batch for batch in driver.batches if any(put == key for put, _ in batch.puts)][-1:]
            assert deciding.delete_prefixes, "the loser's history"

    async def test_a_loser_completes_nothing_once_the_winner_is_chosen(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S29: neither its own message nor one that the code around the race had read."""
        kept: list[Message] = []
        tried: list[str] = []

        async def complete(message: Message) -> None:
            tried.append(message.name)
            with trio.CancelScope(shield=True):
                await message.complete()
            tried.append("completed")

        async def in_step(ctx: Context) -> None:
            own = await ctx.queue.next("own", names=["go"], completable=True)
            try:
                await ctx.step("work", trio.sleep_forever, timeout=0)
            finally:
                await complete(own)

        async def in_wait(ctx: Context) -> None:
            try:
                await ctx.queue.next("never", names=["never"])
            finally:
                await complete(kept[-1])

        async def winner(ctx: Context) -> None:
            await ctx.step("end", trio.sleep, 1)

        async def order(ctx: Context, _: Any) -> Any:
            kept.append(await ctx.queue.next("above", completable=True))
            return (await ctx.race("race", {"in_step": in_step, "in_wait": in_wait, "winner": winner})).winner

        async with host(namespace, mode) as process:
            await process.send("above", 1)
            await process.send("go", 2)
            assert await process.finish(order) == "winner"
            assert sorted(tried) == ["above", "go"], "both tried, neither did"
            messages = {
                entry.path: entry.data["body"]["completed"]
                for entry in (await namespace.snapshot()).entries
                if entry.kind == "message" and isinstance(entry.data["body"], dict)
            }
            assert messages == {("above:0",): False}
            assert await mailbox_keys(namespace) == [1]
        await namespace.close()

    async def test_whenever_the_process_dies_each_message_is_read_once_in_the_end(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27, S29, S39: a crash at every write: never lost, never twice, and the end is that without a crash."""
        order = race_of(1)

        async def scenario(namespace: Namespace) -> Any:
            async with host(namespace, mode) as process:
                await process.stop(order)
                for number in range(4):
                    await process.send("go", number, id=f"m-{number}")
                    await process.stop(order)
                await process.send("end", "won", id="m-end")
                return await process.finish(order)

        async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
            value, rest = outcome
            assert value == "won", crash
            assert rest == [1, 2, 3], crash
            assert await mailbox_keys(namespace) == [], crash
            assert (await namespace.snapshot()).state is WorkflowState.COMPLETED, crash

        explored = await crashes(scenario, make_quick_namespace, check)
        assert explored.counted >= 10
