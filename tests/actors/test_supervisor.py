"""Starting workflows: one per id, whatever the id; and every wrong argument is refused at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import (
    SupervisorClosedError,
    SupervisorError,
    UnregisteredWorkflowError,
    WorkflowExistsError,
    WorkflowNotFoundError,
    open_supervisor,
)
from perdure.storage import Driver, EncodeError, MemoryStore, StorageError
from perdure.workflow import Context, InvalidArgumentError, WorkflowFailedError, WorkflowState, workflow

STRANGE_IDS = ["../x", "a/b", "a\\b", "nul\0byte", "\0", ".", "..", "/etc/x", "x" * 10_000, "📦", "case", "Case", "CASE", "é",
               "e\u0301", "con", " ", "?", "a.sqlite", "a-wal"]  # fmt: skip

runs: list[Any] = []


async def order(ctx: Context, input: Any) -> Any:
    async def charge() -> None:
        runs.append((ctx.workflow_id, input))

    await ctx.step("charge", charge)
    return input


async def refund(ctx: Context, input: Any) -> Any:
    await ctx.queue.next("approval")
    return input


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.fixture(autouse=True)
def _forget_runs() -> None:
    runs.clear()


class TestSpawn:
    async def test_the_same_spawn_again_finds_the_workflow_that_runs(self, disk: Disk) -> None:
        async with disk.process(order, refund) as supervisor:
            handle = await supervisor.spawn(refund, "r-1", {"sku": 7, "by": "me"})
            again = await supervisor.spawn(refund, "r-1", {"by": "me", "sku": 7})
            by_name = await supervisor.spawn("refund", "r-1", {"sku": 7, "by": "me"})
            await by_name.message("yes")
            assert await again.result() == await handle.result() == {"sku": 7, "by": "me"}
            assert disk.store.written.count("create") == 1

    async def test_the_same_spawn_after_the_end_or_in_another_process_runs_nothing(self, disk: Disk) -> None:
        async with disk.process(order) as supervisor:
            assert await (await supervisor.spawn(order, "o-1", 1)).result() == 1
            written = len(disk.store.written)
            assert await (await supervisor.spawn(order, "o-1", 1)).result() == 1
        async with disk.process(order) as supervisor:
            assert await (await supervisor.spawn(order, "o-1", 1)).result() == 1
            assert disk.store.written == []
        assert runs == [("o-1", 1)]
        assert written > 0

    @pytest.mark.parametrize(
        ("first", "second"),
        [(1, 2), (1, True), (1, 1.0), (None, 0), ({"a": 1}, {"a": True}), ([1, 2], [2, 1]), ("1", 1)],
    )
    async def test_another_input_is_refused_and_changes_nothing(self, disk: Disk, first: Any, second: Any) -> None:
        """S44: other input."""
        async with disk.process(refund) as supervisor:
            handle = await supervisor.spawn(refund, "r-1", first)
            with pytest.raises(WorkflowExistsError, match="another input") as caught:
                await supervisor.spawn(refund, "r-1", second)
            assert caught.value.workflow_id == "r-1"
            await handle.evict()
            with pytest.raises(WorkflowExistsError, match="another input"):
                await supervisor.spawn(refund, "r-1", second)
            await handle.message("yes")
            result = await handle.result()
        assert (result, type(result)) == (first, type(first))

    async def test_a_nan_is_the_same_input_as_a_nan(self, disk: Disk) -> None:
        async with disk.process(order) as supervisor:
            await supervisor.spawn(order, "o-1", {"x": math.nan, "y": [math.nan]})
            handle = await supervisor.spawn(order, "o-1", {"y": [math.nan], "x": math.nan})
            await handle.result()
        assert len(runs) == 1

    async def test_another_workflow_under_the_id_is_refused(self, disk: Disk) -> None:
        async with disk.process(order, refund) as supervisor:
            await supervisor.spawn(refund, "r-1", 1)
            with pytest.raises(WorkflowExistsError, match="is a 'refund', not a 'order'"):
                await supervisor.spawn(order, "r-1", 1)
        assert runs == []

    async def test_fifty_concurrent_spawns_give_one_workflow(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S44: 50 concurrent spawns of one id."""
        results: list[Any] = []
        refused: list[int] = []

        async def spawn(number: int) -> None:
            try:
                handle = await supervisor.spawn(order, "o-1", 0 if number % 10 else 1)
            except WorkflowExistsError:
                refused.append(number)
            else:
                results.append(await handle.result())

        async with disk.process(order) as supervisor:
            disk.store.delay_s = 0.01
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(spawn, number)
        assert len(runs) == 1, "one ran"
        assert results == [runs[0][1]] * len(results)
        assert {len(results), len(refused)} == {45, 5}, "those with another input than the first's were refused"
        assert disk.store.written.count("create") == 1
        assert disk.store.opens.count("o-1") <= 2

    async def test_a_spawn_whose_caller_is_cancelled_runs_or_was_never_made(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S44: no half-made workflow keeps an id."""
        for delay_ms in range(0, 60, 5):
            workflow_id = f"o-{delay_ms}"
            async with disk.process(order) as supervisor:
                disk.store.delay_s = 0.01
                with trio.move_on_after(delay_ms / 1000):
                    await supervisor.spawn(order, workflow_id, 1)
                await trio.sleep(5)
                made = disk.rows.get(workflow_id)
                assert made is None or made.state == "completed"
                assert await (await supervisor.spawn(order, workflow_id, 1)).result() == 1
        assert len(runs) == 12

    async def test_an_input_that_cannot_be_stored_is_refused_at_once(self, disk: Disk) -> None:
        async with disk.process(order) as supervisor:
            with pytest.raises(EncodeError):
                await supervisor.spawn(order, "o-1", object())
            with pytest.raises(EncodeError):
                await supervisor.spawn(order, "o-1", b"x" * 976 * 1024)
            with pytest.raises(WorkflowNotFoundError):
                await supervisor.get("o-1")
            assert disk.store.written == []


class TestIds:
    async def test_unusual_ids_are_kept_apart_and_stay_inside(
        self, disk: Disk, tmp_path: Path, autojump_clock: MockClock
    ) -> None:
        """S44: `../x`, `a/b`, NUL, 10,000 characters, emoji, upper and lower case."""
        async with disk.process(order) as supervisor:
            for workflow_id in STRANGE_IDS:
                await supervisor.spawn(order, workflow_id, [workflow_id])
            for workflow_id in STRANGE_IDS:
                handle = await supervisor.get(workflow_id)
                assert handle.workflow_id == workflow_id
                assert await handle.result() == [workflow_id]
        async with disk.process(order) as supervisor:
            for workflow_id in STRANGE_IDS:
                assert await (await supervisor.get(workflow_id)).result() == [workflow_id]
            assert await disk.store.count_rows() == len(STRANGE_IDS)
        assert sorted(runs) == sorted((workflow_id, [workflow_id]) for workflow_id in STRANGE_IDS)
        assert all(path.is_relative_to(disk.path) for path in _files(tmp_path))

    @pytest.mark.parametrize("workflow_id", ["", "\ud800", 5, None, b"x", ["a"]])
    async def test_what_is_no_id_is_refused_by_spawn_get_and_describe(self, disk: Disk, workflow_id: Any) -> None:
        """S44: empty is refused."""
        async with disk.process(order) as supervisor:
            for attempt in (supervisor.spawn(order, workflow_id), supervisor.get(workflow_id)):
                with pytest.raises(
                    InvalidArgumentError, match=r'a workflow\'s id .*(write for example "order-123"|decode)'
                ):
                    await attempt
            with pytest.raises(InvalidArgumentError):
                supervisor.describe(workflow_id)
            assert disk.store.written == []


class TestGet:
    async def test_it_never_creates(self, disk: Disk) -> None:
        async with disk.process(order) as supervisor:
            with pytest.raises(WorkflowNotFoundError, match=r"supervisor\.spawn\(workflow, 'o-1', input\)") as caught:
                await supervisor.get("o-1")
            assert caught.value.workflow_id == "o-1"
            assert (disk.store.written, disk.store.opens) == ([], [])

    async def test_it_finds_a_dormant_workflow_without_opening_it(self, disk: Disk) -> None:
        async with disk.process(order) as supervisor:
            await (await supervisor.spawn(order, "o-1", 1)).result()
            disk.store.opens.clear()
            handle = await supervisor.get("o-1")
            assert disk.store.opens == []
            assert await handle.get_state() is WorkflowState.COMPLETED
            assert "o-1" in repr(handle)


class TestRegistration:
    async def test_an_unregistered_workflow_is_refused_at_spawn(self, disk: Disk) -> None:
        async with disk.process(order) as supervisor:
            for unknown in (refund, "refund"):
                with pytest.raises(
                    UnregisteredWorkflowError, match=r"registered: order.*workflows=\[refund\]"
                ) as caught:
                    await supervisor.spawn(unknown, "r-1", 1)
                assert caught.value.workflow_type == "refund"
            assert disk.store.written == []

    async def test_another_function_of_a_registered_name_is_refused(self, disk: Disk) -> None:
        @workflow(name="order")
        async def impostor(ctx: Context, input: None) -> None: ...

        async with disk.process(order) as supervisor:
            with pytest.raises(UnregisteredWorkflowError):
                await supervisor.spawn(impostor, "o-1", None)
            assert disk.store.written == []

    async def test_a_bound_method_is_found_again(self, disk: Disk) -> None:
        class Shop:
            async def sell(self, ctx: Context, input: Any) -> Any:
                return input

        shop = Shop()
        async with disk.process(shop.sell) as supervisor:
            assert await (await supervisor.spawn(shop.sell, "s-1", 1)).result() == 1
            with pytest.raises(UnregisteredWorkflowError):
                await supervisor.spawn(Shop().sell, "s-2", 1)

    async def test_a_workflow_whose_function_is_gone_is_kept_while_others_go_on_and_runs_once_it_is_back(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(order, refund) as supervisor:
            for number in range(3):
                await supervisor.spawn(refund, f"r-{number}", number)
            await trio.sleep(1)
            await (await supervisor.get("r-0")).message("yes", id="m-1")
            disk.die()
        async with disk.process(order) as supervisor:
            assert await (await supervisor.spawn(order, "o-1", 1)).result() == 1
            await trio.sleep(1)
            trouble = supervisor.troubles()
            assert list(trouble) == ["r-0"], "the one that has something to do"
            assert isinstance(trouble["r-0"], UnregisteredWorkflowError)
            handle = await supervisor.get("r-0")
            with pytest.raises(UnregisteredWorkflowError, match="refund"):
                await handle.result()
            await (await supervisor.get("r-1")).message("yes", id="m-2")
            assert set(supervisor.troubles()) == {"r-0", "r-1"}
            assert await handle.get_state() is WorkflowState.SLEEPING, "its state is as it was"
        async with disk.process(order, refund) as supervisor:
            assert await (await supervisor.get("r-0")).result() == 0
            assert await (await supervisor.get("r-1")).result() == 1
            assert await (await supervisor.get("r-2")).get_state() is WorkflowState.SLEEPING
            assert supervisor.troubles() == {}

    async def test_a_workflow_whose_function_is_gone_is_looked_at_once_when_it_is_due(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S46: not again and again, with all that the processor gives: asleep, not started yet, or recovered."""

        async def sleeper(ctx: Context, input: None) -> None:
            await ctx.sleep("nap", 10)

        async def failing(ctx: Context, input: None) -> None:
            raise ValueError("no")

        async with disk.process(sleeper, failing) as supervisor:
            await supervisor.spawn(sleeper, "asleep", None)
            await supervisor.spawn(sleeper, "not started", None, start_at=20)
            with pytest.raises(WorkflowFailedError):
                await (await supervisor.spawn(failing, "failed", None)).result()
            await trio.sleep(1)
        async with disk.process(order) as supervisor:
            original = disk.store.open_driver
            opened: list[str] = []

            async def open_driver(wanted: str, *, create: bool = False) -> Driver:
                opened.append(wanted)
                if len(opened) > 100:
                    raise SystemExit("it spins")
                return await original(wanted, create=create)

            disk.store.open_driver = open_driver  # type: ignore[method-assign]
            await trio.sleep(5)
            await (await supervisor.get("failed")).recover()
            await trio.sleep(100)
            assert set(supervisor.troubles()) == {"asleep", "not started", "failed"}
            before = len(opened)
            await trio.sleep(10_000)
            assert len(opened) == before
        async with disk.process(sleeper, failing) as supervisor:
            await (await supervisor.get("asleep")).result()
            await (await supervisor.get("not started")).result()
            with pytest.raises(WorkflowFailedError):
                await (await supervisor.get("failed")).result()

    async def test_two_workflows_of_one_name_are_refused(self) -> None:
        @workflow(name="order")
        async def other(ctx: Context, input: None) -> None: ...

        with pytest.raises(InvalidArgumentError, match=r"two workflows are named 'order'.*@workflow\(name="):
            async with open_supervisor(MemoryStore(), workflows=[order, other]):
                raise AssertionError("it was opened")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"store": 5}, r'write open_supervisor\("data/"\)'),
    ({"store": None}, r'write open_supervisor\("data/"\)'),
    ({"store": ""}, r'write open_supervisor\("data/"\)'),
    ({"store": MemoryStore}, r'write open_supervisor\("data/"\)'),
    ({"workflows": order}, r"write workflows=\[order\]"),
    ({"workflows": "order"}, r"write workflows=\[order\]"),
    ({"workflows": 5}, r"write workflows=\[order\]"),
    ({"workflows": [5]}, "a workflow must be a function, not int; write async def order"),
    ({"workflows": ["order"]}, "a workflow must be a function, not str"),
    ({"workflows": [len]}, "must be a coroutine function"),
    ({"workflows": [trio.sleep]}, "does not take these; write async def order"),
    ({"durability": "best"}, 'durability must be "full" or "normal"'),
    ({"durability": None}, 'durability must be "full" or "normal"'),
    ({"grace": -1}, "grace must be a finite number of seconds, 0 or more, not -1; write grace=10.0"),
    ({"grace": math.nan}, "grace must be a finite number"),
    ({"grace": math.inf}, "grace must be a finite number"),
    ({"grace": "10"}, "grace must be a number of seconds, not str"),
    ({"grace": None}, "grace must be a number of seconds, not NoneType"),
    ({"clock": 5}, r"clock= takes an object with now_ms\(\) and wait_until_ms\(\)"),
    ({"clock": MockClock}, "clock= takes an object with"),
    ({"handle_signals": "yes"}, "handle_signals must be True or False"),
]


@pytest.mark.parametrize(("options", "match"), WRONG, ids=[str(number) for number in range(len(WRONG))])
async def test_every_wrong_argument_of_open_supervisor_is_refused_at_once(options: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {"store": MemoryStore(), "workflows": [order], **options}
    with pytest.raises(InvalidArgumentError, match=match):
        async with open_supervisor(arguments.pop("store"), **arguments):
            raise AssertionError("it was opened")


def test_signals_are_refused_outside_of_the_main_thread(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    async def main() -> None:
        async with open_supervisor(tmp_path / "data", handle_signals=True):
            raise AssertionError("it was opened")

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(error) for error in caught] == [InvalidArgumentError]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("wrong", [5, None, object(), len, lambda ctx, input: None])
async def test_what_is_no_workflow_is_refused_by_spawn(disk: Disk, wrong: Any) -> None:
    async with disk.process(order) as supervisor:
        with pytest.raises(InvalidArgumentError, match="async def order"):
            await supervisor.spawn(wrong, "o-1", 1)
        assert disk.store.written == []


async def test_a_call_instead_of_a_function_is_explained(disk: Disk) -> None:
    async with disk.process(order) as supervisor:
        with pytest.raises(InvalidArgumentError, match="was called already"):
            await supervisor.spawn(order(None, 1), "o-1", 1)  # type: ignore[arg-type]


async def test_a_closed_supervisor_takes_nothing(disk: Disk) -> None:
    async with disk.process(refund) as supervisor:
        handle = await supervisor.spawn(refund, "r-1", 1)
    attempts: list[Callable[[], Any]] = [
        lambda: supervisor.spawn(refund, "r-1", 1),
        lambda: supervisor.get("r-1"),
        handle.result,
        lambda: handle.message("yes"),
        handle.wake,
        handle.recover,
        handle.evict,
        handle.cancel,
        handle.get_state,
        handle.get_output,
        handle.get_error,
        handle.history,
    ]
    for attempt in attempts:
        with pytest.raises(SupervisorClosedError, match="open another"):
            await attempt()
    assert issubclass(SupervisorClosedError, SupervisorError)


async def test_a_path_of_any_kind_is_a_directory(tmp_path: Path) -> None:
    for store in (tmp_path / "one", str(tmp_path / "two")):
        async with open_supervisor(store, [order], durability="normal") as supervisor:
            handle = await supervisor.spawn(order, "o-1", 1)
            assert await handle.result() == 1
            assert Path(supervisor.describe("o-1")) in _files(Path(store))


async def test_what_the_store_refuses_at_entry_comes_out_as_it_is(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a directory")
    with pytest.raises(StorageError, match=str(occupied)):
        async with open_supervisor(occupied, [order]):
            raise AssertionError("it was opened")
