"""Blocking work that is done for all who wait for it, round after round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from harness import scheduled
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.storage import rounds as rounds_module
from perdure.storage.rounds import Rounds


class Crew:
    """Stands where the threads stood: a round is over when the test says so, or after a few turns of the scheduler."""

    def __init__(self, *, turns: int | None = None) -> None:
        self.work: Callable[[], None] | None = None
        self._then: Callable[[BaseException | None], None] | None = None
        self._turns = turns
        self._token = trio.lowlevel.current_trio_token()

    def start(self, work: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        assert self.work is None, "two rounds at a time"
        self.work, self._then = work, then
        if self._turns is not None:
            self._token.run_sync_soon(self._pass, self._turns)

    def finish(self, error: BaseException | None = None) -> None:
        """The round in progress is over, or fails."""
        assert self.work is not None
        assert self._then is not None
        work, self.work = self.work, None
        if error is None:
            work()
        self._then(error)

    def _pass(self, turns: int) -> None:
        if turns:
            self._token.run_sync_soon(self._pass, turns - 1)
        else:
            self.finish()


class Parts:
    """Numbered parts of some work.

    Attributes:
        rounds: How many parts were asked for when each round began.
        done: Up to which they are done.
        failed: Up to which those that were not done by then have failed.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.done = 0
        self.failed = 0
        self.rounds: list[int] = []
        self.of = Rounds(trio.CapacityLimiter(1), self._begin, self._end)

    def _begin(self) -> Callable[[], None]:
        target = self.asked
        self.rounds.append(target)

        def work() -> None:
            self.done = max(self.done, target)

        return work

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.failed = self.rounds[-1]

    async def ask(self) -> None:
        """Ask for one more, and wait for it."""
        self.asked += 1
        mine = self.asked

        def is_done() -> bool:
            if self.done < mine <= self.failed:
                raise OSError
            return self.done >= mine

        await self.of.wait(is_done)
        assert self.done >= mine


@pytest.fixture
async def crew(monkeypatch: pytest.MonkeyPatch) -> Crew:
    made = Crew()
    monkeypatch.setattr(rounds_module, "crew_of", lambda _: made)
    return made


async def test_a_round_is_done_in_a_thread():
    threads: list[int] = []

    def work() -> None:
        threads.append(threading.get_ident())

    rounds = Rounds(trio.CapacityLimiter(1), lambda: work, lambda error: None)
    await rounds.wait(lambda: bool(threads))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert not rounds.is_busy


async def test_those_who_come_during_a_round_share_the_next(crew):
    """Three rounds for twenty-one parts, of which ten were asked for during the first and ten during the second."""
    parts = Parts()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.ask)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            assert parts.of.is_busy
            for _ in range(10):
                nursery.start_soon(parts.ask)
            await trio.testing.wait_all_tasks_blocked()
            crew.finish()
            await trio.testing.wait_all_tasks_blocked()
        crew.finish()
    assert parts.rounds == [1, 11, 21]
    assert not parts.of.is_busy


async def test_the_next_round_begins_before_those_who_are_done_go_on(crew):
    """The disk works while they do; what they ask for then is for the round after that."""
    parts = Parts()
    begun: list[int] = []

    async def ask() -> None:
        await parts.ask()
        begun.append(len(parts.rounds))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
        crew.finish()
        assert parts.rounds == [1, 2]
        assert begun == []
        await trio.testing.wait_all_tasks_blocked()
        assert begun == [2]
        crew.finish()


async def test_whose_part_is_done_waits_for_nothing(crew):
    parts = Parts()
    with trio.testing.assert_no_checkpoints():
        await parts.of.wait(lambda: True)
    assert parts.rounds == []


async def test_a_failed_round_fails_those_it_took_in_and_the_others_have_the_next(crew):
    """Whatever the error was, no thread to be had for instance: what it means for one's part `is_done` says."""
    parts = Parts()
    outcomes: list[str] = []

    async def ask(name: str) -> None:
        try:
            await parts.ask()
        except OSError:
            outcomes.append(f"{name} failed")
        else:
            outcomes.append(f"{name} done")

    async with trio.open_nursery() as nursery:
        for name in ("first", "second"):
            nursery.start_soon(ask, name)
            await trio.testing.wait_all_tasks_blocked()
        crew.finish(RuntimeError("can't start new thread"))
        await trio.testing.wait_all_tasks_blocked()
        assert outcomes == ["first failed"]
        crew.finish()
    assert outcomes == ["first failed", "second done"]


async def test_a_round_that_cannot_begin_is_over_with_that_error(crew, monkeypatch):
    """No memory, say. Who asked for it, or waited for it, is told; what it took up has failed, and the next begins anew."""
    parts = Parts()
    outcomes: list[str] = []

    async def ask(name: str) -> None:
        try:
            await parts.ask()
        except MemoryError:
            outcomes.append(f"{name} failed")
        else:
            outcomes.append(f"{name} done")

    def fail(*arguments: object) -> None:
        raise MemoryError

    async with trio.open_nursery() as nursery:
        with monkeypatch.context() as patched:
            patched.setattr(crew, "start", fail)
            await ask("first")
            assert parts.failed == 1
        nursery.start_soon(ask, "second")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, "third")
        await trio.testing.wait_all_tasks_blocked()
        with monkeypatch.context() as patched:
            patched.setattr(crew, "start", fail)
            crew.finish()
        await trio.testing.wait_all_tasks_blocked()
        assert parts.failed == 3
        nursery.start_soon(ask, "fourth")
        await trio.testing.wait_all_tasks_blocked()
        crew.finish()
    assert outcomes[0] == "first failed"
    assert sorted(outcomes[1:3]) == ["second done", "third failed"]
    assert outcomes[3] == "fourth done"
    assert not parts.of.is_busy


async def test_cancellation_does_not_interrupt_waiting(crew):
    """What was begun for one is carried through."""
    parts = Parts()
    done_before: list[int] = []
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(parts.ask)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        for _ in range(2):
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            done_before.append(parts.done)
            crew.finish()
    assert done_before == [0, 1]
    assert parts.done == 3


_events = st.lists(st.sampled_from(["ask", "ask", "pause", "by itself", "fail"]), min_size=1, max_size=6)


@given(seed=st.integers(0, 2**32 - 1), scripts=st.lists(_events, min_size=1, max_size=8), turns=st.integers(0, 3))
@settings(max_examples=200)
def test_nobody_is_left_waiting_whatever_the_schedule(seed, scripts, turns):
    """Also when parts are done between rounds, by a sync in place say, and when all that was asked for so far fails."""

    async def follow(script: list[Any], parts: Parts) -> None:
        for event in script:
            match event:
                case "ask":
                    with suppress(OSError):
                        await parts.ask()
                case "pause":
                    await trio.lowlevel.checkpoint()
                case "by itself":
                    if not parts.of.is_busy:
                        parts.done = parts.asked
                case _:
                    parts.failed = parts.asked

    async def main() -> None:
        crew = Crew(turns=turns)
        patched.setattr(rounds_module, "crew_of", lambda _: crew)
        parts = Parts()
        async with trio.open_nursery() as nursery:
            for script in scripts:
                nursery.start_soon(follow, script, parts)
        assert not parts.of.is_busy

    with scheduled(seed), pytest.MonkeyPatch.context() as patched:
        trio.run(main)
