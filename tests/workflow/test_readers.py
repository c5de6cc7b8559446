"""Many branches that wait for messages: each message wakes one, and none is left that somebody waits for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
from harness import MovableClock, Namespace, host
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import MemoryDriver, encode_value
from perdure.storage.schema import MailboxMessage
from perdure.workflow import Context, QueueTimeoutError, RunMode, start_workflow
from perdure.workflow.activation import Activation
from perdure.workflow.readers import Readers
from perdure.workflow.waits import Parking, Wait

NAMES = ("x", "y", "z")
names_wanted = st.one_of(st.none(), st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))


async def test_a_message_wakes_one_branch_and_the_first_that_parked_first(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S13, S26: with 300 branches that wait for one name, the work for a message does not grow with them."""
    count = 300
    waits = Counter[str]()
    until_woken = Parking.until_woken

    async def counted(self: Parking, clock: Any) -> None:
        waits["begun"] += 1
        await until_woken(self, clock)

    monkeypatch.setattr(Parking, "until_woken", counted)

    async def fan(ctx: Context, _: Any) -> dict[str, Any]:
        async def take(ctx: Context) -> Any:
            return (await ctx.queue.next("read", names=["go"])).body

        return dict(await ctx.join("all", {f"{number:03}": take for number in range(count)}))

    async with host(namespace, mode) as process:
        await process.stop(fan)
        if mode == "yield":
            for number in range(count):
                await process.send("go", number)
            assert sorted((await process.finish(fan)).values()) == list(range(count))
            return
        assert waits["begun"] == count
        for number in range(10):
            await process.send("go", number)
            await process.advance(0)
        assert waits["begun"] == count, "nobody was woken in vain"
        async with trio.open_nursery() as senders:
            for number in range(10, count):
                senders.start_soon(process.send, "go", number)
        assert sorted((await process.finish(fan)).values()) == list(range(count))
        assert waits["begun"] == count


async def test_who_is_woken_and_takes_another_message_passes_on_the_one_that_it_was_woken_for(
    namespace: Namespace, autojump_clock: MockClock
) -> None:
    """S26: two messages come at once; the branch that wants both takes the older one."""

    async def fan(ctx: Context, _: Any) -> dict[str, Any]:
        async def both(ctx: Context) -> Any:
            return (await ctx.queue.next("read", names=["x", "y"])).body

        async def only_y(ctx: Context) -> Any:
            await ctx.sleep("behind", 1)
            return (await ctx.queue.next("read", names=["y"], timeout=1000)).body

        async def only_x(ctx: Context) -> Any:
            await ctx.sleep("behind", 1)
            return (await ctx.queue.next("read", names=["x"])).body

        return dict(await ctx.join("all", {"both": both, "y": only_y, "x": only_x}))

    async with host(namespace, "live") as process:
        await process.stop(fan)
        await process.advance(2)
        activation: Activation = process.handle._activation  # type: ignore[union-attr]
        messages = [MailboxMessage(name, name, encode_value(name), 0) for name in ("y", "x")]
        letters = [activation.mailbox.write(message, remember=False) for message in messages]
        await activation.commit_from_outside()
        activation.offer(letters)
        await process.advance(0)
        await process.send("y", "later")
        result = await process.finish(fan)
    assert result == {"both": "y", "y": "later", "x": "x"}


async def test_a_branch_that_lost_its_race_passes_on_what_it_was_woken_for(
    namespace: Namespace, autojump_clock: MockClock
) -> None:
    """S26, S29: the message comes in the moment in which the race is decided."""

    async def fan(ctx: Context, _: Any) -> Any:
        async def take(ctx: Context) -> Any:
            return (await ctx.queue.next("read", names=["x"])).body

        async def first(ctx: Context) -> Any:
            await ctx.queue.next("win", names=["win"])

        async def racing(ctx: Context) -> Any:
            return (await ctx.race("race", {"take": take, "first": first})).winner

        async def patient(ctx: Context) -> Any:
            await ctx.sleep("later", 1)  # so that it parks behind the one that races
            return await take(ctx)

        return dict(await ctx.join("both", {"racing": racing, "patient": patient}))

    async with host(namespace, "live") as process:
        await process.stop(fan)
        await process.advance(2)
        async with trio.open_nursery() as senders:
            senders.start_soon(process.send, "win")
            senders.start_soon(process.send, "x", "the only one")
        with trio.fail_after(100):
            result = await process.finish(fan) if await _is_over(process) else None
            if result is None:  # it won with the message before the other could
                await process.send("x", "another")
                result = await process.finish(fan)
    assert result["patient"] in ("the only one", "another")


async def _is_over(process: Any) -> bool:
    await process.advance(0)
    return bool((await process.handle.get_state()).is_terminal)


branches = st.lists(
    st.tuples(
        names_wanted,
        st.integers(1, 2),
        st.sampled_from([None, 3, 7]),
        st.sampled_from(["join", "race", "nested"]),
    ),
    min_size=1,
    max_size=7,
)
sendings = st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), max_size=5)


@settings(max_examples=60)
@given(branches, sendings)
def test_no_message_is_left_that_a_branch_waits_for(
    plans: list[tuple[Any, int, Any, str]], bursts: list[list[str]]
) -> None:
    """S26, S29: whatever waits for what, in joins and races, with and without timeouts, and whatever comes at once."""

    async def fan(ctx: Context, _: Any) -> None:
        async def read(ctx: Context, names: Any, count: int, timeout: Any) -> None:
            for number in range(2):
                try:
                    await ctx.queue.next_batch(f"read-{number}", names=names, count=count, timeout=timeout)
                except QueueTimeoutError:
                    raise AssertionError("a batch is empty instead") from None

        async def branch(ctx: Context, index: int) -> None:
            names, count, timeout, kind = plans[index]
            if kind == "join":
                await read(ctx, names, count, timeout)
                return
            rival_s = 4 if kind == "race" else 9

            async def rival(ctx: Context) -> None:
                await ctx.sleep("rival", rival_s)

            await ctx.race("race", {"read": lambda ctx: read(ctx, names, count, timeout), "rival": rival})
            await read(ctx, names, count, timeout)

        await ctx.join("all", {f"b{index}": lambda ctx, index=index: branch(ctx, index) for index in range(len(plans))})

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            handle = await start_workflow(nursery, "w-1", fan, None, MemoryDriver(), clock=MovableClock())
            activation: Activation = handle._activation  # type: ignore[attr-defined]
            for burst in bursts:
                await wait_all_tasks_blocked()
                if (await handle.get_state()).is_terminal:
                    break
                for name in burst:
                    nursery.start_soon(_send, handle, name)
                await wait_all_tasks_blocked()
                check(activation)
                await trio.sleep(2)
                await wait_all_tasks_blocked()
                check(activation)
            nursery.cancel_scope.cancel()

    def check(activation: Activation) -> None:
        for parking in activation._parked:
            left = [name for name in activation.mailbox.names() if parking.wait.wants(name)]
            assert left == [], f"{parking.wait} was not woken"

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def _send(handle: Any, name: str) -> None:
    from perdure.workflow import WorkflowEndedError

    try:
        await handle.message(name)
    except WorkflowEndedError:
        return


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("park"), names_wanted),
            st.tuples(st.just("message"), st.sampled_from(NAMES)),
            st.tuples(st.just("resume"), st.integers(0, 9)),
            st.tuples(st.just("leave"), st.integers(0, 9)),
        ),
        max_size=60,
    )
)
def test_as_many_are_woken_as_messages_wait_or_all_who_want_them(acts: list[tuple[str, Any]]) -> None:
    """S26: against a plain list; whoever is woken takes the oldest that it may when it runs, or leaves without."""
    readers = Readers()
    parked: list[Parking] = []
    mailbox: list[str] = []

    def go(parking: Parking, *, takes: bool) -> None:
        parked.remove(parking)
        readers.discard(parking)
        if takes:
            taken = next((name for name in mailbox if parking.wait.wants(name)), None)
            if taken is not None:
                mailbox.remove(taken)
        names = NAMES if parking.wait.names is None else parking.wait.names
        for name in names:
            readers.wake(name, mailbox.count(name))

    for act, what in acts:
        if act == "park":
            wait = Wait(names=None if what is None else frozenset(what))
            if not any(wait.wants(name) for name in mailbox):  # else it takes it instead
                parked.append(Parking(wait))
                readers.add(parked[-1])
        elif act == "message":
            mailbox.append(what)
            readers.wake(what, mailbox.count(what))
        elif act == "resume":
            woken = [parking for parking in parked if parking.is_woken]
            if woken:
                go(woken[what % len(woken)], takes=True)
        elif parked:
            go(parked[what % len(parked)], takes=False)
        for name in NAMES:
            wanting = [parking for parking in parked if parking.wait.wants(name)]
            woken_count = sum(parking.is_woken for parking in wanting)
            assert woken_count >= min(mailbox.count(name), len(wanting))
    while any(parking.is_woken for parking in parked):
        go(next(parking for parking in parked if parking.is_woken), takes=True)
    assert not [name for name in mailbox for parking in parked if parking.wait.wants(name)]
    while parked:
        go(parked[0], takes=False)
    assert not readers
