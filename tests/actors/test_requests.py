"""Requests: the reply reaches whoever asked, once, over timeouts, evictions and the death of either side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import SupervisorClosedError, WorkflowNotFoundError
from perdure.storage import EncodeError, StorageError, layout
from perdure.workflow import (
    Break,
    Context,
    Continue,
    InvalidArgumentError,
    Message,
    NotARequestError,
    RaceResult,
    RequestTimeoutError,
    RequestUnansweredError,
    ValueTypeError,
    WorkflowEndedError,
    WorkflowHandle,
    WorkflowState,
    workflow,
)
from perdure.workflow.requests import REPLIES_MAX

WHENS: tuple[When, ...] = ("before", "after")
effects: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()


async def square(number: int) -> int:
    effects.append(number)
    return number * number


@workflow(name="agent")
async def agent(ctx: Context, count: int) -> str:
    """Squares `count` numbers, each in a step, one request after the other."""

    async def body(ctx: Context, done: int) -> Continue[int] | Break[None]:
        message = await ctx.queue.next("request", names=["square"], completable=True)
        await message.complete(await ctx.step("square", square, message.body))
        return Continue(done + 1) if done + 1 < count else Break(None)

    await ctx.loop("requests", body, 0, history_prune_interval=3)
    return "done"


@workflow(name="slow")
async def slow(ctx: Context, seconds: float) -> None:
    message = await ctx.queue.next("request", completable=True)
    await ctx.sleep("think", seconds)
    await message.complete("at last")
    await ctx.queue.next("gate", names=["gate"])


def records(disk: Disk, workflow_id: str = "a-1") -> dict[str, int]:
    """How many requests are on record as open and as answered, how many replies, and how many messages."""
    keys = list(disk.namespaces[workflow_id])
    known = [layout.parse_request_key(key)[0] for key in keys if key.startswith(layout.REQUEST_PREFIX)]
    replies = sum(key.startswith(layout.REPLIES_PREFIX) for key in keys) - len(known)
    waiting = sum(key.startswith(layout.MAILBOX_PREFIX) for key in keys)
    return {"open": known.count(False), "answered": known.count(True), "replies": replies, "waiting": waiting}


class TestReply:
    async def test_it_reaches_who_asked_and_is_the_same_when_asked_again(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S28: also after a restart of everything, and after the workflow's end; the work is done once."""
        async with disk.process(agent) as supervisor:
            handle = await supervisor.spawn(agent, "a-1", 5)
            assert await handle.request("square", 3, timeout=10) == 9
            assert await handle.request("square", 4, timeout=10, id="r-4") == 16
            assert await handle.request("square", 4, timeout=10, id="r-4") == 16
            await handle.evict()
            assert await handle.request("another name", "ignored", timeout=10, id="r-4") == 16
        async with disk.process(agent) as supervisor:
            handle = await supervisor.get("a-1")
            assert await handle.request("square", 4, timeout=10, id="r-4") == 16
            for number in (5, 6, 7):
                assert await handle.request("square", number, timeout=10) == number * number
            assert await handle.result() == "done"
            assert await handle.request("square", 4, timeout=10, id="r-4") == 16
            with pytest.raises(WorkflowEndedError):
                await handle.request("square", 8, timeout=10)
        assert effects == [3, 4, 5, 6, 7]
        assert records(disk) == {"open": 0, "answered": 5, "replies": 5, "waiting": 0}

    @pytest.mark.parametrize("by", ["nothing", "eviction", "restart", "death"])
    async def test_after_a_timeout_the_same_id_waits_for_the_same_request(
        self, by: str, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S28: in the mailbox, or read and not completed yet, with the workflow live or gone in between."""
        async with disk.process(slow) as supervisor:
            handle = await supervisor.spawn(slow, "a-1", 100)
            with pytest.raises(RequestTimeoutError) as caught:
                await handle.request("think", "hard", timeout=10)
            error = caught.value
            assert (error.workflow_id, error.name, error.timeout) == ("a-1", "think", 10)
            assert f"id={error.request_id!r}" in str(error)
            assert records(disk)["open"] == 1
            if by == "eviction":
                await handle.evict()
            if by in ("nothing", "eviction"):
                began = trio.current_time()
                assert await handle.request("think", "hard", timeout=200, id=error.request_id) == "at last"
                assert trio.current_time() - began == pytest.approx(90, abs=1)
            if by == "death":
                disk.die()
        if by in ("restart", "death"):
            async with disk.process(slow) as supervisor:
                handle = await supervisor.get("a-1")
                assert await handle.request("think", "hard", timeout=200, id=error.request_id) == "at last"
                read = [entry.path for entry in await handle.history() if entry.kind == "message"]
                assert sorted(read) == [("request:0",), ("request:count",)], "it was delivered once"
        assert records(disk) == {"open": 0, "answered": 1, "replies": 1, "waiting": 0}

    @pytest.mark.parametrize("reply", [None, 0, "", [], {"a": [1, None]}, b"bytes", 2**70])
    async def test_any_value_comes_back_as_a_step_would_give_it(
        self, reply: Any, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S8: `None` is a reply as well, and is not taken for none."""

        @workflow(name="echo")
        async def echo(ctx: Context, input: None) -> None:
            await (await ctx.queue.next("request", completable=True)).complete(reply)
            await ctx.queue.next("gate", names=["gate"])

        async with disk.process(echo) as supervisor:
            handle = await supervisor.spawn(echo, "a-1")
            for _ in range(2):
                got = await handle.request("ask", timeout=10, id="r-1")
                assert (type(got), got) == (type(reply), reply)

    async def test_it_is_typed_by_what_is_asked_for(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S8: a dataclass is sent as plain data, and made again; a misfit names the place, and the reply is kept."""

        @dataclass
        class Answer:
            text: str
            sure: float

        @workflow(name="oracle")
        async def oracle(ctx: Context, input: None) -> None:
            await (await ctx.queue.next("request", completable=True)).complete(Answer("42", 0.5))
            await ctx.queue.next("gate", names=["gate"])

        async with disk.process(oracle) as supervisor:
            handle = await supervisor.spawn(oracle, "a-1")
            assert await handle.request("ask", timeout=10, id="r-1", reply_type=Answer) == Answer("42", 0.5)
            assert await handle.request("ask", timeout=10, id="r-1") == {"text": "42", "sure": 0.5}
            with pytest.raises(ValueTypeError, match="the reply to request 'ask'") as caught:
                await handle.request("ask", timeout=10, id="r-1", reply_type=list[int])
            assert caught.value.path == "reply"
            with pytest.raises(InvalidArgumentError):
                await handle.request("ask", timeout=10, id="r-1", reply_type=3)  # type: ignore[call-overload]

    async def test_many_ask_at_once_and_each_gets_its_own(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S28: also several with one id."""
        async with disk.process(agent, mailbox_limit=5) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(agent, "a-1", 40)
            replies: dict[int, list[int]] = {}

            async def ask(number: int) -> None:
                reply = await handle.request("square", number, timeout=60, id=f"r-{number}")
                replies.setdefault(number, []).append(reply)

            for number in range(40):
                for _ in range(1 + number % 3):
                    nursery.start_soon(ask, number)
            assert await handle.result() == "done"
            await wait_all_tasks_blocked()
            assert replies == {number: [number * number] * (1 + number % 3) for number in range(40)}
        assert sorted(effects) == list(range(40))


class TestCompletion:
    @pytest.mark.parametrize("where", ["code", "step", "join", "race", "try block"])
    async def test_wherever_it_is_completed(self, where: str, disk: Disk, autojump_clock: MockClock) -> None:
        """S28: in the workflow's code, in steps, in branches and try blocks."""

        async def handle_it(ctx: Context) -> str:
            message = await ctx.queue.next("request", completable=True)

            async def in_step() -> str:
                await message.complete("pong")
                return "did"

            match where:
                case "step":
                    return await ctx.step("work", in_step)
                case _:
                    await message.complete("pong")
                    return "did"

        async def never(ctx: Context) -> None:
            await ctx.sleep("never", 10**6)

        @workflow(name="ponger")
        async def ponger(ctx: Context, input: None) -> Any:
            result: Any
            match where:
                case "join":
                    result = (await ctx.join("both", {"a": handle_it, "b": nap}))["a"]
                case "race":
                    raced: RaceResult[Any] = await ctx.race("first", {"a": handle_it, "b": never})
                    result = raced.value
                case "try block":
                    result = (await ctx.try_block("try", handle_it)).value  # type: ignore[union-attr]
                case _:
                    result = await handle_it(ctx)
            await ctx.queue.next("gate", names=["gate"])
            return result

        async def nap(ctx: Context) -> None:
            await ctx.sleep("nap", 5)

        async with disk.process(ponger) as supervisor:
            handle = await supervisor.spawn(ponger, "a-1")
            assert await handle.request("ping", timeout=30, id="r-1") == "pong"
            await handle.evict()
            assert await handle.request("ping", timeout=30, id="r-1") == "pong"
            await handle.message("gate")
            assert await handle.result() == "did"

    async def test_what_a_races_loser_gives_back_is_answered_by_who_reads_it_next(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S28, S29: it was read and not completed, so it is as if it was not read."""

        async def loser(ctx: Context) -> None:
            await ctx.queue.next("request", names=["ask"], completable=True)
            await ctx.sleep("long", 100)

        async def winner(ctx: Context) -> None:
            await ctx.sleep("short", 10)

        @workflow(name="racer")
        async def racer(ctx: Context, input: None) -> None:
            await ctx.race("race", {"loser": loser, "winner": winner})
            await ctx.sleep("pause", 10)
            await (await ctx.queue.next("request", completable=True)).complete("second")

        async with disk.process(racer) as supervisor:
            handle = await supervisor.spawn(racer, "a-1")
            assert await handle.request("ask", timeout=60, id="r-1") == "second"
        assert records(disk) == {"open": 0, "answered": 1, "replies": 1, "waiting": 0}

    async def test_a_reply_to_a_plain_message_is_harmless(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S28: nobody waits for it, so nothing is kept of it."""

        @workflow(name="echo")
        async def echo(ctx: Context, input: None) -> str:
            await (await ctx.queue.next("one", completable=True)).complete("reply")
            await (await ctx.queue.next("two", completable=True)).complete(object())
            return "done"

        async with disk.process(echo) as supervisor:
            handle = await supervisor.spawn(echo, "a-1")
            await handle.message("ask", 1, id="m-1")
            await handle.message("ask", 2)
            assert await handle.result() == "done"
        assert records(disk) == {"open": 0, "answered": 0, "replies": 0, "waiting": 0}

    async def test_a_reply_that_cannot_be_stored_is_told_to_the_code_and_another_may_follow(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S9: the message is not completed by it; the same on a replay."""
        caught: list[str] = []

        @workflow(name="careless")
        async def careless(ctx: Context, input: None) -> None:
            message = await ctx.queue.next("request", completable=True)
            try:
                await message.complete(object())
            except EncodeError as error:
                caught.append(str(error))
            await ctx.sleep("pause", 5)
            await message.complete("good")

        async with disk.process(careless) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(careless, "a-1")

            async def ask() -> None:
                assert await handle.request("ask", timeout=30, id="r-1") == "good"
                nursery.cancel_scope.cancel()

            nursery.start_soon(ask)
            await trio.sleep(1)
            await handle.evict()
            await handle.wake()
            await trio.sleep_forever()
        assert len(caught) == 2
        assert "the reply to message 'r-1'" in caught[0]


class TestRefusal:
    async def test_an_id_that_was_a_plain_messages_is_refused_and_the_other_way_round_nothing_is_delivered(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S28, S27: nobody would ever reply."""
        async with disk.process(slow) as supervisor:
            handle = await supervisor.spawn(slow, "a-1", 50)
            await handle.message("first", id="m-1")
            with pytest.raises(NotARequestError, match="ask with another id") as caught:
                await handle.request("first", timeout=10, id="m-1")
            assert (caught.value.workflow_id, caught.value.request_id) == ("a-1", "m-1")
            with pytest.raises(RequestTimeoutError):
                await handle.request("second", timeout=1, id="r-1")
            await handle.message("second", id="r-1")
            await handle.message_nowait("second", id="r-1")
            assert [message.id for message in await handle.undelivered()] == ["r-1"]

    @pytest.mark.parametrize("how", ["completed", "failed", "cancelled", "cancelled dormant"])
    async def test_a_workflow_that_ends_without_completing_it_is_told_at_once_and_ever_after(
        self, how: str, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S28, S45: in the mailbox, or read; now and in the next process."""

        @workflow(name="ignorant")
        async def ignorant(ctx: Context, input: str) -> None:
            await ctx.queue.next("read", completable=True)
            await ctx.sleep("pause", 20)
            if input == "failed":
                raise ValueError("no")

        async with disk.process(ignorant) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(ignorant, "a-1", how)
            told: list[RequestUnansweredError] = []

            async def ask(request_id: str) -> None:
                with pytest.raises(RequestUnansweredError, match="has not completed the request") as caught:
                    await handle.request("ask", timeout=None, id=request_id)
                told.append(caught.value)

            for request_id in ("r-1", "r-2", "r-2"):
                nursery.start_soon(ask, request_id)
            await trio.sleep(1)
            if how == "cancelled dormant":
                await handle.evict()
            if how.startswith("cancelled"):
                await handle.cancel()
        state = how.split(maxsplit=1)[0]
        assert sorted(error.request_id for error in told) == ["r-1", "r-2", "r-2"]
        assert {(error.workflow_id, error.state) for error in told} == {("a-1", state)}
        async with disk.process(ignorant) as supervisor:
            handle = await supervisor.get("a-1")
            with pytest.raises(RequestUnansweredError):
                await handle.request("ask", timeout=10, id="r-1")
            assert len(await handle.undelivered()) == 1

    async def test_whoever_waits_as_the_supervisor_leaves_is_told_to_ask_again(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S28, S49."""
        async with trio.open_nursery() as nursery:

            async def ask(handle: WorkflowHandle) -> None:
                with pytest.raises(SupervisorClosedError, match="ask again with the same id"):
                    await handle.request("think", timeout=None, id="r-1")

            async with disk.process(slow) as supervisor:
                handle = await supervisor.spawn(slow, "a-1", 100)
                nursery.start_soon(ask, handle)
                await trio.sleep(1)
        async with disk.process(slow) as supervisor:
            assert await (await supervisor.get("a-1")).request("think", timeout=None, id="r-1") == "at last"

    async def test_a_deleted_workflow_is_not_found(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S52: whoever waits is told as soon as somebody looks."""
        async with disk.process(slow) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(slow, "a-1", 100)

            async def ask() -> None:
                with pytest.raises(WorkflowNotFoundError):
                    await handle.request("think", timeout=None)
                nursery.cancel_scope.cancel()

            nursery.start_soon(ask)
            await trio.sleep(1)
            await handle.evict()
            await disk.store.delete("a-1")
            with pytest.raises(WorkflowNotFoundError):
                await handle.wake()
            await trio.sleep_forever()

    @pytest.mark.parametrize("timeout", [-1, "3", float("nan"), float("inf"), True])
    async def test_a_timeout_that_is_none_is_refused(self, timeout: Any, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(slow) as supervisor:
            handle = await supervisor.spawn(slow, "a-1", 1)
            with pytest.raises(InvalidArgumentError, match="timeout"):
                await handle.request("ask", timeout=timeout)
            assert records(disk)["waiting"] == 0


class TestBounds:
    async def test_the_last_thousand_replies_are_kept_and_no_more(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S28: bounded, the oldest go first, also over a restart in between."""
        extra = 7
        count = REPLIES_MAX + extra

        @workflow(name="batches")
        async def batches(ctx: Context, input: int) -> None:
            done = 0
            number = 0
            while done < input:
                for message in await ctx.queue.next_batch(f"read-{number}", count=100, completable=True):
                    await message.complete(message.body)
                    done += 1
                number += 1

        async def ask_all(handle: WorkflowHandle, numbers: range) -> None:
            for number in numbers:
                assert await handle.request("ask", number, timeout=60, id=f"r-{number}") == number

        async with disk.process(batches) as supervisor:
            handle = await supervisor.spawn(batches, "a-1", count)
            await ask_all(handle, range(count // 2))
        async with disk.process(batches) as supervisor:
            handle = await supervisor.get("a-1")
            await ask_all(handle, range(count // 2, count))
            await handle.result()
            assert records(disk) == {"open": 0, "answered": REPLIES_MAX, "replies": REPLIES_MAX, "waiting": 0}
            assert await handle.request("ask", timeout=60, id=f"r-{extra}") == extra
            with pytest.raises(WorkflowEndedError):
                await handle.request("ask", timeout=60, id=f"r-{extra - 1}")

    async def test_what_is_read_and_never_completed_is_forgotten_in_the_end(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S28: open requests are bounded by what waits and a thousand more."""

        @workflow(name="rude")
        async def rude(ctx: Context, input: None) -> None:
            async def body(ctx: Context, state: int) -> Continue[int]:
                await ctx.queue.next_batch("read", count=1000, completable=True)
                return Continue(state + 1)

            await ctx.loop("reads", body, 0, history_prune_interval=1, history_size=0)

        async with disk.process(rude) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(rude, "a-1")
            for number in range(REPLIES_MAX + 50):
                nursery.start_soon(_ask_in_vain, handle, f"r-{number}")
            await trio.sleep(5)
            nursery.start_soon(_ask_in_vain, handle, "one-more")
            await trio.sleep(5)
            assert records(disk) == {"open": REPLIES_MAX + 1, "answered": 0, "replies": 0, "waiting": 0}
            nursery.cancel_scope.cancel()


async def _ask_in_vain(handle: WorkflowHandle, request_id: str) -> None:
    await handle.request("ask", timeout=None, id=request_id)


async def test_undelivered_mail_is_seen_without_activating_anything(disk: Disk, autojump_clock: MockClock) -> None:
    """S45: what waits, and what was left over at the end, oldest first, for whoever handles dead letters."""

    @workflow(name="picky")
    async def picky(ctx: Context, input: None) -> None:
        effects.append("run")
        await ctx.queue.next("gate", names=["gate"])

    async with disk.process(picky) as supervisor:
        handle = await supervisor.spawn(picky, "a-1")
        assert await handle.undelivered() == ()
        await handle.message("order", {"sku": 7}, id="m-1")
        await handle.message("other", [1, 2])
        await handle.message("order", None, id="m-3")
        await wait_all_tasks_blocked()  # it waits for another message
        await handle.evict()
        before, opens = dict(disk.namespaces["a-1"]), len(disk.store.opens)
        effects.clear()
        first, second, third = await handle.undelivered()
        assert (first, (second.name, second.body), third.id) == (
            Message("m-1", "order", {"sku": 7}, first.created_at),
            ("other", [1, 2]),
            "m-3",
        )
        assert (effects, disk.namespaces["a-1"], len(disk.store.opens)) == ([], before, opens + 1)
        await handle.message("gate")
        await handle.result()
        assert [message.id for message in await handle.undelivered()] == ["m-1", second.id, "m-3"]
    async with disk.process() as supervisor:  # not even its code is there
        handle = await supervisor.get("a-1")
        assert await handle.undelivered() == (first, second, third)
        assert await handle.get_state() is WorkflowState.COMPLETED


class Life:
    """Askers that are told replies, over any number of processes."""

    COUNT = 3

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.replies: dict[int, set[Any]] = {}
        self.result: Any = None

    async def live(self) -> None:
        async with self.disk.process(agent, mailbox_limit=2) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(agent, "a-1", self.COUNT)
            for number in range(self.COUNT):
                nursery.start_soon(self._ask, handle, number)
            await trio.sleep(100)
            self.disk.store.check()
            self.result = await handle.result()

    async def _ask(self, handle: WorkflowHandle, number: int) -> None:
        reply = await handle.request("square", number, timeout=50, id=f"r-{number}")
        self.disk.store.check()
        self.replies.setdefault(number, set()).add(reply)

    def check(self, *, deaths: int) -> None:
        assert self.result == "done"
        assert self.replies == {number: {number * number} for number in range(self.COUNT)}
        assert records(self.disk) == {"open": 0, "answered": self.COUNT, "replies": self.COUNT, "waiting": 0}
        assert Counter(effects).keys() == set(range(self.COUNT))
        assert len(effects) <= self.COUNT + deaths, "a death repeats one effect at most"


@pytest.fixture
def make_disk(driver_kind: DriverKind, tmp_path: Path) -> Callable[[], Disk]:
    """Makes empty disks."""
    made: list[Disk] = []

    def make() -> Disk:
        made.append(Disk(driver_kind, tmp_path / str(len(made))))
        return made[-1]

    return make


async def test_a_death_at_every_write_leaves_each_asker_its_one_reply(
    make_disk: Callable[[], Disk], autojump_clock: MockClock
) -> None:
    """S28, S39: before and after every write, askers ask again with their ids; explored equals counted."""
    life = Life(make_disk())
    with scheduled(1):
        await life.live()
    life.check(deaths=0)
    counted, explored = len(life.disk.store.written), 0
    assert counted >= 12
    for number in range(counted):
        for when in WHENS:
            effects.clear()
            life = Life(make_disk())
            life.disk.store.die_at = (number, when)
            try:
                with scheduled(1):
                    await life.live()
            except* (StorageError, SupervisorClosedError, RequestTimeoutError):
                pass
            assert life.disk.lives == 1, f"it did not die {when} write {number}"
            await life.live()
            life.check(deaths=1)
            explored += 1
    assert explored == 2 * counted, "explored equals counted"
