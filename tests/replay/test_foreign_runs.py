"""What the reference engine leaves when it runs a workflow of ours for a while: our own keys stay as they were before.

tests/reference does this with the reference engine itself; here its writes are made by hand, so that they need no node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from harness import Host, Namespace, host
from trio.testing import MockClock

from perdure.storage import Batch, encode_value, layout
from perdure.storage.keys import pack
from perdure.storage.schema import (
    Branch,
    BranchStatus,
    EntryStatus,
    RaceEntry,
    StepEntry,
    encode_entry,
    encode_metadata,
)
from perdure.workflow import (
    Context,
    RollbackContext,
    RunMode,
    StepError,
    WorkflowFailedError,
    WorkflowState,
    replay_from_step,
)
from perdure.workflow.history import History

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def fetch() -> str:
    calls.append("fetch")
    if len(calls) == 1:
        raise ValueError("boom 1")
    return "fetched"


async def note(name: str) -> None:
    calls.append(name)


async def workflow(ctx: Context, _: object) -> str:
    return await ctx.step("fetch", fetch, max_retries=1)


async def let_the_reference_engine_exhaust_it(process: Host) -> None:
    """As it stores that the second attempt failed, and the workflow with it."""
    driver = await process.namespace.driver()
    history = await History.load(process.workflow_id, driver)
    (entry,) = history.entries()
    metadata = history.metadata(entry.id)
    assert metadata is not None
    text = "TypeError: boom 2"
    metadata.status, metadata.error, metadata.attempts = EntryStatus.EXHAUSTED, text, 2
    error = {"name": "StepExhaustedError", "message": f'Step "fetch" exhausted retries: {text}'}
    puts = {
        layout.entry_key(entry.location): encode_entry(entry._replace(kind=StepEntry(None, text))),
        layout.metadata_key(entry.id): encode_metadata(metadata),
        layout.STATE_KEY: b"failed",
        layout.ERROR_KEY: encode_value(error),
    }
    await driver.batch(Batch(puts=list(puts.items())))


async def failed_there(process: Host) -> None:
    stopped = await process.stop(workflow)
    assert stopped.state is WorkflowState.SLEEPING
    await process.restart()
    await let_the_reference_engine_exhaust_it(process)
    await process.restart()


async def test_a_step_that_failed_there_tells_that_failure_and_not_an_earlier_one(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16: the detail of our own attempt is not taken for that of a later attempt of the reference engine's."""
    seen: list[Any] = []

    async def catching(ctx: Context, _: object) -> None:
        try:
            await workflow(ctx, None)
        except StepError as error:
            seen.append((error.attempts, error.error.name, error.error.message))

    async with host(namespace, mode) as process:
        await failed_there(process)
        driver = await namespace.driver()
        await driver.batch(Batch(puts=[(layout.STATE_KEY, b"sleeping")], deletes=[layout.ERROR_KEY]))
        await process.finish(catching)
    assert seen == [(2, "TypeError", "boom 2")]
    assert calls == ["fetch"]


async def test_a_workflow_of_ours_that_failed_there_can_be_recovered(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16, S36: the reference engine does not say which steps failed the workflow, so all exhausted ones run again."""
    async with host(namespace, mode) as process:
        await failed_there(process)
        with pytest.raises(WorkflowFailedError, match="exhausted retries"):
            await process.stop(workflow)
        await process.restart()
        await process.control("recover")
        assert await process.finish(workflow) == "fetched"
    assert calls == ["fetch", "fetch"]


async def test_causes_of_an_earlier_failure_are_not_taken_for_those_of_one_there(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16, S36: the reference engine recovers a workflow without touching our keys, and may fail it by another step."""

    async def failing(ctx: Context, _: object) -> str:
        await ctx.step("note", note, "noted", max_retries=0)
        raise ValueError("not because of a step")

    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError, match="not because"):
            await process.stop(failing)
        await process.restart()
        calls.clear()
        driver = await namespace.driver()
        history = await History.load(process.workflow_id, driver)
        assert history.failure_causes == []
        (entry,) = history.entries()
        metadata = history.metadata(entry.id)
        assert metadata is not None
        metadata.status, metadata.error = EntryStatus.EXHAUSTED, "TypeError: boom"
        puts = {
            layout.entry_key(entry.location): encode_entry(entry._replace(kind=StepEntry(None, metadata.error))),
            layout.metadata_key(entry.id): encode_metadata(metadata),
            layout.ERROR_KEY: encode_value({"name": "StepExhaustedError", "message": "boom"}),
        }
        await driver.batch(Batch(puts=list(puts.items())))
        await process.restart()
        await process.control("recover")
        with pytest.raises(WorkflowFailedError, match="not because"):
            await process.stop(failing)
    assert calls == ["noted"], "the step ran again"


async def test_a_race_that_stopped_between_a_result_and_its_winner_is_won_by_that_result(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16, S29: the reference engine records a branch that succeeds while the run is ending, and names no winner."""

    async def slow(ctx: Context) -> str:
        await ctx.step("begin", note, "begin")
        await ctx.sleep("wait", 3600)
        return "slow"

    async def fast(ctx: Context) -> str:
        await ctx.queue.next("never")
        return "fast"

    async def racing(ctx: Context, _: object) -> list[str]:
        result = await ctx.race("first", {"slow": slow, "fast": fast})
        return [result.winner, result.value]

    async with host(namespace, mode) as process:
        await process.stop(racing)
        await process.restart()
        driver = await namespace.driver()
        history = await History.load(process.workflow_id, driver)
        (race,) = [entry for entry in history.entries() if isinstance(entry.kind, RaceEntry)]
        branches = {**race.kind.branches, "fast": Branch(BranchStatus.COMPLETED, encode_value("fast"), None)}
        stored = encode_entry(race._replace(kind=RaceEntry(None, branches)))
        await driver.batch(Batch(puts=[(layout.entry_key(race.location), stored)]))
        await process.restart()
        assert await process.finish(racing) == ["fast", "fast"]
        after = await namespace.entries()
        assert set(after) == {("first",)}, "what the others had recorded is forgotten, as after every race"
        assert after["first",].data["winner"] == "fast"
    assert calls == ["begin"]


async def test_steps_that_completed_there_are_rolled_back_in_their_turn(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16, S35: those have a time of completion, and no number."""

    def undo(name: str) -> Callable[[RollbackContext, Any], Awaitable[None]]:
        async def handler(ctx: RollbackContext, output: object) -> None:
            calls.append(f"undo {name}")

        return handler

    async def saga(ctx: Context, _: object) -> None:
        await ctx.rollback_checkpoint("start")
        for name in ("first", "second", "third", "fourth"):
            await ctx.step(name, note, name, rollback=undo(name))
            await ctx.sleep(f"after {name}", 1)
        raise ValueError("no")

    async with host(namespace, mode) as process:
        for name in ("first", "second", "third", "fourth"):
            await process.stop(saga)
            if name in ("second", "third"):  # as if the reference engine had made this run
                await process.restart()
                driver = await namespace.driver()
                entry = (await namespace.entries())[name,]
                await driver.batch(Batch(deletes=[layout.detail_key(entry.id)]))
                await process.restart()
            await process.advance(1)
        with pytest.raises(WorkflowFailedError, match="no"):
            await process.finish(saga)
    assert calls[4:] == ["undo fourth", "undo third", "undo second", "undo first"]


async def test_a_history_that_both_engines_recorded_is_replayed_from_a_step_with_all_that_follows_it(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S14, S16: what was recorded there after a step of ours goes as well, though its ids have no order."""

    async def three(ctx: Context, _: object) -> None:
        for name in ("first", "second", "third"):
            await ctx.step(name, note, name)

    async with host(namespace, mode) as process:
        await process.stop(three)
        await process.restart()
        driver = await namespace.driver()
        history = await History.load(process.workflow_id, driver)
        first, second, third = sorted(history.entries(), key=lambda entry: entry.location)
        metadata = history.metadata(third.id)
        assert metadata is not None
        theirs = third._replace(id="00000000-0000-4000-8000-000000000000")
        puts = [
            (layout.entry_key(theirs.location), encode_entry(theirs)),
            (layout.metadata_key(theirs.id), encode_metadata(metadata)),
        ]
        await driver.batch(Batch(puts=puts, deletes=[layout.metadata_key(third.id)]))
        await process.restart()
        left = await replay_from_step(await namespace.driver(), second.id, clock=process.clock)
        assert [entry.id for entry in left.entries] == [first.id]
        await process.finish(three)
    assert calls == ["first", "second", "third", "second", "third"]


async def test_what_the_host_of_the_reference_engine_keeps_beside_is_left_as_it_is(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16: keys that are neither engine's, under 5, are neither read nor written."""
    trace = {pack((5,)): b"trace", pack((5, "span", 1)): b"\xff"}
    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        await driver.batch(Batch(puts=list(trace.items())))
        calls.append("one attempt")  # the next one works
        assert await process.finish(workflow) == "fetched"
        stored = await namespace.dump()
    assert {key: value for key, value in stored.items() if key.startswith(pack((5,)))} == trace
