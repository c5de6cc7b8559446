"""Typed input and output through a supervisor: what is started, what waits get, and what new code cannot read."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import WorkflowExistsError, WorkflowNotFoundError
from perdure.workflow import Context, InvalidArgumentError, StoredValueError, workflow


@dataclass(frozen=True)
class Order:
    sku: str
    price: Decimal


@dataclass(frozen=True)
class Receipt:
    order: Order
    number: int


ORDER = Order("a", Decimal("1.10"))


@workflow
async def order(ctx: Context, given: Order) -> Receipt:
    assert type(given) is Order
    approval = await ctx.queue.next("approval", type=Receipt)
    return Receipt(given, approval.body.number)


async def test_a_typed_workflow_is_started_once_and_its_result_is_typed_also_after_a_restart(disk: Disk) -> None:
    """S8, S44: an equal input finds the workflow, in whatever form it comes; another is refused."""
    async with disk.process(order) as supervisor:
        handle = await supervisor.spawn(order, "o-1", ORDER)
        same: Any = {"price": Decimal("1.10"), "sku": "a"}
        assert (await supervisor.spawn(order, "o-1", same)).workflow_id == "o-1"
        with pytest.raises(WorkflowExistsError):
            await supervisor.spawn(order, "o-1", Order("b", Decimal(1)))
        assert await handle.get_output() is None
        await handle.message("approval", Receipt(ORDER, 7))
        assert await handle.result() == Receipt(ORDER, 7)
    async with disk.process(order) as supervisor:
        handle = await supervisor.spawn(order, "o-1", ORDER)
        assert await handle.result() == Receipt(ORDER, 7)
        assert await handle.get_output() == Receipt(ORDER, 7)
    async with disk.process() as supervisor:
        assert await (await supervisor.get("o-1")).get_output() == {
            "order": {"sku": "a", "price": Decimal("1.10")},
            "number": 7,
        }, "plain data where the function is not registered"


async def test_an_input_that_does_not_fit_is_refused_and_nothing_is_started(disk: Disk) -> None:
    """S9: at once, by name as well; no file and no row is left."""
    wrong: Any = Order("a", 1)  # type: ignore[arg-type]
    async with disk.process(order) as supervisor:
        for given in (order, "order"):
            with pytest.raises(InvalidArgumentError, match=r"input\.price should be Decimal, but is int"):
                await supervisor.spawn(given, "o-1", wrong)
        with pytest.raises(WorkflowNotFoundError):
            await supervisor.get("o-1")
    assert disk.namespaces == {}


async def test_an_input_that_new_code_cannot_read_is_a_trouble_and_old_code_goes_on(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S4, S8: the workflow is not failed."""

    @workflow(name="order")
    async def newer(ctx: Context, given: list[Order]) -> int:
        return len(given)

    async with disk.process(order) as supervisor:
        await supervisor.spawn(order, "o-1", ORDER)
        await trio.sleep(1)
    before = dict(disk.namespaces["o-1"])
    async with disk.process(newer) as supervisor:
        handle = await supervisor.get("o-1")
        await handle.wake()
        await trio.sleep(1)
        assert isinstance(supervisor.troubles()["o-1"], StoredValueError)
        with pytest.raises(StoredValueError, match="stored input does not fit"):
            await handle.result()
    assert disk.namespaces["o-1"] == before
    async with disk.process(order) as supervisor:
        handle = await supervisor.get("o-1")
        await handle.message("approval", Receipt(ORDER, 7))
        assert await handle.result() == Receipt(ORDER, 7)


async def test_an_output_that_new_code_cannot_read_is_an_error_to_who_asks_for_it(disk: Disk) -> None:
    """S34, S8: nothing runs; the stored output stays what it is."""

    @workflow(name="order")
    async def newer(ctx: Context, given: Order) -> list[Receipt]:
        raise NotImplementedError

    async with disk.process(order) as supervisor:
        handle = await supervisor.spawn(order, "o-1", ORDER)
        await handle.message("approval", Receipt(ORDER, 7))
        await handle.result()
    before = dict(disk.namespaces["o-1"])
    async with disk.process(newer) as supervisor:
        with pytest.raises(StoredValueError, match="stored output does not fit"):
            await (await supervisor.get("o-1")).result()
        with pytest.raises(StoredValueError, match="stored output does not fit"):
            await (await supervisor.get("o-1")).get_output()
    assert disk.namespaces["o-1"] == before
