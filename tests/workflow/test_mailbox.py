"""The mailbox: what was acknowledged is there, once, and brings the workflow back."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import trio
from harness import MovableClock, Namespace, host
from hypothesis import given
from hypothesis import strategies as st
from moments import MomentDriver, Moments
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import MemoryDriver, commit_batch, encode_value, layout
from perdure.storage.schema import MailboxMessage
from perdure.workflow import (
    Context,
    RunMode,
    WorkflowHandle,
    WorkflowState,
    WorkflowSuspendedError,
    run_workflow,
    send_message,
    start_workflow,
)
from perdure.workflow.mailbox import DEDUP_MAX, Letter, Mailbox
from perdure.workflow.pending import Pending


async def collecting(ctx: Context, count: int) -> list[Any]:
    """Takes `count` messages, one at a time."""
    return [(await ctx.queue.next(f"read-{number}")).body for number in range(count)]


async def taking(ctx: Context, count: int) -> list[Any]:
    """Takes what is there, up to `count`, at once, and then whatever is still left within a minute."""
    first = await ctx.queue.next_batch("first", count=count)
    rest = await ctx.queue.next_batch("rest", count=count, timeout=60)
    return [[message.body for message in batch] for batch in (first, rest)]


async def mailbox_keys(namespace: Namespace) -> list[int]:
    return [layout.parse_message_key(key) for key, _ in await (await namespace.driver()).list(layout.MAILBOX_PREFIX)]


async def known_ids(namespace: Namespace) -> list[str]:
    pairs = await (await namespace.driver()).list(layout.DEDUP_PREFIX)
    return [layout.parse_dedup_key(key) for key, _ in pairs]


class TestDeduplication:
    async def test_an_id_sent_again_is_delivered_once_while_it_waits_and_after_it_was_read(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27: same `id` sent again, also after restart: one delivery."""
        async with host(namespace, mode) as process:
            await process.stop(collecting, 3)
            await process.send("a", "first", id="m-1")
            await process.send("a", "first again", id="m-1")
            await process.stop(collecting, 3)
            await process.send("a", "first once more", id="m-1")
            await process.restart()
            await process.send("a", "and after a restart", id="m-1")
            stopped = await process.stop(collecting, 3)
            assert stopped.state is WorkflowState.SLEEPING
            await process.send("a", "live or not", id="m-1")
            await process.send("a", "second", id="m-2")
            await process.send("a", "third")
            assert await process.finish(collecting, 3) == ["first", "second", "third"]
        assert await mailbox_keys(namespace) == []
        await namespace.close()

    async def test_messages_without_an_id_are_never_taken_for_the_same(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27: only a given `id` deduplicates."""
        async with host(namespace, mode) as process:
            await process.send("a", 1)
            await process.send("a", 1)
            await process.stop(collecting, 3)
            await process.send("a", 1)
            assert await process.finish(collecting, 3) == [1, 1, 1]

    async def test_the_last_thousand_ids_are_remembered_and_no_more(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27: deduplication memory is bounded, in memory and on disk, also over restarts."""
        extra = 5
        count = DEDUP_MAX + extra
        async with host(namespace, mode) as process:
            await process.stop(taking, 2 * count)
            half = count // 2
            await _fill(namespace, range(half), process.clock)
            await process.restart()
            await _fill(namespace, range(half, count), process.clock)
            await process.restart()
            known = await known_ids(namespace)
            assert len(known) == DEDUP_MAX
            assert set(known) == {f"m-{number}" for number in range(extra, count)}
            driver = await namespace.driver()
            again = {
                "the oldest remembered": f"m-{extra}",
                "the latest": f"m-{count - 1}",
                "one that is forgotten": "m-0",
            }
            for body, message_id in again.items():
                await send_message(driver, "a", body, id=message_id, mailbox_limit=2 * count, clock=process.clock)
            assert len(await known_ids(namespace)) == DEDUP_MAX
            first, rest = await process.finish(taking, 2 * count)
        assert first == [*range(count), "one that is forgotten"]
        assert rest == []

    async def test_two_senders_of_one_id_at_once_deliver_one(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27: same `id` sent at the same time: one delivery, and both are told only once it is durable."""
        async with trio.open_nursery() as nursery:
            moments = Moments(nursery)
            driver = MomentDriver(await namespace.driver(), moments)
            handle = await start_workflow(nursery, "w-1", taking, 9, driver, mode=mode, clock=MovableClock())
            await wait_all_tasks_blocked()
            told: list[int] = []

            async def send(number: int) -> None:
                await handle.message("a", "once", id="m-1")
                inner = await namespace.driver()
                assert await inner.list(layout.DEDUP_PREFIX), "durable before anyone is told"
                told.append(number)

            async with trio.open_nursery() as senders:
                for number in range(5):
                    senders.start_soon(send, number)
            assert sorted(told) == list(range(5))
            if mode == "live":
                assert await handle.result() == [["once"], []]
            else:
                assert len(await mailbox_keys(namespace)) == 1
            nursery.cancel_scope.cancel()
        await namespace.close()


async def _fill(namespace: Namespace, numbers: range, clock: MovableClock) -> None:
    """Many messages with ids, in one batch: what as many senders would leave."""
    driver = await namespace.driver()
    pending = Pending()
    mailbox = await Mailbox.load(driver, pending)
    await mailbox.load_known_ids(driver)
    for number in numbers:
        mailbox.write(MailboxMessage(f"m-{number}", "a", encode_value(number), clock.now_ms()), remember=True)
    await commit_batch(driver, pending.take())


class TestArrival:
    async def test_a_message_that_arrives_at_any_moment_is_read_or_brings_the_workflow_back(
        self, namespace: Namespace, make_namespace: Any, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27: acknowledged at any moment of a run, a message is in history, or in the mailbox with the alarm armed."""
        await namespace.close()
        counted = len(await self._run(make_namespace(), mode, None))
        assert counted >= 6
        for at in range(counted):
            await self._run(make_namespace(), mode, at)

    async def _run(self, namespace: Namespace, mode: RunMode, at: int | None) -> list[str]:
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await handle.message("go", "hello")

            async def step() -> str:
                await moments.reached("in the step")
                return "done"

            async def order(ctx: Context, _: Any) -> Any:
                await ctx.step("a", step)
                return (await ctx.queue.next("go", names=["go"])).body

            moments = Moments(nursery, at, send)
            moments.are_counted = False  # until the handle is there
            driver = MomentDriver(await namespace.driver(), moments)
            handle = await start_workflow(nursery, "w-1", order, None, driver, mode=mode, clock=MovableClock())
            moments.are_counted = True
            await wait_all_tasks_blocked()
            names = list(moments.names)
            if at is not None:
                assert moments.was_reached
                await moments.acted.wait()
                await self._check(namespace, handle, mode, order, names[at])
            nursery.cancel_scope.cancel()
        await namespace.close()
        return names

    async def _check(
        self, namespace: Namespace, handle: WorkflowHandle, mode: RunMode, order: Any, moment: str
    ) -> None:
        try:
            assert await handle.result() == "hello", moment
        except WorkflowSuspendedError:
            assert mode == "yield", moment
            assert len(await mailbox_keys(namespace)) == 1, moment
            alarm = await (await namespace.driver()).get_alarm("w-1")
            assert alarm is not None, f"nothing brings the workflow back: sent {moment}"
            assert alarm <= MovableClock().now_ms(), moment
            result = await run_workflow("w-1", order, None, await namespace.driver(), clock=MovableClock())
            assert result.output == "hello", moment
        recorded = [entry for entry in (await namespace.snapshot()).entries if entry.path == ("go:0",)]
        assert len(recorded) == 1
        assert await mailbox_keys(namespace) == []


class TestOrder:
    async def test_messages_of_many_senders_keep_each_senders_order(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26, S27: concurrent senders: each one's messages stay in order, and none is lost."""
        async with host(namespace, mode) as process:
            await process.stop(collecting, 60)

            async def send(sender: int) -> None:
                for number in range(10):
                    await process.send(f"sender-{sender}", [sender, number])

            async with trio.open_nursery() as nursery:
                for sender in range(6):
                    nursery.start_soon(send, sender)
            output = await process.finish(collecting, 60)
        assert len(output) == 60
        for sender in range(6):
            assert [body for body in output if body[0] == sender] == [[sender, number] for number in range(10)]

    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("send"), st.sampled_from("abc")),
                st.tuples(st.just("take"), st.sets(st.sampled_from("abcd"), min_size=1) | st.none()),
                st.tuples(st.just("reload"), st.none()),
            ),
            max_size=60,
        ),
        st.integers(min_value=1, max_value=4),
    )
    def test_a_take_gives_the_oldest_of_its_names_as_a_list_would(
        self, acts: list[tuple[str, Any]], count: int
    ) -> None:
        """S26: FIFO, any of several names, count: against a plain list as model, over reloads."""

        async def main() -> None:
            driver = MemoryDriver()
            pending = Pending()
            mailbox = await Mailbox.load(driver, pending)
            model: list[tuple[str, int]] = []
            for number, (act, what) in enumerate(acts):
                if act == "send":
                    message = MailboxMessage(f"m-{number}", what, encode_value(number), 0)
                    mailbox.offer(mailbox.write(message, remember=False))
                    model.append((what, number))
                elif act == "take":
                    letters = mailbox.take(what, count)
                    expected = [entry for entry in model if what is None or entry[0] in what][:count]
                    model = [entry for entry in model if entry not in expected]
                    assert [letter.message.name for letter in letters] == [name for name, _ in expected]
                    assert [letter.message.id for letter in letters] == [f"m-{number}" for _, number in expected]
                else:
                    await commit_batch(driver, pending.take())
                    pending = Pending()
                    mailbox = await Mailbox.load(driver, pending)
                assert len(mailbox) == len(model)

        trio.run(main)

    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("send"), st.sampled_from("abc")),
                st.tuples(st.just("take"), st.sets(st.sampled_from("abc"), min_size=1) | st.none()),
                st.tuples(st.just("return"), st.integers(min_value=1, max_value=4)),
                st.tuples(st.just("return to front"), st.integers(min_value=1, max_value=4)),
                st.tuples(st.just("reload"), st.none()),
            ),
            max_size=60,
        ),
        st.integers(min_value=1, max_value=4),
    )
    def test_what_is_given_back_is_read_again_in_its_turn(self, acts: list[tuple[str, Any]], count: int) -> None:
        """S26, S27: against a plain list as model: back to the old place, or before everything; over reloads."""

        async def main() -> None:
            driver = MemoryDriver()
            pending = Pending()
            mailbox = await Mailbox.load(driver, pending)
            model: list[Letter] = []
            out: list[Letter] = []  # what was read, latest last
            places: list[Letter] = []  # all there are, in the order in which they are to be read

            def waiting() -> list[Letter]:
                return [letter for letter in places if letter in model]

            for number, (act, what) in enumerate(acts):
                if act == "send":
                    letter = mailbox.write(MailboxMessage(f"m-{number}", what, encode_value(number), 0), remember=False)
                    mailbox.offer(letter)
                    model.append(letter)
                    places.append(letter)
                elif act == "take":
                    letters = mailbox.take(what, count)
                    expected = [letter for letter in waiting() if what is None or letter.message.name in what][:count]
                    assert letters == expected
                    for letter in letters:
                        model.remove(letter)
                    out += letters
                elif act in ("return", "return to front"):
                    for letter in reversed(out[-what:]):
                        back = mailbox.put_back(letter.message, letter.sequence if act == "return" else None)
                        mailbox.offer(back)
                        model.append(back)
                        if back.sequence == letter.sequence:
                            continue
                        assert act == "return to front" or letter.sequence < 0
                        places.remove(letter)
                        places.insert(0, back)
                    del out[-what:]
                else:
                    await commit_batch(driver, pending.take())
                    pending = Pending()
                    mailbox = await Mailbox.load(driver, pending)
                assert len(mailbox) == len(model)
                assert [letter.sequence for letter in waiting()] == sorted({letter.sequence for letter in model})
            assert mailbox.take(None, len(model) + 1) == waiting()

        trio.run(main)

    @pytest.mark.parametrize("order", list(permutations(range(4))))
    async def test_what_becomes_durable_in_another_order_is_read_in_its_own(self, order: tuple[int, ...]) -> None:
        """S26: FIFO per name, in whichever order the writes of several senders or returns end."""
        mailbox = await Mailbox.load(MemoryDriver(), Pending())
        letters = [mailbox.write(MailboxMessage(f"m-{n}", "a", encode_value(n), 0), remember=False) for n in range(3)]
        letters.insert(0, mailbox.put_back(MailboxMessage("m-back", "a", encode_value(None), 0), None))
        for index in order:
            mailbox.offer(letters[index])
        assert mailbox.take(["a"], 9) == letters

    async def test_a_return_that_faulty_code_recorded_is_not_written_but_arriving_mail_is(self) -> None:
        """S27: the history of a fault's run is dropped, and so is the return of a message that stays recorded as read."""
        driver, pending = MemoryDriver(), Pending()
        mailbox = await Mailbox.load(driver, pending)
        mailbox.offer(mailbox.write(MailboxMessage("m-0", "a", encode_value(0), 0), remember=False))
        await commit_batch(driver, pending.take())
        [letter] = mailbox.take(None, 1)
        await commit_batch(driver, pending.take())
        mailbox.put_back(letter.message, letter.sequence)
        mailbox.put_back(letter.message, None)
        arriving = mailbox.write(MailboxMessage("m-1", "a", encode_value(1), 0), remember=False)
        pending.keep_mail()
        await commit_batch(driver, pending.take())
        assert [key for key, _ in await driver.list(layout.MAILBOX_PREFIX)] == [layout.message_key(arriving.sequence)]
        mailbox.put_back(letter.message, letter.sequence)
        await commit_batch(driver, pending.take())
        assert len(await driver.list(layout.MAILBOX_PREFIX)) == 2

    async def test_a_sequence_is_never_used_again_even_when_the_mailbox_was_empty(self) -> None:
        driver = MemoryDriver()
        for expected in range(3):
            pending = Pending()
            mailbox = await Mailbox.load(driver, pending)
            letter = mailbox.write(MailboxMessage(f"m-{expected}", "a", encode_value(1), 0), remember=False)
            assert letter.sequence == expected
            mailbox.offer(letter)
            assert mailbox.take(None, 1) == [letter]
            await commit_batch(driver, pending.take())
            assert await driver.list(layout.MAILBOX_PREFIX) == []
