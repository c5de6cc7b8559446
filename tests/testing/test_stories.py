"""A run is told in words that a user knows: entries by name, results, messages, effects; no keys and no bytes."""

from __future__ import annotations

from typing import Any

from perdure.storage import Batch, layout
from perdure.testing import CrashPoint, EffectLedger, FinishedRun, Mail, WritePoint, explore_crashes
from perdure.testing.outline import outline_of, shown
from perdure.testing.story import story_of
from perdure.testing.wording import Wording
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    HistoryEntry,
    RollbackContext,
    current_step,
    workflow,
)

bank = EffectLedger("bank")


async def pay(cents: int) -> str:
    return str(bank.record("charge", cents, key=current_step().idempotency_key, returns="pay-1"))


async def undo(ctx: RollbackContext, output: str) -> None:
    bank.record("refund", output, key=ctx.idempotency_key)


async def fail() -> None:
    raise CriticalError("sold out")


async def left(ctx: Context) -> str:
    return await ctx.step("pay", pay, 1)


async def right(ctx: Context) -> str:
    await ctx.sleep("nap", 3600)
    return "late"


async def body(ctx: Context, state: int) -> Continue[int] | Break[int]:
    message = await ctx.queue.next("item", completable=True)
    await message.complete()
    return Continue(state + 1) if state < 1 else Break(state)


@workflow
async def everything(ctx: Context, _: None) -> None:
    await ctx.rollback_checkpoint("here")
    await ctx.get_version("new-way", 2)
    await ctx.step("charge", pay, 5, rollback=undo)
    await ctx.join("both", {"left": left, "right": right})
    await ctx.race("first", {"left": left, "right": right})
    await ctx.loop("items", body, 0)
    await ctx.step("reserve", fail)


async def story(only: str) -> tuple[str, FinishedRun]:
    runs: list[FinishedRun] = []
    mail = [Mail("item", "a"), Mail("item", "b")]
    await explore_crashes(everything, messages=mail, ends_as="failed", only=only, check=runs.append)
    return story_of(runs[-1]), runs[-1]


async def test_every_kind_of_entry_has_its_words() -> None:
    """S39: nothing that a workflow records is left out of its story."""
    _, run = await story("no crash@seed0")
    wording = Wording(tells_workflow=False)
    told = [phrase for point in run.writes for phrase in wording.of(point)]
    for expected in (
        "workflow 'everything-1' is made, with input None",
        "message 'item' arrives: 'a'",
        "rollback checkpoint 'here'",
        "version of 'new-way' is 2",
        "step 'charge' is recorded: 'pay-1'",
        "join 'both': 'left' completed, 'right' completed",
        "sleep 'both/right/nap' begins",
        "sleep 'both/right/nap' ends",
        "race 'first' is won by 'left'",
        "loop 'items' begins",
        "queue 'items/0/item:0' reads message 'item': 'a'",
        "queue 'items/0/item:0' is done with message 'item': 'a'",
        "loop 'items' goes on with iteration 1, state 1",
        "loop 'items' ends: 1",
        "step 'reserve' fails: CriticalError: sold out (attempt 1)",
        "workflow 'everything-1' begins to roll back: CriticalError: sold out",
        "step 'charge' is undone",
        "workflow 'everything-1' ends as failed",
    ):
        assert expected in told, "\n".join(told)


async def test_a_story_tells_each_process_and_where_it_died() -> None:
    told, run = await story("12/before+2/after@seed0")
    lines = told.splitlines()
    assert [line for line in lines if line.startswith("  process")] == [f"  process {number}" for number in (1, 2, 3)]
    assert sum("CRASH" in line for line in lines) == 2
    assert lines[-1] == "    end        failed: CriticalError: sold out"
    assert run.crashes == (CrashPoint(12, "before"), CrashPoint(2, "after"))
    assert [point.number for point in run.deaths] == [12, 2]
    assert [len(run.writes_of(process)) for process in (0, 1)] == [12, 3]


async def test_what_was_not_written_is_told_and_forgotten() -> None:
    """The process died before the name was written; the next one may give that number to another."""
    wording = Wording(tells_workflow=False)

    def naming(name: bytes, number: int) -> WritePoint:
        return WritePoint(0, number, "batch", "w", Batch(puts=[(layout.name_key(0), name)]))

    assert wording.unmade(naming(b"first", 0)) == "bookkeeping of workflow 'w'"
    assert wording.unmade(naming(b"first", 0)) == wording.named(naming(b"second", 0))


async def test_what_cannot_be_read_is_told_as_such() -> None:
    batch = Batch(puts=[(layout.HISTORY_PREFIX + b"\x14", b"\xff")])
    assert Wording(tells_workflow=True).of(WritePoint(0, 0, "batch", "w", batch)) == ["(what cannot be read here) [w]"]


def test_long_values_are_cut_and_strange_ones_shown() -> None:
    class Strange:
        def __repr__(self) -> str:
            raise RuntimeError

    assert len(shown("x" * 1000)) == 80
    assert shown(Strange()) == "<Strange, whose repr raised RuntimeError>"


def test_an_outline_leaves_out_what_may_differ_and_nothing_else() -> None:
    def outline(path: tuple[str | int, ...], kind: str, **data: Any) -> dict[str, Any]:
        (line,) = outline_of([HistoryEntry(path, kind, data, None, "id")], ignore=["ignored"])
        return line.says

    branches = {"a": {"status": "completed"}, "b": {"status": "running"}}
    assert outline(("r",), "race", winner="a", branches=branches)["branches"] == {"a": {"status": "completed"}}
    assert outline(("r",), "race", winner=None, branches=branches)["branches"] == branches
    assert outline(("s",), "sleep", deadline_ms=5, state="completed") == {"state": "completed"}
    assert outline(("s",), "step", output=5, error=None) == {"output": 5, "error": None}
    assert outline(("ignored",), "step", output=5, error=None)["output"] == "…"
    assert outline(("q:count",), "message", name="q:count", body=1) == {"count": 1}
    stored = {"id": "x", "name": "q", "body": 5, "createdAt": 1.0, "completed": False}
    assert outline(("q:0",), "message", name="q", body=stored) == {"name": "q", "body": 5, "completed": False}
