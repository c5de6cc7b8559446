"""The queue of activations: fair, and bounded for what is recovered (S46, S47)."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors.dispatch import AT_ONCE, Dispatcher
from perdure.actors.slots import Place, Slots


class Bench:
    """A dispatcher with workflows that run for a second each."""

    def __init__(self, max_live: int) -> None:
        self.slots = Slots(max_live)
        self.begun: list[str] = []
        self.asked_for_room: list[int] = []
        self.dispatcher = Dispatcher(self.slots, self.asked_for_room.append, self._activate)

    async def _activate(self, workflow_id: str, place: Place) -> None:
        self.begun.append(workflow_id)
        await trio.sleep(1)
        place.give_back()


class TestOrder:
    async def test_first_come_first_served_by_turns_between_new_and_recovered(self, autojump_clock: MockClock) -> None:
        bench = Bench(1)
        for number in range(3):
            bench.dispatcher.want(f"new-{number}")
        for number in range(5):
            await bench.dispatcher.recover(f"old-{number}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.dispatcher.run, nursery)
            await trio.sleep(20)
            nursery.cancel_scope.cancel()
        assert bench.begun == ["new-0", "old-0", "new-1", "old-1", "new-2", "old-2", "old-3", "old-4"]

    async def test_what_is_queued_is_queued_once(self, autojump_clock: MockClock) -> None:
        bench = Bench(1)
        for _ in range(3):
            bench.dispatcher.want("w-1")
            await bench.dispatcher.recover("w-1")
        assert len(bench.dispatcher) == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.dispatcher.run, nursery)
            await trio.sleep(5)
            assert bench.begun == ["w-1"]
            bench.dispatcher.want("w-1")
            await trio.sleep(5)
            assert bench.begun == ["w-1", "w-1"], "once it was begun it may be wanted again"
            nursery.cancel_scope.cancel()

    async def test_new_work_is_not_behind_what_is_recovered(self, autojump_clock: MockClock) -> None:
        """S46: ten thousand that are due at the start do not hold up a message."""
        bench = Bench(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.dispatcher.run, nursery)

            async def recover() -> None:
                for number in range(10_000):
                    await bench.dispatcher.recover(f"old-{number}")

            nursery.start_soon(recover)
            await trio.sleep(100.5)
            bench.dispatcher.want("new")
            await trio.sleep(2)
            assert "new" in bench.begun
            assert len(bench.dispatcher) <= 32, "the rest is still in the catalog"
            nursery.cancel_scope.cancel()


class TestPlaces:
    async def test_a_few_are_activated_at_a_time(self, autojump_clock: MockClock) -> None:
        bench = Bench(1000)
        for number in range(100):
            bench.dispatcher.want(f"w-{number}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.dispatcher.run, nursery)
            await wait_all_tasks_blocked()
            assert len(bench.begun) == AT_ONCE
            await trio.sleep(1.5)
            assert len(bench.begun) == 2 * AT_ONCE
            nursery.cancel_scope.cancel()

    async def test_idle_workflows_are_asked_to_leave_only_when_no_place_is_free(
        self, autojump_clock: MockClock
    ) -> None:
        bench = Bench(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.dispatcher.run, nursery)
            for number in range(2):
                bench.dispatcher.want(f"w-{number}")
            await wait_all_tasks_blocked()
            assert bench.asked_for_room == []
            for number in range(3):
                bench.dispatcher.want(f"x-{number}")
            await wait_all_tasks_blocked()
            assert bench.asked_for_room
            assert max(bench.asked_for_room) <= 3
            nursery.cancel_scope.cancel()
