"""A portal's two faces have all that a supervisor and its handles have, with the same arguments."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from portals import adder

from perdure.actors import (
    ActorHandle,
    ScheduleHandle,
    ScheduleNotFoundError,
    Supervisor,
    SupervisorClosedError,
    WorkflowStateChanged,
)
from perdure.actors.portal import (
    AsyncioEvents,
    AsyncioHandle,
    AsyncioScheduleHandle,
    AsyncioSupervisor,
    BlockingHandle,
    BlockingScheduleHandle,
    BlockingSupervisor,
    open_asyncio_portal,
    open_portal,
)
from perdure.storage import MemoryStore
from perdure.workflow import (
    Context,
    InvalidArgumentError,
    MailboxFullError,
    RequestTimeoutError,
    WorkflowState,
    workflow,
)
from perdure.workflow.checks import is_coroutine_function

ORIGINALS: list[tuple[type, type, type]] = [
    (Supervisor, BlockingSupervisor, AsyncioSupervisor),
    (ActorHandle, BlockingHandle, AsyncioHandle),
    (ScheduleHandle, BlockingScheduleHandle, AsyncioScheduleHandle),
]
OWN = {"hurry"}
"""What a supervisor has for the portal itself."""

PLAIN = {"describe", "events"}
"""What looks at nothing that changes, or is a block to enter, so that it is not awaited on either face."""

HINT = "a portal lacks it, or has it otherwise: add a method of a line or two to portal/blocking.py and portal/awaitable.py"


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {name: member for name, member in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def arguments(method: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    parameters = inspect.signature(method).parameters
    return {name: (parameter.kind, parameter.default) for name, parameter in parameters.items() if name != "self"}


CASES = [
    pytest.param(method, face, name, id=f"{face.__name__}.{name}")
    for original, *faces in ORIGINALS
    for name, method in methods(original).items()
    if name not in OWN
    for face in faces
]


@pytest.mark.parametrize(("original", "face", "name"), CASES)
def test_a_face_has_each_method_with_its_arguments(original: Callable[..., Any], face: type, name: str) -> None:
    method = methods(face).get(name)
    assert method is not None, HINT
    wanted, given = arguments(original), arguments(method)
    if "options" in given:  # typed by a dictionary of the original's
        assert wanted.items() >= {key: value for key, value in given.items() if key != "options"}.items(), HINT
    else:
        if face.__name__.startswith("Blocking") and "timeout" not in wanted:
            given.pop("timeout", None)
        assert given == wanted, HINT
    assert is_coroutine_function(method) == (face.__name__.startswith("Asyncio") and name not in PLAIN)


def test_schedules_are_made_looked_at_paused_and_removed_on_both_faces() -> None:
    with open_portal(MemoryStore(), [adder]) as supervisor:
        handle = supervisor.schedule("sums", adder, [1, 2], every=3600)
        assert (handle.name, repr(handle)) == ("sums", "<schedule 'sums'>")
        handle.pause()
        assert supervisor.get_schedule("sums").info().is_paused
        handle.resume()
        assert [schedule.is_paused for schedule in supervisor.schedules()] == [False]
        supervisor.unschedule("sums")
        with pytest.raises(ScheduleNotFoundError):
            handle.info()

    async def main() -> None:
        async with open_asyncio_portal(MemoryStore(), [adder]) as supervisor:
            handle = await supervisor.schedule("sums", adder, [1, 2], every=3600)
            assert (handle.name, repr(handle)) == ("sums", "<schedule 'sums'>")
            await handle.pause()
            assert (await (await supervisor.get_schedule("sums")).info()).is_paused
            await handle.resume()
            assert [schedule.is_paused for schedule in await supervisor.schedules()] == [False]
            await supervisor.unschedule("sums")
            with pytest.raises(ScheduleNotFoundError):
                await handle.info()

    asyncio.run(main())


def test_workflows_are_looked_at_told_of_and_tidied_on_both_faces(tmp_path: Path) -> None:
    with open_portal(MemoryStore(), [adder]) as supervisor:
        with supervisor.events() as events:
            handle = supervisor.spawn(adder, "sum-1", [1, 2], attributes={"customer": 7})
            assert handle.result() == 3
            assert [event.workflow_id for event, _ in zip(events, range(2), strict=False)] == ["sum-1"] * 2
        assert [info.id for info in supervisor.list(attributes={"customer": 7}, workflow=adder)] == ["sum-1"]
        assert supervisor.count(state="completed") == 1
        assert supervisor.stats().activations == 1
        assert supervisor.faulted() == []
        assert supervisor.reindex() == 0
        assert supervisor.backup(tmp_path / "copy") == {}
        supervisor.delete("sum-1")
        assert supervisor.count() == 0
        with supervisor.events() as rest:
            thread = threading.Thread(target=lambda: told.extend(rest))
            told: list[WorkflowStateChanged] = []
            thread.start()
            supervisor.spawn(adder, "sum-2", [1, 2]).result()
    thread.join()
    assert told[-1].new is WorkflowState.COMPLETED

    async def main() -> None:
        async with open_asyncio_portal(tmp_path / "copy", [adder]) as supervisor:
            async with supervisor.events(buffer=5) as events:
                assert (await (await supervisor.get("sum-1")).result()) == 3
                await supervisor.delete("sum-1")
                event = await anext(events)
                assert (event.workflow_id, event.new) == ("sum-1", None)
                await (await supervisor.spawn(adder, "sum-2", [3])).result()
            assert [info.id for info in await supervisor.list()] == ["sum-2"]
            assert await supervisor.count(state="failed") == 0
            assert (await supervisor.stats()).live == 0
            assert await supervisor.faulted(limit=3) == []
            assert await supervisor.reindex() == 0
            assert await supervisor.backup(tmp_path / "sum-2.sqlite", "sum-2") == {}
            async with supervisor.events() as rest:
                reader = asyncio.create_task(_read(rest))
                await asyncio.sleep(0)
        assert await reader == 0

    asyncio.run(main())


async def _read(events: AsyncioEvents) -> int:
    return len([event async for event in events])


def test_who_gives_up_waiting_for_an_event_has_it_the_next_time() -> None:
    """Also when the event was on its way to it in that moment."""
    spawned = 50

    async def main() -> None:
        async with open_asyncio_portal(MemoryStore(), [adder]) as supervisor:
            spawning = asyncio.create_task(_spawn(supervisor, spawned))
            completed = impatient = 0
            async with supervisor.events(buffer=10_000) as events:
                while completed < spawned:
                    try:
                        event = await asyncio.wait_for(anext(events), 0.0005)
                    except TimeoutError:
                        impatient += 1
                        continue
                    assert event.missed == 0
                    completed += event.new is WorkflowState.COMPLETED
            assert impatient > 0
            await spawning

    asyncio.run(main())
    with open_portal(MemoryStore(), [adder]) as supervisor, supervisor.events() as events:
        with pytest.raises(TimeoutError):
            events.next(timeout=0.01)
        supervisor.spawn(adder, "sum-1", [1])
        first = events.next(timeout=10)
        assert first is not None
        assert (first.workflow_id, first.old) == ("sum-1", None)
        with pytest.raises(InvalidArgumentError, match=r"timeout=10\.0"):
            events.next(timeout=-1)


async def _spawn(supervisor: AsyncioSupervisor, number: int) -> None:
    await asyncio.sleep(0.05)
    for index in range(number):
        await supervisor.spawn(adder, f"sum-{index}", [index])


@workflow(name="clerk")
async def clerk(ctx: Context, _: None) -> str:
    """Answers one question, by asking another workflow, and ends at a message."""
    question = await ctx.queue.next("question", completable=True)
    await question.complete(await ctx.call("sum", adder, question.body))
    return str((await ctx.queue.next("end", names=["end"])).body)


def test_requests_mail_and_children_on_both_faces() -> None:
    """S28: the same request again has the same reply."""
    with open_portal(MemoryStore(), [adder, clerk], mailbox_limit=1) as supervisor:
        handle = supervisor.spawn(clerk, "clerk-1")
        for _ in range(2):
            assert handle.request("question", [1, 2], timeout=20, id="q-1", reply_type=int) == 3
        assert [child.workflow for child in handle.children()] == ["adder"]
        handle.message_nowait("other", 1)
        with pytest.raises(MailboxFullError):
            handle.message_nowait("other", 2)
        with pytest.raises(TimeoutError):
            handle.message("other", 2, timeout=0.01)
        with pytest.raises(RequestTimeoutError):
            handle.request("question", [3], timeout=0.01)
        assert [message.body for message in handle.undelivered()] == [1]
        handle.cancel()

    async def main() -> None:
        async with open_asyncio_portal(MemoryStore(), [adder, clerk], mailbox_limit=1) as supervisor:
            handle = await supervisor.spawn(clerk, "clerk-1")
            for _ in range(2):
                assert await handle.request("question", [1, 2], timeout=20, id="q-1") == 3
            assert [child.workflow for child in await handle.children()] == ["adder"]
            await handle.message_nowait("other", 1)
            with pytest.raises(MailboxFullError):
                await handle.message_nowait("other", 2)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle.message("other", 2), 0.01)
            with pytest.raises(RequestTimeoutError):
                await handle.request("question", [3], timeout=0.01)
            assert [message.body for message in await handle.undelivered()] == [1]
            await handle.cancel()

    asyncio.run(main())


def test_draining_on_both_faces_leaves_nothing_live_and_takes_nothing_more() -> None:
    """S49."""
    with open_portal(MemoryStore(), [adder, clerk]) as supervisor:
        handle = supervisor.spawn(clerk, "clerk-1")
        supervisor.drain(grace=5)
        with pytest.raises(SupervisorClosedError):
            handle.message("end")

    async def main() -> None:
        async with open_asyncio_portal(MemoryStore(), [adder, clerk]) as supervisor:
            handle = await supervisor.spawn(clerk, "clerk-1")
            await supervisor.drain(grace=5)
            with pytest.raises(SupervisorClosedError):
                await handle.message("end")

    asyncio.run(main())
