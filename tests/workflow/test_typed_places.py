"""Typed values in every place that has one: input, output, loops, branches, messages; what a step's are, test_typed.py says."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import trio
from harness import Crash, Namespace, crashes, host
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from perdure.storage import decode_value
from perdure.workflow import (
    Branch,
    Break,
    Context,
    Continue,
    InvalidArgumentError,
    JoinError,
    Message,
    RaceError,
    RunMode,
    StoredValueError,
    ValueTypeError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowState,
    run_workflow,
    send_message,
    start_workflow,
)
from perdure.workflow.typed import converter_of


class Color(enum.Enum):
    RED = "red"
    MIXED = (1, 2)


@dataclass(frozen=True)
class Item:
    sku: str
    price: Decimal
    color: Color = Color.RED


@dataclass
class Order:
    id: UUID
    items: list[Item]
    notes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


ITEM = Item("a", Decimal("1.10"), Color.MIXED)
ORDER = Order(UUID(int=7), [ITEM, ITEM], {"x": (1, 2)})
WRONG: Any = Order(UUID(int=7), [Item("a", 1)])

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


# Input and output.


async def echo(ctx: Context, order: Order) -> dict[str, Order]:
    calls.append("echo")
    assert order == ORDER
    assert type(order.items[0]) is Item
    await ctx.queue.next("wait", names=["go"])
    return {"got": order}


async def test_input_and_output_are_of_their_types_on_every_run(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: the function's input, and what its result gives to whoever waits, also once it has ended."""
    async with host(namespace, mode) as process:
        await process.stop(echo, ORDER)
        await process.restart()
        await process.stop(echo, ORDER)
        await process.send("go")
        assert await process.finish(echo, ORDER) == {"got": ORDER}
        await process.restart()
        assert await process.finish(echo, ORDER) == {"got": ORDER}
        stored = (await namespace.snapshot()).output
    assert stored["got"]["items"][0] == {"sku": "a", "price": Decimal("1.10"), "color": [1, 2]}, "plain data is stored"
    assert calls == ["echo", "echo"] if mode == "live" else ["echo"] * 3


async def test_a_handle_gives_the_typed_output(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S8: `result()` and `get_output()`; `None` while it has not ended, whatever the annotation says."""
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "w", echo, ORDER, await namespace.driver(), mode="live")
        assert await handle.get_output() is None
        await handle.message("go")
        assert await handle.result() == {"got": ORDER}
        assert await handle.get_output() == {"got": ORDER}
    again = await run_workflow("w", echo, ORDER, await namespace.restart(), mode=mode)
    assert again.output == {"got": ORDER}


@pytest.mark.parametrize(
    ("given_input", "path", "text"),
    [
        (
            WRONG,
            "input.items[0].price",
            r"the workflow's input does not fit its annotation Order: input\.items\[0\]\.price should be Decimal, but is int",
        ),
        (None, "input", "input should be Order, but is None"),
        ({"id": UUID(int=7)}, "input.items", r"input\.items is missing"),
    ],
)
async def test_an_input_that_does_not_fit_is_refused_and_nothing_is_written(
    namespace: Namespace, mode: RunMode, given_input: Any, path: str, text: str
) -> None:
    """S9: at once, before there is a workflow."""
    driver = await namespace.driver()
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        await run_workflow("w", echo, given_input, driver, mode=mode)
    assert isinstance(caught.value.__cause__, ValueTypeError)
    assert caught.value.__cause__.path == path
    assert (calls, driver.writes, await namespace.dump()) == ([], 0, {})


async def test_an_output_that_does_not_fit_fails_the_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9: as one that cannot be stored does; the end is final."""

    async def workflow(ctx: Context, _: object) -> list[Order]:
        calls.append("run")
        return [WRONG]

    async with host(namespace, mode) as process:
        for _ in range(2):
            with pytest.raises(
                WorkflowFailedError, match=r"output\[0\]\.items\[0\]\.price should be Decimal"
            ) as caught:
                await process.finish(workflow)
            await process.restart()
        assert (await namespace.snapshot()).state is WorkflowState.FAILED
    assert caught.value.name == "ValueTypeError"
    assert caught.value.metadata["path"] == "output[0].items[0].price"
    assert calls == ["run"]


async def test_a_stored_input_or_output_that_no_longer_fits_is_a_fault(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4, S8: nothing runs and nothing is written; with the old annotation the workflow goes on."""

    async def changed(ctx: Context, order: list[Order]) -> dict[str, Order]:
        calls.append("changed")
        return {}

    async def changed_output(ctx: Context, order: Order) -> list[Order]:
        calls.append("changed")
        return []

    async with host(namespace, mode) as process:
        await process.stop(echo, ORDER)
        stored = await namespace.dump()
        await process.restart()
        with pytest.raises(StoredValueError, match="stored input does not fit") as caught:
            await process.stop(changed, [ORDER])
        assert caught.value.path == "input"
        await process.restart()
        assert await namespace.dump() == stored
        await process.send("go")
        assert await process.finish(echo, ORDER) == {"got": ORDER}
        await process.restart()
        with pytest.raises(StoredValueError, match="stored output does not fit"):
            await process.stop(changed_output, ORDER)
    assert "changed" not in calls


# Loops.


async def test_a_loops_state_and_value_are_of_their_types(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8, S7: the first state, each later one, one that a restart goes on with, and the value, replayed."""
    states: list[Any] = []
    values: list[Any] = []

    async def body(inner: Context, state: Order | None) -> Continue[Order | None] | Break[tuple[Item, int]]:
        states.append(state)
        if state is None:
            return Continue(ORDER)
        await inner.sleep("pause", 10)
        if len(state.items) == 2:
            return Continue(Order(state.id, [*state.items, ITEM]))
        return Break((ITEM, len(state.items)))

    async def workflow(ctx: Context, _: object) -> None:
        values.append(await ctx.loop("orders", body, None))
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        while not values:
            await process.stop(workflow)
            await process.restart()
            await process.advance(11)
        await process.send("go")
        await process.finish(workflow)
    grown = Order(ORDER.id, [ITEM] * 3)
    assert [state for state in states if state is None] == [None]
    assert all(state in (None, ORDER, grown) for state in states)
    assert {len(state.items) for state in states if state is not None} == {2, 3}
    assert values == [(ITEM, 3)] * 2
    assert all(type(value) is tuple and type(value[0]) is Item for value in values)


async def test_a_loops_state_is_typed_by_what_the_body_returns_where_the_parameter_says_nothing(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: `Continue[S]`, in text and through an alias."""
    states: list[Any] = []

    async def body(inner: Context, state: Any) -> Continue[Item] | Break[Item]:
        states.append(state)
        return Continue(state) if len(states) == 1 else Break(state)

    async def workflow(ctx: Context, _: object) -> Item:
        return await ctx.loop("items", body, ITEM)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == ITEM
    assert states == [ITEM, ITEM]


@pytest.mark.parametrize("place", ["first state", "next state", "value", "none"])
async def test_a_state_or_value_that_does_not_fit_is_an_error_that_names_the_loop(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, place: str
) -> None:
    """S9: a failure, catchable like that of a value that cannot be stored."""

    async def body(inner: Context, state: Order) -> Continue[Order] | Break[Order]:
        if place == "next state":
            return Continue(WRONG)
        none: Any = None
        return Break(WRONG if place == "value" else none)

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.loop("orders", body, WRONG if place == "first state" else ORDER)

    root = "state" if "state" in place else "value"
    path = root if place == "none" else f"{root}.items[0].price"
    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError, match=r"loop 'orders'") as caught:
            await process.finish(workflow)
    assert (caught.value.name, caught.value.metadata["path"]) == ("ValueTypeError", path)


async def test_a_recorded_state_or_value_that_no_longer_fits_is_a_fault(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4, S8: of a loop in progress, and of one that is done."""

    def deployed(kind: Any, *, is_done: bool) -> Callable[[Context, Any], Awaitable[Any]]:
        async def body(inner: Context, state: Any) -> Any:
            if is_done:
                return Break(state)
            await inner.queue.next("wait", names=["go"])
            return Break(state)

        body.__annotations__ |= {"state": kind, "return": Break[kind]}

        async def workflow(ctx: Context, _: object) -> Any:
            value = await ctx.loop("loop", body, 1)
            await ctx.queue.next("wait", names=["go"])
            return value

        return workflow

    async with host(namespace, mode) as process:
        await process.stop(deployed(int, is_done=False))
        await process.restart()
        with pytest.raises(StoredValueError, match="recorded state of loop 'loop'"):
            await process.stop(deployed(str, is_done=False))
        await process.restart()
        await process.send("go")
        await process.stop(deployed(int, is_done=False))
        await process.restart()
        with pytest.raises(StoredValueError, match="recorded value of loop 'loop'"):
            await process.stop(deployed(str, is_done=False))
        await process.restart()
        await process.send("go")
        assert await process.finish(deployed(int, is_done=False)) == 1


# Branches.


async def test_branch_values_are_of_their_types(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S8, S30: of a join, settled one after another, and of a race's winner; replayed."""
    seen: list[Any] = []

    async def quick(ctx: Context) -> tuple[Item, int]:
        return ITEM, 1

    async def slow(ctx: Context) -> Order | None:
        await ctx.sleep("pause", 10)
        return ORDER

    async def never(ctx: Context) -> Order:
        await ctx.sleep("for ever", 1e9)
        return ORDER

    async def workflow(ctx: Context, _: object) -> None:
        quick_branch = Branch("quick", quick)
        joined = await ctx.join("join", [quick_branch, Branch("slow", slow)])
        raced = await ctx.race("race", {"quick": quick, "never": never})
        seen.append([joined["quick"], joined["slow"], raced.value])
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.advance(11)
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        await process.finish(workflow)
    assert seen == [[(ITEM, 1), ORDER, (ITEM, 1)]] * 2


async def test_a_branch_value_that_does_not_fit_fails_its_branch(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9, S30: told like any branch's error, the same after a restart."""
    seen: list[Any] = []

    async def wrong(ctx: Context) -> Order:
        return WRONG

    async def workflow(ctx: Context, _: object) -> None:
        try:
            await ctx.join("join", {"wrong": wrong})
        except JoinError as error:
            seen.append((error.errors["wrong"].name, error.errors["wrong"].metadata["path"]))
        try:
            await ctx.race("race", {"wrong": wrong})
        except RaceError as error:
            seen.append((error.errors["wrong"].name, error.errors["wrong"].metadata["path"]))
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        await process.finish(workflow)
    assert seen == [("ValueTypeError", "value.items[0].price")] * 4


async def test_a_recorded_branch_value_that_no_longer_fits_is_a_fault(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4, S8: of a join and of a race."""

    def deployed(join_kind: Any, race_kind: Any) -> Callable[[Context, Any], Awaitable[Any]]:
        def branch(kind: Any) -> Callable[[Context], Awaitable[Any]]:
            async def run(ctx: Context) -> Any:
                return 1

            run.__annotations__["return"] = kind
            return run

        async def workflow(ctx: Context, _: object) -> list[Any]:
            joined = await ctx.join("join", {"a": branch(join_kind)})
            raced = await ctx.race("race", {"a": branch(race_kind)})
            await ctx.queue.next("wait", names=["go"])
            return [joined["a"], raced.value]

        return workflow

    async with host(namespace, mode) as process:
        await process.stop(deployed(int, int))
        for kinds, name in (((str, int), "join"), ((int, str), "race")):
            await process.restart()
            with pytest.raises(StoredValueError, match=f"recorded value of branch 'a' of {name} '{name}'"):
                await process.stop(deployed(*kinds))
        await process.restart()
        await process.send("go")
        assert await process.finish(deployed(int, int)) == [1, 1]


# Messages.


async def read_orders(ctx: Context, seen: list[Any]) -> None:
    first: Message[Order] = await ctx.queue.next("first", names=["order"], type=Order)
    batch = await ctx.queue.next_batch("batch", names=["items"], count=2, type=list[Item])
    plain = await ctx.queue.next("plain", names=["plain"])
    seen.append([first.body, [message.body for message in batch], plain.body])
    await ctx.queue.next("wait", names=["go"])


async def test_a_message_is_sent_as_an_instance_and_read_as_the_type_asked_for(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8, S26: through the mailbox, before and after a restart; without `type=` as plain data."""
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> None:
        await read_orders(ctx, seen)

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.send("order", ORDER)
        await process.send("items", [ITEM])
        await process.send("items", [{"sku": "a", "price": Decimal("1.10"), "color": [1, 2]}])
        await process.stop(workflow)
        await process.send("plain", ITEM)
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        await process.finish(workflow)
    plain = {"sku": "a", "price": Decimal("1.10"), "color": [1, 2]}
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0][0] == ORDER
    assert seen[0][1] == [[ITEM], [ITEM]][: len(seen[0][1])]
    assert seen[0][2] == plain


@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_message_that_does_not_fit_was_read_and_is_the_same_error_on_every_run(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, is_batch: bool
) -> None:
    """S9, S26: it stays in history, and the next read gets the next message."""
    seen: list[Any] = []

    async def workflow(ctx: Context, _: object) -> list[str]:
        try:
            if is_batch:
                await ctx.queue.next_batch("orders", names=["order"], count=1, type=Order)
            else:
                await ctx.queue.next("orders", names=["order"], type=Order)
        except ValueTypeError as error:
            seen.append((str(error), error.path, error.expected, error.found))
        following = await ctx.queue.next("following", names=["order"], type=str)
        await ctx.queue.next("wait", names=["go"])
        return [following.body]

    async with host(namespace, mode) as process:
        await process.send("order", {"id": UUID(int=7), "items": [{"sku": "a"}]}, id="m-1")
        await process.stop(workflow)
        read = await namespace.entries()
        await process.restart()
        await process.send("order", "following")
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == ["following"]
    assert len(set(seen)) == 1
    assert len(seen) >= 2
    text, *facts = seen[0]
    assert "body of message 'order' (m-1)" in text
    assert facts == ["body.items[0].price", "Decimal", "nothing"]
    assert read["orders:0",].data["body"]["body"]["items"] == [{"sku": "a"}]


async def test_a_misfit_left_uncaught_fails_the_workflow_and_the_message_is_not_lost(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S27, S39: killed at any write: the message is in history or in the mailbox, and the end is that of a run without."""

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.queue.next("orders", type=Order)

    async def scenario(namespace: Namespace) -> str:
        async with host(namespace, mode) as process:
            with suppress(WorkflowEndedError):
                await process.send("order", 5, id="m-1")
            with pytest.raises(WorkflowFailedError) as caught:
                await process.finish(workflow)
            return caught.value.name

    async def check(outcome: str, namespace: Namespace, crash: Crash | None) -> None:
        assert outcome == "ValueTypeError", crash
        assert (await namespace.entries())["orders:0",].data["body"]["body"] == 5, crash

    explored = await crashes(scenario, make_quick_namespace, check)
    assert explored.counted >= 2


async def test_what_is_asked_for_must_be_a_type(namespace: Namespace, mode: RunMode) -> None:
    """S9: a fault; nothing is read."""

    async def workflow(ctx: Context, _: object) -> None:
        wrong: Any = "Order"
        await ctx.queue.next("orders", type=wrong)

    driver = await namespace.driver()
    await send_message(driver, "order", ORDER)
    with pytest.raises(InvalidArgumentError, match="values cannot be typed by the annotation"):
        await run_workflow("w", workflow, None, driver, mode=mode)
    assert await namespace.entries() == {}


# Any tree of values.


@dataclass(frozen=True)
class Leaf:
    color: Color
    amount: Decimal
    at: datetime
    data: bytes
    ratio: float


@dataclass(frozen=True)
class Tree:
    name: str | None
    leaves: tuple[Leaf, ...]
    by_key: dict[str | int, frozenset[Color]]
    left: Tree | None = None
    right: Tree | None = None


def form(value: Any) -> Any:
    """The value with the types of everything in it."""
    if isinstance(value, Leaf | Tree):
        return type(value), [form(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, tuple):
        return tuple, [form(item) for item in value]
    if isinstance(value, dict):
        return dict, [(form(key), form(item)) for key, item in value.items()]
    return type(value), value


leaf_values = st.builds(
    Leaf,
    st.sampled_from(Color),
    st.decimals(allow_nan=False),
    st.datetimes(timezones=st.just(UTC)),
    st.binary(max_size=20),
    st.floats(allow_nan=False),
)
tree_values = st.recursive(
    st.just(None),
    lambda children: st.builds(
        Tree,
        st.none() | st.text(max_size=5),
        st.lists(leaf_values, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers(), st.frozensets(st.sampled_from(Color)), max_size=3),
        children,
        children,
    ),
    max_leaves=8,
)


@given(tree_values)
def test_any_tree_comes_back_equal_and_of_its_types(tree: Tree | None) -> None:
    """S8: and what is stored is plain data, the same once more."""
    converter = converter_of(Tree | None)
    data, first = converter.round_trip(tree, bytes_max=1_000_000, what="the tree", root="tree")
    assert first == tree
    replayed = converter.decode(data, what="the tree", root="tree")
    assert form(replayed) == form(first) == form(tree)
    again, _ = converter.round_trip(replayed, bytes_max=1_000_000, what="the tree", root="tree")
    assert (None if again is None else decode_value(again)) == (None if data is None else decode_value(data))


def test_a_tree_as_deep_as_storage_allows_comes_back() -> None:
    """S13: no recursion error."""
    tree: Tree | None = None
    for _ in range(99):
        tree = Tree(None, (), {}, tree)
    converter = converter_of(Tree | None)
    data, first = converter.round_trip(tree, bytes_max=1_000_000, what="the tree", root="tree")
    assert first == tree
    assert converter.decode(data, what="the tree", root="tree") == tree
