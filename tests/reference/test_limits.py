"""Where the reference engine does otherwise with a history of ours than this engine does, or cannot go on with it.

None of this is in the bytes: it does the same with its own. Whoever moves a workflow there should know it, and
docs/reference/storage-format.md says it; should a later version of the reference engine do better, these tests tell.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import START_MS, WORKFLOW_ID, Mail, Position, ReferenceEngine, run_ours
from harness import Host, MovableClock, Namespace
from trio.testing import MockClock
from twins import flaky
from vectors import WORKFLOWS, Workflow, effects, give, refuse, undo

from perdure.storage import Batch, DecodeError, TaggedValue, encode_value, layout
from perdure.workflow import Break, Context, CriticalError, StepError, WorkflowCancelledError, run_workflow

RunOurs = Callable[..., Awaitable[Position]]
START = Position({}, now_ms=START_MS)


@pytest.fixture
def ours(tmp_path: Path) -> RunOurs:
    """Runs a workflow on this engine, in a namespace of its own."""

    async def run(position: Position, fn: Workflow, action: str = "run") -> Position:
        return await run_ours(Namespace("memory", tmp_path), "yield", position, fn, None, action)

    return run


def sent(position: Position, name: str = "next") -> Position:
    mail = Mail(f"message-{position.now_ms}", name, encode_value(2), position.now_ms)
    return replace(position, now_ms=position.now_ms + 1000, mail=(*position.mail, mail))


async def work_once(inner: Context, _: None) -> Break[None]:
    await inner.step("work", give, "work", None)
    return Break(None)


async def nested(ctx: Context, _: object) -> str:
    async def outer(inner: Context, _: None) -> Break[str]:
        await inner.loop("inner", work_once)
        await inner.queue.next("next")
        return Break("done")

    return await ctx.loop("outer", outer)


async def test_a_finished_loop_within_an_iteration_is_divergence_there_and_recovers_here(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S1, S16: it fails the workflow after a restart; recover() here lets it go on where it was."""
    position = sent(await ours(START, nested))
    failed = theirs.run(position, "nested", None)
    assert (failed.stored_state, failed.result) == ("failed", "HistoryDivergedError")
    assert theirs.run(sent(theirs.run(START, "nested", None)), "nested", None).result == "HistoryDivergedError"
    recovered = await ours(failed, nested, "recover")
    assert (recovered.state, recovered.result, recovered.effects) == ("completed", "done", ("work",))


async def within(ctx: Context, _: object) -> dict[str, Any]:
    async def raced(branch: Context) -> str:
        async def word(inner: Context) -> None:
            await inner.queue.next("word", names=["word"])

        async def other(inner: Context) -> None:
            await inner.queue.next("other", names=["other"])

        return (await branch.race("inner", {"word": word, "other": other})).winner

    async def joined(branch: Context) -> int:
        async def a(inner: Context) -> int:
            return await inner.step("work", give, "a", 1)

        async def b(inner: Context) -> int:
            return (await inner.queue.next("number", names=["number"])).body

        both = await branch.join("inner", {"a": a, "b": b})
        return both["a"] + both["b"]

    return await ctx.join("outer", {"raced": raced, "joined": joined})


async def test_a_settled_branch_within_a_branch_is_divergence_there_and_recovers_here(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S1, S16: as a loop within a loop; the same goes for a race, and for a loop within a branch."""
    failed = theirs.run(sent(await ours(START, within), "number"), "within", None)
    assert (failed.stored_state, failed.result) == ("failed", "HistoryDivergedError")
    recovered = await ours(sent(failed, "word"), within, "recover")
    assert (recovered.state, recovered.result) == ("completed", {"raced": "word", "joined": 3})
    assert recovered.effects == ("a",)


async def test_a_critical_failure_is_told_as_exhausted_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S3, S16: what try_step returns changes with a replay there, and not here."""
    failed = (await ours(START, WORKFLOWS["tried"])).writes[-2]
    assert theirs.run(failed, "tried", None).result["kind"] == "exhausted"
    assert (await ours(failed, WORKFLOWS["tried"])).result["kind"] == "critical"


async def test_names_with_slashes_can_be_taken_for_others_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S5, S16: its places are names joined by slashes, with `~0` for an iteration."""

    async def aliased(ctx: Context, _: object) -> list[str]:
        async def body(inner: Context, _: None) -> Break[str]:
            return Break(await inner.step("add", give, "add", "added"))

        first = await ctx.step("count/~0/add", give, "slashes", "slashes")
        await ctx.queue.next("next")
        return [first, await ctx.loop("count", body)]

    position = sent(await ours(START, aliased))
    assert theirs.run(position, "aliased", None).result == ["slashes", "slashes"]
    assert (await ours(position, aliased)).result == ["slashes", "added"]


async def test_a_step_that_may_run_at_most_once_runs_again_there_if_it_has_retries(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S16, S22: that it was begun counts as a failed attempt, so with `maxRetries: 0` it does not run again."""

    async def once(ctx: Context, _: object) -> str:
        return await ctx.step("once", give, "once", "done", at_most_once=True)

    begun = replace((await ours(START, once)).writes[0], effects=("once",), now_ms=START_MS + 1000)
    assert (await ours(begun, once)).result == "StepInterruptedError"
    there = theirs.run(begun, "once", None)
    assert (there.result, there.effects) == ("StepExhaustedError", ("once",))
    assert theirs.run(begun, "once again", None).effects == ("once", "once")


async def test_a_critical_failure_that_was_caught_runs_again_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S3, S16: a failed step replays only if its attempts are over its retries. `max_retries=0` keeps it from running."""

    async def decline() -> None:
        effects.append("charge")
        raise CriticalError("declined")

    async def critical(ctx: Context, _: object) -> str:
        caught = ""
        try:
            await ctx.step("charge", decline)
        except StepError as error:
            caught = error.error.message
        await ctx.queue.next("next")
        return caught

    position = sent(await ours(START, critical))
    assert theirs.run(position, "critical", None).effects == ("charge", "charge")
    assert (await ours(position, critical)).effects == ("charge",)


async def test_a_version_first_asked_for_after_a_finished_loop_is_1_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S2, S16: it takes the loop's entries for those of older code. What it recorded is kept to here."""

    async def versioned(ctx: Context, _: object) -> int:
        await ctx.loop("inner", work_once)
        await ctx.queue.next("next")
        return await ctx.get_version("pricing", 2)

    position = sent(await ours(START, versioned))
    there = theirs.run(position, "versioned", None)
    assert there.result == 1
    assert (await ours(position, versioned)).result == 2
    unfinished = replace(there, kv={**there.kv, layout.STATE_KEY: b"running"})
    del unfinished.kv[layout.OUTPUT_KEY]
    assert (await ours(unfinished, versioned)).result == 1


async def test_a_timeout_beats_a_message_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S16, S26: one that arrived in time stays in the mailbox when the run comes late."""

    async def late(ctx: Context, _: object) -> int:
        return len(await ctx.queue.next_batch("late", names=["late"], timeout=1))

    position = sent(await ours(START, late), "late")
    there, here = theirs.run(position, "late", None), await ours(position, late)
    assert (there.result, len(there.mail)) == (0, 1)
    assert (here.result, len(here.mail)) == (1, 0)


@pytest.mark.parametrize("value", [TaggedValue(29, 5), TaggedValue(2**32, None)])
async def test_a_tagged_value_can_make_a_workflow_unreadable_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine, value: TaggedValue
) -> None:
    """S16: a tag whose meaning there does not fit its content, or a large one; this engine stores it as it comes."""

    async def unreadable(ctx: Context, _: object) -> Any:
        return await ctx.step("value", give, "value", value)

    position = (await ours(START, unreadable)).writes[-2]
    assert theirs.run(position, "unreadable", None).state == "threw"
    assert (await ours(position, unreadable)).result == value


async def test_a_name_that_was_lost_there_is_missed_here(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S15, S16: two branches that write at once lose one, and then no engine can tell what is recorded under it."""
    position = theirs.run(START, "race", None, is_hasty=True)
    assert position.state == "completed"
    assert theirs.run(position, "race", None).state == "threw"
    with pytest.raises(DecodeError, match="the name registry"):
        await ours(position, WORKFLOWS["race"])


async def hidden(ctx: Context, _: object) -> None:
    async def branch(inner: Context) -> None:
        await inner.step("within", give, "within", 2, rollback=undo("within"))

    await ctx.rollback_checkpoint("start")
    await ctx.step("first", give, "first", 1, rollback=undo("first"))
    await ctx.join("both", {"a": branch})
    await ctx.try_step("caught", refuse, "caught", "declined", max_retries=0)
    await ctx.step("last", give, "last", 3, rollback=undo("last"))
    raise CriticalError("no seats")


async def test_rollback_there_passes_over_branches_and_ends_at_a_failure_that_was_caught(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S16, S35: handlers that it does not find do not run, and the workflow ends as failed all the same."""
    done = await ours(START, hidden)
    forward = ("first", "within", "caught", "last")
    assert done.effects == (*forward, "undo last 3", "undo within 2", "undo first 1")
    cut = next(write for write in done.writes if write.stored_state == "rolling_back")
    there = theirs.run(cut, "hidden", None)
    assert (there.stored_state, there.effects) == ("failed", (*forward, "undo first 1"))
    assert theirs.run(START, "hidden", None).effects == (*forward, "undo first 1")


async def joined(ctx: Context, _: object) -> dict[str, int]:
    async def good(branch: Context) -> int:
        return await branch.step("good", give, "good", 1)

    async def bad(branch: Context) -> int:
        return await branch.step("bad", flaky, "bad", 1, max_retries=0)

    return await ctx.join("all", {"good": good, "bad": bad})


async def test_a_failed_join_is_recovered_here_and_not_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S16, S36: recover() resets the failed step there, and not the failed branch, whichever engine ran it."""
    for failed in (await ours(START, joined), theirs.run(START, "joined", None)):
        assert failed.result == "JoinError"
        there = theirs.run(failed, "joined", None, "recover")
        assert (there.result, there.effects) == ("JoinError", failed.effects)
    here = await ours(await ours(START, joined), joined, "recover")
    assert (here.result, sorted(here.effects)) == ({"good": 1, "bad": 2}, ["bad 1", "bad 2", "good"])


async def test_what_was_rolled_back_runs_again_after_recover_here_and_not_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S16, S36: there the workflow goes on as if what was undone were done."""

    async def compensated(ctx: Context, _: object) -> int:
        await ctx.rollback_checkpoint("start")
        await ctx.step("first", give, "first", 1, rollback=undo("first"))
        return await ctx.step("fetch", flaky, "fetch", 1, max_retries=0)

    forward = ("first", "fetch 1", "undo first 1")
    for failed in (await ours(START, compensated), theirs.run(START, "compensated", None)):
        assert failed.effects == forward
        there = theirs.run(failed, "compensated", None, "recover")
        assert (there.result, there.effects) == (2, (*forward, "fetch 2"))
        here = await ours(failed, compensated, "recover")
        assert (here.result, here.effects) == (2, (*forward, "first", "fetch 2"))


async def test_an_ended_workflow_that_is_run_again_runs_there(
    autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S16, S34: whatever code is deployed by then; its host must not ask for it."""

    async def other(ctx: Context, _: object) -> Any:
        return await ctx.step("price", give, "price", 1)

    ended = await ours(START, WORKFLOWS["race"])
    assert ended.stored_state == "completed"
    assert theirs.run(ended, "migrate", None).effects == ("work", "price")
    again = await ours(ended, other)
    assert (again.result, again.effects, again.writes) == (ended.result, ended.effects, ())


# What both keep to.


async def test_a_workflow_cancelled_by_one_engine_is_cancelled_for_the_other(
    tmp_path: Path, autojump_clock: MockClock, ours: RunOurs, theirs: ReferenceEngine
) -> None:
    """S16, S32: nothing runs, nothing is written."""
    position = await ours(START, WORKFLOWS["join"])
    namespace = Namespace("memory", tmp_path)
    driver = await namespace.driver()
    await driver.batch(Batch(puts=list(position.kv.items())))
    async with Host(namespace, "yield", WORKFLOW_ID, MovableClock(START_MS)) as process:
        await process.control("cancel")
        cancelled = replace(position, kv=await namespace.dump())
        assert cancelled.stored_state == "cancelled"
        after = theirs.run(cancelled, "join", None)
        assert (after.state, after.result, after.kv) == ("threw", "EvictedError", cancelled.kv)
        with pytest.raises(WorkflowCancelledError):
            await run_workflow(WORKFLOW_ID, WORKFLOWS["join"], None, driver)


@pytest.mark.parametrize(("name", "effects_there"), [("sleep", ()), ("retry", ("attempt 2",))])
async def test_what_was_woken_here_goes_on_there(
    tmp_path: Path,
    autojump_clock: MockClock,
    ours: RunOurs,
    theirs: ReferenceEngine,
    name: str,
    effects_there: tuple[str],
) -> None:
    """S16, S24: an interrupted sleep is over, and a retry that was made due is due."""
    namespace = Namespace("memory", tmp_path)
    driver = await namespace.driver()
    given = {"at": 4_102_444_800_000.0}
    async with Host(namespace, "yield", WORKFLOW_ID, MovableClock(START_MS)) as process:
        effects.clear()
        await process.stop(WORKFLOWS[name], given)
        await process.control("wake")
        position = Position(await namespace.dump(), await driver.get_alarm(WORKFLOW_ID), effects=tuple(effects))
    there = theirs.run(position, name, None)
    assert there.effects == position.effects + effects_there
    assert there.state == ("completed" if name == "sleep" else "sleeping")
