"""What senders may count on, whatever happens to the workflow: order, no loss, no repetition, and bodies up to the limit."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from disks import Disk
from harness import DriverKind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import SupervisorClosedError
from perdure.storage import DriverClosedError, EncodeError, StorageError
from perdure.storage.driver import VALUE_BYTES_MAX
from perdure.testing import run_virtual, schedule_seeds
from perdure.workflow import Break, Context, Continue, WorkflowHandle, WorkflowState, workflow
from perdure.workflow.activation import USER_OVERHEAD_BYTES

NAMES = ("a", "b")
BODY_BYTES_MAX = VALUE_BYTES_MAX - USER_OVERHEAD_BYTES


@workflow(name="collector", mailbox_limit=4)
async def collector(ctx: Context, count: int) -> list[Any]:
    """Reads in turns from any name and from one, until it has as many as it is told."""

    async def body(ctx: Context, state: dict[str, Any]) -> Continue[dict[str, Any]] | Break[list[Any]]:
        turn = state["turn"]
        names = None if turn % 3 else [NAMES[turn % 2]]
        messages = await ctx.queue.next_batch("read", names=names, count=1 + turn % 2, timeout=5)
        got = [*state["got"], *[[message.name, *message.body] for message in messages]]
        return Continue({"turn": turn + 1, "got": got}) if len(got) < count else Break(got)

    return await ctx.loop("all", body, {"turn": 0, "got": []}, history_prune_interval=3)


class Sender:
    """One sender of numbered messages; it sends the next once it knows that the one before arrived."""

    def __init__(self, number: int, total: int) -> None:
        self.number = number
        self.total = total
        self.acknowledged = 0

    async def run(self, handle: WorkflowHandle, disk: Disk) -> None:
        while self.acknowledged < self.total:
            index = self.acknowledged
            body = [self.number, index]
            try:
                await handle.message(NAMES[self.number % 2], body, id=f"s{self.number}-{index}")
                disk.store.check()
            except (StorageError, DriverClosedError, SupervisorClosedError):
                return  # the process has died, or leaves: another one sends it again
            self.acknowledged += 1


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    senders=st.integers(1, 5),
    each=st.integers(1, 4),
    acts=st.lists(st.sampled_from(["evict", "wake", "pause", "leave", "die"]), max_size=8),
    seed=schedule_seeds(),
)
@pytest.mark.parametrize("driver_kind", ["memory", "sqlite"])
def test_each_senders_messages_of_a_name_are_read_once_and_in_order(
    senders: int,
    each: int,
    acts: list[str],
    seed: int,
    driver_kind: DriverKind,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """S26, S27, S39, S45, S48: many senders, a small mailbox, evictions, restarts and deaths at any time."""

    async def main() -> None:
        disk = Disk(driver_kind, tmp_path_factory.mktemp("disk"))
        crowd = [Sender(number, each) for number in range(senders)]
        total = senders * each
        for act in [*acts, "end"]:
            async with disk.process(collector) as supervisor, trio.open_nursery() as nursery:
                handle = await supervisor.spawn(collector, "c-1", total)
                for sender in crowd:
                    nursery.start_soon(sender.run, handle, disk)
                if act == "end":
                    result = await handle.result()
                    continue
                await trio.sleep(0.01 * len(acts))
                match act:
                    case "evict":
                        await handle.evict()
                    case "wake":
                        await handle.wake()
                    case "pause":
                        await trio.sleep(7)
                    case "die":
                        disk.die()
                    case _:
                        pass
                nursery.cancel_scope.cancel()
        assert sorted(map(tuple, result)) == sorted(
            (NAMES[number % 2], number, index) for number in range(senders) for index in range(each)
        ), "each once"
        for number in range(senders):
            assert [index for _, sender, index in result if sender == number] == list(range(each)), "in order"

    run_virtual(main, seed=seed)


@workflow(name="keeper")
async def keeper(ctx: Context, input: None) -> int:
    first = await ctx.queue.next("first", completable=True)
    await first.complete(first.body)
    await ctx.queue.next("gate", names=["gate"])
    return len(first.body)


def largest_body() -> str:
    """Text whose stored form has just as many bytes as a body may have; five of them say how many there are."""
    return "x" * (BODY_BYTES_MAX - 5)


async def test_a_body_and_a_reply_of_the_largest_size_go_all_the_way_and_one_byte_more_is_refused(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S9, S28: 995,328 bytes as stored (972 KiB): sent, read, replayed, replied, and read again in another process."""
    body = largest_body()
    assert BODY_BYTES_MAX == 972 * 1024
    async with disk.process(keeper) as supervisor:
        handle = await supervisor.spawn(keeper, "k-1")
        for send in (handle.message, handle.message_nowait):
            with pytest.raises(EncodeError, match="the body of message 'big'") as caught:
                await send("big", body + "x")
            assert f"takes {BODY_BYTES_MAX + 1} bytes, over the limit of {BODY_BYTES_MAX}" in str(caught.value)
        assert await handle.undelivered() == ()
        await wait_all_tasks_blocked()
        assert await handle.get_state() is WorkflowState.SLEEPING, "a refused message changes nothing"
        assert await handle.request("n" * 512, body, timeout=60, id="i" * 512) == body
        await handle.evict()
    async with disk.process(keeper) as supervisor:
        handle = await supervisor.get("k-1")
        assert await handle.request("n" * 512, timeout=60, id="i" * 512) == body
        await handle.message("left over", body)
        await handle.message("gate")
        assert await handle.result() == len(body)
        [left] = await handle.undelivered()
        assert left.body == body
