"""Schedules are drawn from a seed: any order can come, and the same again."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from itertools import permutations

import pytest
import trio
from trio._core import _run
from trio.testing import MockClock

from perdure.testing import run_virtual, seeded_scheduling


async def first_round(count: int) -> tuple[int, ...]:
    """In which order that many tasks are run first."""
    order: list[int] = []

    async def task(number: int) -> None:
        order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(task, number)
    return tuple(order)


def test_every_first_round_of_four_tasks_is_explored() -> None:
    """S39: Trio by itself tries 2 of the 24."""
    seen = {run_virtual(first_round, 4, seed=seed) for seed in range(500)}
    assert seen == set(permutations(range(4)))


def test_the_same_seed_gives_the_same_order() -> None:
    orders = [run_virtual(first_round, 20, seed=seed) for seed in (1, 1, 2, 2)]
    assert orders[0] == orders[1] != orders[2] == orders[3]


def test_trio_is_left_as_it_was() -> None:
    before = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r
    with seeded_scheduling(1), seeded_scheduling(2):
        trio.run(first_round, 4)
    assert (_run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r) == before


def test_runs_in_two_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own order, and one that asked for none has one of Trio's two."""
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", False)  # as outside of Hypothesis
    alone = run_virtual(first_round, 12, seed=7)
    seen: list[tuple[int, ...]] = []
    plain: list[tuple[int, ...]] = []

    def seeded() -> None:
        seen.extend(run_virtual(first_round, 12, seed=7) for _ in range(50))

    def unseeded() -> None:
        plain.extend(trio.run(first_round, 12, clock=MockClock(autojump_threshold=0)) for _ in range(50))

    threads = [threading.Thread(target=target) for target in (seeded, unseeded, seeded)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {alone}
    assert set(plain) <= {tuple(range(12)), tuple(reversed(range(12)))}


def test_it_uses_no_randomness_of_the_program() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    run_virtual(first_round, 8, seed=3)
    assert random.random() == expected


def test_what_hypothesis_sets_up_inside_stays() -> None:
    """It is imported there first, as by a test module that a workflow's code imports."""
    program = (
        "import sys, random\n"
        "from trio._core import _run\n"
        "from perdure.testing import run_virtual\n"
        "async def main():\n"
        "    assert 'hypothesis' not in sys.modules\n"
        "    import hypothesis\n"
        "run_virtual(main)\n"
        "from hypothesis.internal.entropy import RANDOMS_TO_MANAGE\n"
        "assert _run._ALLOW_DETERMINISTIC_SCHEDULING is True\n"
        "assert isinstance(_run._r, random.Random)\n"
        "assert any(each is _run._r for each in RANDOMS_TO_MANAGE.values())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
