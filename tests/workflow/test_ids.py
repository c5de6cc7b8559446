"""Ids: version 7 UUIDs whose order is the order of creation, whatever the clock does."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any
from uuid import UUID

import pytest
from harness import Namespace, host
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from perdure.workflow import Context, RunMode, Uuid7Generator


class StoppedClock:
    """A clock that a test sets."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.at_ms = now_ms

    def now_ms(self) -> int:
        return self.at_ms

    async def wait_until_ms(self, deadline_ms: int) -> None:
        raise AssertionError("ids never wait")


def ids(count: int, clock: StoppedClock | None = None, seed: int = 1) -> list[str]:
    generator = Uuid7Generator(clock or StoppedClock(), random.Random(seed))
    return [generator.next_id() for _ in range(count)]


def test_an_id_is_a_uuid_of_version_7_with_the_clocks_time() -> None:
    (made,) = ids(1, StoppedClock(0x0123_4567_89AB))
    parsed = UUID(made)
    assert made == str(parsed)
    assert parsed.version == 7
    assert parsed.variant == "specified in RFC 4122"
    assert parsed.int >> 80 == 0x0123_4567_89AB


def test_ids_of_one_millisecond_count_up() -> None:
    made = ids(10_000)
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert all(UUID(one).version == 7 for one in made)


def test_ids_go_on_growing_when_the_clock_is_set_back() -> None:
    clock = StoppedClock()
    generator = Uuid7Generator(clock, random.Random(1))
    made = [generator.next_id()]
    for step_ms in (-1, -3_600_000, 0, 1, -clock.at_ms, 1_700_000_000_000):
        clock.at_ms = max(0, clock.at_ms + step_ms)
        made.append(generator.next_id())
    assert made == sorted(set(made))


@given(st.lists(st.integers(min_value=0, max_value=2**48 - 1), min_size=2, max_size=30), st.integers())
def test_ids_grow_whatever_the_clock_shows(times_ms: list[int], seed: int) -> None:
    clock = StoppedClock()
    generator = Uuid7Generator(clock, random.Random(seed))
    made: list[str] = []
    for time_ms in times_ms:
        clock.at_ms = time_ms
        made.append(generator.next_id())
    # At the very end of time a carry would leave 48 bits; until then order holds.
    assert made == sorted(set(made))


def test_a_new_generator_starts_above_the_largest_id_it_is_told_of() -> None:
    late = ids(3, StoppedClock(1_800_000_000_000))[-1]
    generator = Uuid7Generator(StoppedClock(1_700_000_000_000), random.Random(7))
    generator.start_after(late)
    made = [generator.next_id() for _ in range(3)]
    assert late < made[0] < made[1] < made[2]
    generator.start_after(ids(1, StoppedClock(1_600_000_000_000))[0])
    assert generator.next_id() > made[2], "a smaller id is no reason to go back"


@pytest.mark.parametrize("node", ["fffffffffffe", "ffffffffffff"])
@pytest.mark.parametrize("variant", ["8000", "bffe", "bfff"])
def test_the_digits_that_count_carry_into_those_before(variant: str, node: str) -> None:
    generator = Uuid7Generator(StoppedClock(), random.Random(1))
    made = [f"ffff0000-0000-7abc-{variant}-{node}"]
    generator.start_after(made[0])
    made += [generator.next_id() for _ in range(3)]
    assert made == sorted(set(made))
    assert all(UUID(one).version == 7 and UUID(one).variant == "specified in RFC 4122" for one in made)


@pytest.mark.parametrize(
    "other",
    ["", "x", "ffffffff-ffff-4fff-bfff-ffffffffffff", "z" * 12 + "7" + "z" * 19, "f" * 33, "ffff7"],
)
def test_ids_of_other_makers_are_ignored(other: str) -> None:
    generator = Uuid7Generator(StoppedClock(), random.Random(1))
    generator.start_after(other)
    assert generator.next_id() == ids(1)[0]


def test_the_same_seed_and_clock_give_the_same_ids_and_bytes() -> None:
    assert ids(5) == ids(5)
    assert ids(5) != ids(5, seed=2)
    first, second = (Uuid7Generator(StoppedClock(), random.Random(3)) for _ in range(2))
    assert first.random_bytes(16) == second.random_bytes(16)
    assert len(first.random_bytes(16)) == 16


def test_without_a_source_two_generators_differ() -> None:
    assert Uuid7Generator(StoppedClock()).next_id() != Uuid7Generator(StoppedClock()).next_id()


FORK = """
import os, sys
from perdure.workflow.clock import SystemClock
from perdure.workflow.ids import Uuid7Generator
parent, child = os.pipe()
if os.fork() == 0:
    os.write(child, Uuid7Generator(SystemClock()).random_bytes(16))
    os._exit(0)
sys.exit(os.read(parent, 16) == Uuid7Generator(SystemClock()).random_bytes(16))
"""


def test_a_forked_process_goes_on_with_other_ids() -> None:
    """Generators of one process have one source, which a child does not share."""
    subprocess.run([sys.executable, "-W", "error", "-c", FORK], check=True, timeout=60)


async def test_entries_keep_their_order_of_creation_over_a_restart_with_the_clock_set_back(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: the wall clock is set back while the workflow waits; entries made later still have larger ids."""

    async def work() -> str:
        return "done"

    async def slow(ctx: Context, _: Any) -> None:
        await ctx.step("before", work)
        await ctx.queue.next("go")
        await ctx.step("after", work)
        await ctx.step("last", work)

    async with host(namespace, mode) as process:
        await process.stop(slow)
        await process.restart()
        process.clock.move(-3600)
        await process.send("go")
        await process.finish(slow)
    entries = {entry.path[-1]: entry.id for entry in (await namespace.snapshot()).entries}
    await namespace.close()
    order = ["before", "go:0", "go:count", "after", "last"]
    assert [entries[name] for name in order] == sorted(entries.values())
    assert entries["after"] > entries["before"]
