"""The threads in which drivers commit."""

import itertools
import threading

import pytest
import trio
import trio.testing

from perdure.storage import crew as crew_module
from perdure.storage.crew import SLOW_S, THREADS_MAX, THREADS_QUICK, Crew, crew_of


class Bench:
    """Work that stays in its thread until it is let go."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.begun_now = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def work(self, number: int) -> int:
        self.begun.append(number)
        self.begun_now.release()
        assert self.may_end.acquire(timeout=10)
        return number

    async def until_begun(self, number: int) -> None:
        for _ in range(number):
            assert await trio.to_thread.run_sync(self.begun_now.acquire, True, 10)

    def let_go(self, number: int) -> None:
        for _ in range(number):
            self.may_end.release()


async def test_work_is_done_in_another_thread_and_its_result_returned():
    assert await Crew(trio.CapacityLimiter(1)).run(threading.get_ident) != threading.get_ident()


async def test_an_error_of_the_work_comes_out_as_it_was():
    error = KeyError("its own")

    def fail() -> None:
        raise error

    crew = Crew(trio.CapacityLimiter(1))
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            await crew.run(fail)
        assert caught.value is error
    assert await crew.run(lambda: 1) == 1


async def test_all_pieces_are_done_in_the_order_in_which_they_came():
    bench, results = Bench(), list[int]()
    limiter = trio.CapacityLimiter(1)
    crew = Crew(limiter)

    async def give(number: int) -> None:
        results.append(await crew.run(lambda: bench.work(number)))

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(give, number)
            await trio.testing.wait_all_tasks_blocked()
        await bench.until_begun(1)
        assert bench.begun == [0]
        bench.let_go(20)
    assert bench.begun == list(range(20))
    assert sorted(results) == list(range(20))
    await until_free(limiter)


@pytest.mark.parametrize(
    ("takes_s", "threads"), [(0.0001, THREADS_QUICK), (SLOW_S / 2, THREADS_QUICK), (SLOW_S * 2, THREADS_MAX)]
)
async def test_the_slower_the_disk_the_more_syncs_overlap(monkeypatch, takes_s, threads):
    """Also, no more pieces are in progress than that."""
    ticks = itertools.count()
    monkeypatch.setattr(crew_module, "perf_counter", lambda: next(ticks) * takes_s)
    bench = Bench()
    limiter = trio.CapacityLimiter(100)
    crew = Crew(limiter)
    for _ in range(20):
        await crew.run(lambda: None)
    async with trio.open_nursery() as nursery:
        for number in range(THREADS_MAX + 3):
            nursery.start_soon(crew.run, lambda number=number: bench.work(number))
        await bench.until_begun(threads)
        await trio.testing.wait_all_tasks_blocked()
        assert len(bench.begun) == threads
        assert limiter.borrowed_tokens == threads
        bench.let_go(THREADS_MAX + 3)
    await until_free(limiter)


async def test_cancelled_it_returns_the_outcome_all_the_same():
    """What a commit came to is always learned."""
    bench, results = Bench(), list[int]()
    crew = Crew(trio.CapacityLimiter(1))

    async def give(number: int) -> None:
        results.append(await crew.run(lambda: bench.work(number)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give, 1)
        nursery.start_soon(give, 2)  # waits for its turn
        await bench.until_begun(1)
        nursery.cancel_scope.cancel()
        bench.let_go(2)
    assert sorted(results) == [1, 2]


async def test_with_no_place_in_the_limiter_work_waits_for_one():
    limiter = trio.CapacityLimiter(1)
    crew = Crew(limiter)
    await limiter.acquire()
    done = trio.Event()

    async def give() -> None:
        await crew.run(lambda: None)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give)
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        limiter.release()
        await done.wait()


class Told:
    """What was told of work that nobody waits for, and in which thread."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []
        self.threads: set[int] = set()
        self.is_told = trio.Event()

    def then(self, error: BaseException | None) -> None:
        self.errors.append(error)
        self.threads.add(threading.get_ident())
        self.is_told.set()


@pytest.mark.parametrize("places", [0, 1])
async def test_work_that_is_started_is_done_in_a_thread_and_its_end_told_in_trios(places):
    """Once, with its error if there is one, also where it has to wait for a place in the limiter first."""
    for error in (None, KeyError("its own")):
        limiter = trio.CapacityLimiter(1)
        crew, told, threads = Crew(limiter), Told(), list[int]()

        def work(error: BaseException | None = error, threads: list[int] = threads) -> None:
            threads.append(threading.get_ident())
            if error is not None:
                raise error

        if not places:
            await limiter.acquire()
        with trio.testing.assert_no_checkpoints():
            crew.start(work, told.then)
        assert told.errors == []
        if not places:
            await trio.testing.wait_all_tasks_blocked()
            assert threads == []
            limiter.release()
        await told.is_told.wait()
        assert told.errors == [error]
        assert told.threads == {threading.get_ident()}
        assert len(threads) == 1
        assert threads[0] != threading.get_ident()
        await until_free(limiter)


async def test_what_is_told_may_start_more():
    """A round after a round, with nobody waiting in between."""
    limiter = trio.CapacityLimiter(1)
    crew, done = Crew(limiter), list[int]()
    all_done = trio.Event()

    def then(error: BaseException | None) -> None:
        assert error is None
        if len(done) < 20:
            crew.start(lambda: done.append(len(done)), then)
        else:
            all_done.set()

    crew.start(lambda: done.append(0), then)
    assert crew.is_busy
    with trio.fail_after(10):
        await all_done.wait()
    assert done == list(range(20))
    assert not crew.is_busy
    await until_free(limiter)


async def test_what_is_started_without_a_thread_to_be_had_is_told_of_the_error(monkeypatch):
    """Not at once, but as soon as Trio's thread comes to it: whoever starts it is not called while it does."""
    limiter = trio.CapacityLimiter(1)
    crew, told = Crew(limiter), Told()

    def no_thread(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(trio.lowlevel, "start_thread_soon", no_thread)
        crew.start(lambda: None, told.then)
        assert told.errors == []
        await told.is_told.wait()
    (error,) = told.errors
    assert isinstance(error, RuntimeError)
    assert limiter.borrowed_tokens == 0
    assert not crew.is_busy


@pytest.mark.parametrize("is_refused", [False, True])
async def test_what_comes_while_the_last_thread_leaves_is_done_or_fails(monkeypatch, is_refused):
    """A thread that found nothing more may have left when a piece comes, though Trio was not told of that yet."""
    limiter = trio.CapacityLimiter(1)
    crew = Crew(limiter)
    bench = Bench()
    has_left = threading.Event()
    tell_left = crew._tell_left
    start_thread = trio.lowlevel.start_thread_soon

    def leave(outcome: object) -> None:
        tell_left(outcome)
        has_left.set()

    def start(*arguments: object) -> None:
        if is_refused and has_left.is_set():
            raise RuntimeError("can't start new thread")
        start_thread(*arguments)

    monkeypatch.setattr(crew, "_tell_left", leave)
    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", start)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(crew.run, lambda: bench.work(1))
            await bench.until_begun(1)
            bench.let_go(1)
            assert has_left.wait(10)  # Trio's thread does not hear of it meanwhile
            if is_refused:
                with pytest.raises(RuntimeError, match="new thread"):
                    await crew.run(lambda: 2)
            else:
                assert await crew.run(lambda: 2) == 2
        await until_free(limiter)


async def test_without_a_thread_to_be_had_the_error_comes_out_and_nothing_is_kept(monkeypatch):
    limiter = trio.CapacityLimiter(1)
    crew = Crew(limiter)

    def no_thread(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(trio.lowlevel, "start_thread_soon", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await crew.run(lambda: None)
    assert limiter.borrowed_tokens == 0
    assert await crew.run(lambda: 1) == 1


def test_a_thread_may_leave_after_trio_has(monkeypatch):
    """What it would tell is of no interest then, and the limiter, which may serve another run, has all its places."""
    limiter_of = list[trio.CapacityLimiter]()
    may_leave = threading.Event()
    left = list[BaseException | None]()
    has_left = threading.Event()

    async def main() -> None:
        limiter_of.append(trio.CapacityLimiter(1))
        crew = Crew(limiter_of[0])
        tell_left = crew._tell_left

        def leave(outcome: object) -> None:
            may_leave.wait(10)
            try:
                tell_left(outcome)
                left.append(None)
            except BaseException as error:
                left.append(error)
            has_left.set()

        monkeypatch.setattr(crew, "_tell_left", leave)
        assert await crew.run(lambda: 1) == 1

    trio.run(main)
    may_leave.set()
    assert has_left.wait(10)
    assert left == [None]
    assert limiter_of[0].borrowed_tokens == 0


async def test_there_is_one_crew_for_each_limiter():
    limiter = trio.CapacityLimiter(1)
    assert crew_of(limiter) is crew_of(limiter)
    assert crew_of(limiter) is not crew_of(trio.CapacityLimiter(1))


async def until_free(limiter: trio.CapacityLimiter) -> None:
    with trio.fail_after(10):
        for _ in range(int(limiter.total_tokens)):
            await limiter.acquire_on_behalf_of(object())
