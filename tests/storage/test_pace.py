"""When blocking work stays on Trio's thread."""

from math import inf

import trio

from perdure.storage.pace import Pace, storage_limiter, tasks_waiting


def nobody() -> bool:
    return False


def somebody() -> bool:
    return True


def never_asked() -> bool:
    raise AssertionError("asked although it does not matter")


def test_short_work_runs_in_place_only_while_nobody_waits():
    pace = Pace(alone_s=0.002, crowded_s=0.0)
    assert not pace.runs_in_place(somebody)
    assert pace.runs_in_place(nobody)


def test_that_nobody_waits_is_believed_for_a_few_more_pieces_of_work_and_then_asked_again():
    pace = Pace(alone_s=0.002, crowded_s=0.0)
    assert pace.runs_in_place(nobody)
    believed = 0
    while pace.runs_in_place(somebody):
        believed += 1
    assert 1 <= believed <= 16
    assert not pace.runs_in_place(somebody)


def test_slow_work_goes_to_a_thread_without_asking():
    pace = Pace(alone_s=0.002, crowded_s=0.0, expected_s=0.1)
    assert not pace.runs_in_place(never_asked)


def test_very_short_work_runs_in_place_without_asking():
    pace = Pace(alone_s=0.02, crowded_s=0.0002, expected_s=0.0001)
    assert pace.runs_in_place(never_asked)


def test_always_and_never_are_bounds_like_others():
    assert Pace(alone_s=inf, crowded_s=inf, expected_s=1000.0).runs_in_place(never_asked)
    assert not Pace(alone_s=0.0, crowded_s=0.0).runs_in_place(never_asked)


def test_a_disk_that_became_slow_is_noticed_and_one_that_recovered_too():
    pace = Pace(alone_s=0.002, crowded_s=0.0)
    for _ in range(5):
        pace.record(0.01)
    assert not pace.runs_in_place(nobody)
    quick = 0
    while not pace.runs_in_place(nobody):
        pace.record(0.0002)
        quick += 1
    assert quick < 15


def test_one_long_stall_is_soon_forgotten():
    pace = Pace(alone_s=0.002, crowded_s=0.0)
    pace.record(30.0)
    assert not pace.runs_in_place(nobody)
    for _ in range(5):
        pace.record(0.0002)
    assert pace.runs_in_place(nobody)


async def test_other_runnable_tasks_count_as_waiting():
    assert not tasks_waiting()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.lowlevel.checkpoint)
        assert tasks_waiting()
    assert not tasks_waiting()


async def test_storage_has_a_limit_of_its_own_for_each_run():
    assert storage_limiter() is storage_limiter()
    assert storage_limiter() is not trio.to_thread.current_default_thread_limiter()
