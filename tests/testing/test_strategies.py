"""What is drawn: only what can be, everything that may be, and least first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypedDict, TypeVar, get_args

import pytest
import trio
from hypothesis import find, given, settings
from hypothesis import strategies as st

from perdure.actors import Supervisor
from perdure.testing import (
    CrashPoint,
    Fault,
    ProcessPlan,
    Simulation,
    crash_plans,
    fault_plans,
    message_orders,
    process_plans,
    run_virtual,
    schedule_seeds,
    workflow_inputs,
)
from perdure.workflow import Context, InvalidArgumentError, workflow

T = TypeVar("T")


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


@dataclass
class Item:
    sku: str
    count: int
    size: Size


class Order(TypedDict):
    id: int
    items: list[Item]


@dataclass
class Meeting:
    at: datetime


class Opaque:
    def __init__(self, what) -> None:  # type: ignore[no-untyped-def]
        self.what = what


@workflow
async def echo(ctx: Context, order: Order) -> Order:
    return order


async def plain(ctx: Context, value: Any) -> Any:
    return value


async def nothing(ctx: Context, _: None) -> None:
    pass


async def dated(ctx: Context, at: datetime) -> datetime:
    return at


async def meeting(ctx: Context, meeting: Meeting) -> datetime:
    return meeting.at


def least(strategy: st.SearchStrategy[T], condition: Callable[[T], bool] = lambda _: True) -> T:
    return find(strategy, condition, settings=settings(max_examples=400, database=None, derandomize=True))


@given(order=workflow_inputs(echo), seed=schedule_seeds())
@settings(max_examples=25, deadline=None)
def test_an_input_that_is_drawn_can_be_given_to_the_workflow(order: Order, seed: int) -> None:
    async def process(supervisor: Supervisor) -> Order:
        result = await (await supervisor.spawn(echo, "w", order)).result()
        assert isinstance(result, dict)
        return result

    assert Simulation([echo]).run(process, seed=seed).value == order


@pytest.mark.parametrize("function", [plain, nothing, dated])
def test_inputs_of_any_annotation_can_be_stored(function: Any) -> None:
    async def process(supervisor: Supervisor, value: object) -> None:
        await supervisor.spawn(function, "w", value)

    @given(value=workflow_inputs(function))
    @settings(max_examples=25, deadline=None, database=None)
    def each(value: object) -> None:
        async def begin(supervisor: Supervisor) -> None:
            await process(supervisor, value)

        assert not Simulation([function]).run(begin).has_crashed

    each()


def test_what_says_nothing_is_drawn_as_plain_data_and_nothing_as_nothing() -> None:
    assert least(workflow_inputs(nothing)) is None
    for kind in (int, str, bytes, list, dict, type(None)):
        assert isinstance(least(workflow_inputs(plain), lambda value, kind=kind: isinstance(value, kind)), kind)  # type: ignore[misc]


def test_parts_say_how_what_a_type_does_not_tell_is_made() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    assert least(workflow_inputs(meeting, at=st.just(at))) == Meeting(at)
    with pytest.raises(InvalidArgumentError, match=r"workflow_inputs\(order, at="):
        least(workflow_inputs(meeting))
    with pytest.raises(InvalidArgumentError, match="does not say of which class"):
        workflow_inputs(plain, at=st.none())


def test_inputs_that_cannot_be_made_are_refused_at_once() -> None:
    async def opaque(ctx: Context, value: Opaque) -> None:
        pass

    with pytest.raises(InvalidArgumentError, match="Say how its parts are made"):
        workflow_inputs(opaque)


def test_crash_plans_shrink_to_none_then_early_and_few() -> None:
    """S39: what a failing example shows is what matters."""
    assert least(crash_plans()) == ()
    assert least(crash_plans(), lambda plan: len(plan) > 0) == (CrashPoint(0, "before"),)
    assert least(crash_plans(), lambda plan: any(point.when == "after" for point in plan)) == (CrashPoint(0, "after"),)
    assert least(crash_plans(), lambda plan: any(point.write >= 5 for point in plan)) == (CrashPoint(5, "before"),)
    assert len(least(crash_plans(processes_max=2), lambda plan: len(plan) == 2)) == 2


def test_every_crash_point_is_drawn_up_to_the_last() -> None:
    seen: set[CrashPoint] = set()

    @given(plan=crash_plans(processes_max=20, writes_max=5))
    @settings(max_examples=300, database=None, derandomize=True)
    def each(plan: tuple[CrashPoint, ...]) -> None:
        seen.update(plan)

    each()
    assert seen == {CrashPoint(write, when) for write in range(5) for when in ("before", "after")}  # type: ignore[arg-type]


def test_process_plans_shrink_to_nothing_unusual() -> None:
    assert least(process_plans()) == ProcessPlan()
    assert repr(ProcessPlan()) == "ProcessPlan()"
    dies = least(process_plans(), lambda plan: plan.crash_at is not None)
    assert dies == ProcessPlan(CrashPoint(0, "before"))
    assert repr(dies) == "ProcessPlan(crash_at=CrashPoint(write=0, when='before'))"
    assert least(process_plans(), lambda plan: plan.clock_moves_s < 0) == ProcessPlan(clock_moves_s=-1)
    assert least(process_plans(), lambda plan: plan.stays_s >= 60).stays_s == 60
    assert least(process_plans(), lambda plan: plan.seed > 0).seed == 1
    assert len(least(process_plans(faults=True), lambda plan: len(plan.faults) > 0).faults) == 1


@given(plan=process_plans(crashes=False, clock_moves=False))
def test_a_plan_holds_only_what_was_asked_for(plan: ProcessPlan) -> None:
    assert plan == ProcessPlan(seed=plan.seed, stays_s=plan.stays_s)


def test_fault_plans_know_every_fault() -> None:
    """S41."""
    assert least(fault_plans()) == {}
    for fault in get_args(Fault):
        assert least(fault_plans(), lambda plan, fault=fault: fault in plan.values()) == {0: fault}  # type: ignore[misc]


SENT = {"a": [1, 2, 3], "b": [4, 5], "c": []}


def test_every_order_that_keeps_each_senders_is_drawn() -> None:
    """S26: FIFO per sender; ten orders of three and two."""
    seen: set[tuple[int, ...]] = set()

    @given(order=message_orders(SENT))
    @settings(max_examples=500, database=None, derandomize=True)
    def each(order: Sequence[tuple[str, int]]) -> None:
        for sender, sent in SENT.items():
            assert [message for whose, message in order if whose == sender] == sent
        seen.add(tuple(message for _, message in order))

    each()
    assert len(seen) == 10
    assert least(message_orders(SENT)) == [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)]


def test_a_repeated_message_follows_at_once() -> None:
    order = least(message_orders(SENT, repeated=True), lambda order: len(order) > 5)
    assert order == [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("b", 5)]


def test_seeds_are_of_schedules() -> None:
    async def first() -> str:
        order: list[str] = []

        async def task(name: str) -> None:
            order.append(name)

        async with trio.open_nursery() as nursery:
            for name in "abcd":
                nursery.start_soon(task, name)
        return "".join(order)

    assert least(schedule_seeds()) == 0
    assert (
        run_virtual(first, seed=least(schedule_seeds(), lambda seed: run_virtual(first, seed=seed) == "dbca")) == "dbca"
    )


def test_a_process_is_run_to_its_end_through_every_crash() -> None:
    """S39: the crashes in order, each in a process of its own, and then one that is spared."""

    async def process(supervisor: Supervisor) -> int:
        handle = await supervisor.spawn(plain, "w", 5)
        result = await handle.result()
        assert isinstance(result, int)
        return result

    lived = Simulation([plain]).run_to_end(process, crashes=[CrashPoint(2), CrashPoint(0, "after")])
    assert [(each.has_crashed, each.value) for each in lived] == [(True, None), (True, None), (False, 5)]
    assert [
        (each.has_crashed, each.value) for each in Simulation([plain]).run_to_end(process, crashes=[CrashPoint(99)])
    ] == [(False, 5)]


def test_numbers_that_make_no_plan_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="writes_max=3"):
        crash_plans(writes_max=0)
    with pytest.raises(InvalidArgumentError, match="processes_max"):
        crash_plans(processes_max=-1)
    with pytest.raises(InvalidArgumentError, match="faults_max"):
        fault_plans(faults_max=True)


def test_what_nothing_can_be_drawn_from_says_what_to_write() -> None:
    @workflow
    async def meet(ctx: Context, meeting: Meeting) -> None:
        await ctx.sleep("until", 1)

    @workflow
    async def count(ctx: Context, number: int) -> None:
        await ctx.sleep("until", 1)

    with pytest.raises(InvalidArgumentError, match=r"Meeting, has no part 'nope'; it has at"):
        workflow_inputs(meet, nope=st.integers())
    with pytest.raises(InvalidArgumentError, match=r"int, has no part 'nope'"):
        workflow_inputs(count, nope=st.integers())
    for messages in (["a"], {"alice": "xyz"}, {"alice": 3}):
        with pytest.raises(InvalidArgumentError, match=r"alice': \["):
            message_orders(messages)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"crash_at=CrashPoint"):
        ProcessPlan(crash_at=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"faults="):
        ProcessPlan(faults={3: "explode"})  # type: ignore[dict-item]
