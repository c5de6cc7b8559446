"""Old histories against new code: what fits, what does not and what is said of it, and the files that hold them."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import trio
from trio.testing import MockClock
from value_codecs import XorCodec

from perdure.actors import open_supervisor
from perdure.storage import CodedDriver, DecodeError, MemoryDriver, SqliteDriver, StoreLockedError
from perdure.testing import (
    HistoryFileError,
    NotReplayableError,
    RecordedHistory,
    assert_replayable,
    read_history,
    record_history,
    run_virtual,
    virtual_supervisor,
)
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    InvalidArgumentError,
    RollbackContext,
    TrioClock,
    Workflow,
    WorkflowFailedError,
    WorkflowState,
    load_snapshot,
    run_workflow,
    send_message,
    workflow,
)

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def charge(cents: int) -> str:
    calls.append("charge")
    return "pay-1"


async def notify(tracking: str) -> None:
    calls.append("notify")


def slow(value: int) -> int:
    time.sleep(0.05)
    calls.append("slow")
    return value


async def fail() -> None:
    calls.append("fail")
    raise CriticalError("no")


async def undo(ctx: RollbackContext, output: Any) -> None:
    calls.append(f"undo {ctx.step_name}")


@workflow
async def order(ctx: Context, cents: int) -> str:
    payment = await ctx.step("charge", charge, cents)
    shipment = await ctx.queue.next("wait-for-shipment", names=["shipped"], timeout=3600)
    await ctx.step("notify", notify, shipment.body)
    return payment


def changed(function: Callable[[Context, Any], Awaitable[Any]]) -> Workflow[Any, Any]:
    """Other code, deployed under the name of the old."""
    return workflow(name="order")(function)


@changed
async def renamed(ctx: Context, cents: int) -> str:
    payment = await ctx.step("charge-card", charge, cents)
    await ctx.queue.next("wait-for-shipment", names=["shipped"])
    return payment


@changed
async def versioned(ctx: Context, cents: int) -> str:
    name = "charge" if await ctx.get_version("card", 2) < 2 else "charge-card"
    payment = await ctx.step(name, charge, cents)
    shipment = await ctx.queue.next("wait-for-shipment", names=["shipped"], timeout=3600)
    await ctx.step("notify", notify, shipment.body)
    await ctx.step("ask-for-a-review", notify, "")
    return payment


@changed
async def shortened(ctx: Context, cents: int) -> str:
    return "nothing"


@changed
async def prefixed(ctx: Context, cents: int) -> str:
    await ctx.step("greet", notify, "")
    return await order(ctx, cents)


@changed
async def retyped(ctx: Context, cents: list[int]) -> str:
    return await order(ctx, cents[0])


async def stored(function: Workflow[Any, Any], mail: int = 0, driver: Any = None, runs: int = 1) -> RecordedHistory:
    """Run it as far as it comes, and record that."""
    driver = MemoryDriver() if driver is None else driver
    clock = TrioClock(1_700_000_000_000)
    for _ in range(mail):
        await send_message(driver, "shipped", "T", clock=clock)
    for _ in range(runs):
        try:
            await run_workflow("w", function, 5, driver, clock=clock)
        except WorkflowFailedError:
            break
    return await record_history(driver, workflow_id="w", clock=clock)


def recorded(*args: Any, **options: Any) -> RecordedHistory:
    async def main() -> RecordedHistory:
        return await stored(*args, **options)

    history = run_virtual(main)
    calls.clear()
    return history


def test_what_waits_is_replayed_as_far_as_where_it_waits_and_calls_nothing() -> None:
    """What was told of it is what its code says."""
    history = recorded(order)
    assert str(history) == (
        "workflow 'w' (order) is sleeping, and waits for a message, in the read 'wait-for-shipment'; "
        "the time of 'wait-for-shipment:deadline', at 2023-11-14T23:13:20.000+00:00"
    )
    replay = assert_replayable(order, history)
    assert (replay.has_ended, replay.new) == (False, ())
    assert (replay.waits_for, replay.waits_until) == (("shipped",), 1_700_003_600.0)
    assert calls == []


def test_a_renamed_step_is_told_with_its_place_and_with_what_to_write() -> None:
    """S4: the place, what history holds, what the code asks for, and `get_version`."""
    with pytest.raises(NotReplayableError) as caught:
        assert_replayable(renamed, recorded(order))
    text = str(caught.value)
    assert caught.value.location == "'charge'"
    assert (caught.value.workflow_id, caught.value.workflow) == ("w", "order")
    assert "workflow 'w' (order) is sleeping" in text
    assert "HistoryDivergedError: history holds a step 'charge'" in text
    assert "step 'charge-card'" in text
    assert "ctx.removed('charge', 'step')" in text
    assert 'if await ctx.get_version("this-change", 2) < 2:' in text
    assert isinstance(caught.value, AssertionError)
    assert calls == []


def test_what_it_tells_to_write_works() -> None:
    """S2: a version at the place of the change, and new steps behind the wait."""
    assert assert_replayable(versioned, recorded(order)).waits_for == ("shipped",)
    assert_replayable(versioned, recorded(order, mail=1))
    assert calls == []


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (shortened, "the code ended without asking for it"),
        (prefixed, "goes on to step 'greet'"),
        (retyped, "StoredValueError"),
    ],
)
def test_code_that_does_not_fit_is_told(code: Workflow[Any, Any], what: str) -> None:
    with pytest.raises(NotReplayableError, match=what):
        assert_replayable(code, recorded(order))


def test_a_later_time_shows_the_code_behind_the_timeout() -> None:
    history = recorded(order)
    assert not assert_replayable(order, history).has_ended
    late = assert_replayable(order, history, at=1_700_003_601.0)
    assert late.has_ended
    assert late.error is not None
    assert late.error.name == "QueueTimeoutError"
    assert assert_replayable(order, history, at=datetime.fromtimestamp(1_700_003_601, UTC)) == late
    assert get_type_hints(assert_replayable)["at"] == float | datetime | None


@pytest.mark.parametrize("at", [99, 3600.0, datetime(2023, 11, 14, tzinfo=UTC)])
@pytest.mark.parametrize("is_file", [False, True])
def test_a_time_before_the_recording_is_refused(at: float | datetime, is_file: bool, tmp_path: Path) -> None:
    """Seconds since the recording, most likely. A file of `record_history` says when that was, too."""
    history = recorded(order)
    history.save(tmp_path / "a.json")
    with pytest.raises(InvalidArgumentError, match=r"seconds since the epoch: an hour later is at=1\d{9}"):
        assert_replayable(order, tmp_path / "a.json" if is_file else history, at=at)


def test_pairs_are_replayed_at_any_time_as_they_do_not_say_when_they_were_recorded() -> None:
    assert assert_replayable(order, recorded(order).pairs, at=99).waits_for == ("shipped",)


def test_what_is_not_recorded_is_not_called_unless_asked() -> None:
    """S18: the crash came between the message and the step that uses it."""

    async def main() -> RecordedHistory:
        driver = MemoryDriver()
        await stored(order, driver=driver)
        await send_message(driver, "shipped", "T", clock=TrioClock(1_700_000_000_000))
        return await record_history(driver, workflow_id="w", clock=TrioClock(1_700_000_000_000))

    history = run_virtual(main)
    calls.clear()
    replay = assert_replayable(order, history)
    assert replay.new == ("step 'notify'",)
    assert not replay.has_ended
    assert calls == []
    done = assert_replayable(order, history, run_new_steps=True)
    assert (done.has_ended, done.output, done.new) == (True, "pay-1", ())
    assert calls == ["notify"]
    assert assert_replayable(order, history).new == ("step 'notify'",), "the recorded history is as it was"


@workflow
async def threaded(ctx: Context, value: int) -> int:
    await ctx.sleep("nap", 60)
    return await ctx.step("slow", slow, value)


def test_a_plain_function_that_is_run_takes_no_virtual_time() -> None:
    """Else its step would time out."""
    history = recorded(threaded)
    done = assert_replayable(threaded, history, at=history.recorded_at_ms / 1000 + 61, run_new_steps=True)
    assert (done.output, done.error) == (5, None)
    assert calls == ["slow"]


@changed
async def waiting_outside(ctx: Context, cents: int) -> None:
    await ctx.step("charge", charge, cents)
    await trio.sleep_forever()


def joining(wait: Callable[[Context], Awaitable[None]]) -> Workflow[Any, Any]:
    """Two branches: one that sleeps, and this one."""

    async def naps(ctx: Context) -> None:
        await ctx.sleep("nap", 3600)

    @changed
    async def both(ctx: Context, cents: int) -> None:
        await ctx.join("both", {"one": naps, "other": wait})

    return both


async def _naps_too(ctx: Context) -> None:
    await ctx.sleep("other-nap", 60)


async def _waits_outside(ctx: Context) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize(("code", "before"), [(waiting_outside, order), (joining(_waits_outside), joining(_naps_too))])
def test_code_that_waits_for_what_is_not_recorded_is_told_and_not_waited_for(
    code: Workflow[Any, Any], before: Workflow[Any, Any]
) -> None:
    """Else the assertion would not return, and neither would the workflow ever be passivated (S18, S33)."""
    history = recorded(before)
    says = (
        r"^workflow 'w' \(order\) waits in line \d+ of test_replay\.py for something that is not recorded.*ctx\.sleep"
    )
    with pytest.raises(NotReplayableError, match=says) as caught:
        assert_replayable(code, history)
    assert caught.value.location is None


def test_code_of_a_rollback_that_waits_for_what_is_not_recorded_is_told() -> None:
    """S35: the function runs there too, to say what is to be undone."""

    async def stuck(ctx: RollbackContext, output: Any) -> None:
        raise ConnectionError("later")

    @workflow(name="saga")
    async def undone(ctx: Context, cents: int) -> None:
        await ctx.rollback_checkpoint("start")
        await ctx.step("charge", charge, cents, rollback=stuck, max_retries=5)
        await ctx.step("fail", fail)

    @workflow(name="saga")
    async def waits(ctx: Context, cents: int) -> None:
        await trio.sleep_forever()

    with pytest.raises(NotReplayableError, match=r"waits in line \d+ of test_replay\.py"):
        assert_replayable(waits, recorded(undone))


@changed
async def reading_outside(ctx: Context, cents: int) -> None:
    for _ in range(2):
        await trio.sleep(5)
        await trio.to_thread.run_sync(slow, 1)
    await order(ctx, cents)


def test_code_that_waits_for_a_thread_or_a_while_outside_is_waited_for() -> None:
    """It may be bad manners, but it can go on."""
    assert assert_replayable(reading_outside, recorded(order)).waits_for == ("shipped",)
    assert calls == ["slow", "slow"]


def test_a_completed_workflow_is_replayed_to_its_end() -> None:
    history = recorded(order, mail=1)
    assert history.state == "completed"
    assert history.waits == ()
    replay = assert_replayable(order, history)
    assert (replay.has_ended, replay.output, replay.error, replay.new) == (True, "pay-1", None, ())
    assert calls == []
    assert assert_replayable(versioned, history).new == ("step 'ask-for-a-review'",)
    with pytest.raises(NotReplayableError, match="had completed, and fails over the same history now: ValueError"):
        assert_replayable(changed(_failing_at_the_end), history)


async def _failing_at_the_end(ctx: Context, cents: int) -> str:
    await order(ctx, cents)
    raise ValueError("it fails now")


@workflow
async def saga(ctx: Context, cents: int) -> None:
    await ctx.rollback_checkpoint("start")
    await ctx.step("charge", charge, cents, rollback=undo)
    await ctx.step("fail", fail)


def test_a_failed_workflow_that_was_rolled_back_is_replayed_to_its_failure() -> None:
    """S35: no handler is called again."""
    history = recorded(saga)
    assert history.state == "failed"
    replay = assert_replayable(saga, history)
    assert replay.has_ended
    assert replay.error is not None
    assert (replay.error.name, replay.error.message) == ("CriticalError", "no")
    assert calls == []


def test_a_workflow_that_is_rolled_back_is_asked_for_what_is_to_be_undone_and_nothing_is() -> None:
    """S35."""

    async def stuck(ctx: RollbackContext, output: Any) -> None:
        raise ConnectionError("later")

    @workflow(name="saga")
    async def undone(ctx: Context, cents: int) -> None:
        await ctx.rollback_checkpoint("start")
        await ctx.step("charge", charge, cents, rollback=stuck, max_retries=5)
        await ctx.step("fail", fail)

    history = recorded(undone)
    assert history.state == "rolling_back"
    assert assert_replayable(saga, history).new == ("rollback of step 'charge'",)
    assert calls == []

    @workflow(name="saga")
    async def other(ctx: Context, cents: int) -> None:
        await ctx.step("other", charge, cents)

    with pytest.raises(NotReplayableError):
        assert_replayable(other, history)


@workflow
async def branching(ctx: Context, _: int) -> Any:
    async def waits(ctx: Context) -> str:
        await ctx.sleep("nap", 3600)
        return await ctx.step("after", charge, 1)

    async def works(ctx: Context) -> str:
        return await ctx.step("work", charge, 1)

    async def loops(ctx: Context) -> int:
        async def body(ctx: Context, count: int) -> Continue[int] | Break[int]:
            await ctx.step("turn", charge, 1)
            await ctx.sleep("pause", 60)
            return Break(count) if count == 2 else Continue(count + 1)

        return await ctx.loop("loop", body, 0)

    raced = await ctx.race("race", {"slow": waits, "quick": works})
    return [raced.winner, await ctx.join("join", {"waits": waits, "works": works, "loops": loops})]


def test_branches_come_to_rest_each_where_it_would_begin_something() -> None:
    """S30: one waits, one is done, one loops."""
    history = recorded(branching)
    replay = assert_replayable(branching, history)
    assert (replay.new, replay.waits_until) == ((), history.recorded_at_ms / 1000 + 60)
    late = assert_replayable(branching, history, at=history.recorded_at_ms / 1000 + 1e6)
    assert sorted(late.new) == ["step 'join' > 'loops' > 'loop' > #1 > 'turn'", "step 'join' > 'waits' > 'after'"]
    assert calls == []


@workflow
async def child(ctx: Context, value: int) -> int:
    return await ctx.queue.next("forever") and value


@workflow
async def parent(ctx: Context, value: int) -> Any:
    await ctx.send("tell", "friend", "hello", value)
    return await ctx.call("call", child, value, workflow_id="child")


@workflow
async def friend(ctx: Context, _: None) -> None:
    await ctx.queue.next("greeting", names=["hello", "bye"], timeout=1e6)
    await ctx.queue.next("again", names=["bye"])


async def test_calls_and_messages_to_others_are_neither_made_nor_sent(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """A parent that waits for its child, and code that would send more; and a virtual supervisor is a source."""
    async with virtual_supervisor([parent, child, friend]) as supervisor:
        await supervisor.spawn(friend, "friend")
        await supervisor.spawn(parent, "parent", 1)
        await trio.sleep(10)
        history = await record_history(supervisor, tmp_path / "parent.json", workflow_id="parent")
    assert history.waits == ("workflow 'child', in the call 'call'",)
    replay = assert_replayable(parent, tmp_path / "parent.json")
    assert (replay.has_ended, replay.new, replay.waits_for, replay.waits_until) == (False, (), (), None)

    @workflow(name="parent")
    async def both(ctx: Context, value: int) -> Any:
        async def call(ctx: Context) -> Any:
            return await ctx.call("call", "child", value)

        async def send(ctx: Context) -> None:
            await ctx.send("tell", "friend", "bye", value)

        await ctx.send("tell", "friend", "hello", value)
        await ctx.removed("call", "step")
        await ctx.join("both", {"call": call, "send": send})

    new = assert_replayable(both, history, workflows=[child]).new
    assert sorted(new) == ["a call of workflow 'child'", "message 'bye' to workflow 'friend'"]
    with pytest.raises(NotReplayableError, match=r"write workflows=\[child\]"):
        assert_replayable(both, history)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_encrypted_histories_stay_so_and_are_replayed_with_their_codec(kind: str, tmp_path: Path) -> None:
    """What was recorded is what is stored; the outline tells no values."""

    async def main() -> RecordedHistory:
        inner: Any = MemoryDriver() if kind == "memory" else await SqliteDriver.open(tmp_path / "w.sqlite", create=True)
        try:
            await stored(order, driver=CodedDriver(inner, XorCodec(), "w"))
            return await record_history(
                inner, tmp_path / "coded.json", workflow_id="w", clock=TrioClock(1_700_000_000_000)
            )
        finally:
            await inner.aclose()

    run_virtual(main)
    calls.clear()
    text = (tmp_path / "coded.json").read_text()
    assert "pay-1" not in text
    assert b"pay-1".hex() not in text
    assert assert_replayable(order, tmp_path / "coded.json", codec=XorCodec()).waits_for == ("shipped",)
    assert calls == []
    with pytest.raises(Exception, match="codec"):
        assert_replayable(order, tmp_path / "coded.json")


# Files.


def test_a_file_is_read_as_it_was_recorded_and_can_be_compared_line_by_line(tmp_path: Path) -> None:
    history = recorded(order)
    history.save(tmp_path / "a.json")
    assert read_history(tmp_path / "a.json") == history
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["perdure_history"] == 1
    assert content["outline"] == ["step 'charge': completed", "sleep 'wait-for-shipment:deadline': pending"]
    assert list(content["pairs"]) == sorted(content["pairs"])
    recorded(order, mail=1).save(tmp_path / "b.json")
    lines = [set((tmp_path / name).read_text().splitlines()) for name in ("a.json", "b.json")]
    assert any("step 'notify'" in line for line in lines[1] - lines[0])
    assert assert_replayable(order, str(tmp_path / "a.json")).waits_for == ("shipped",)


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    history = recorded(order)
    history.save(tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()
    with pytest.raises(HistoryFileError, match="never changed"):
        history.save(tmp_path / "a.json")

    async def again() -> None:
        await record_history(dict(history.pairs), tmp_path / "a.json")

    with pytest.raises(HistoryFileError, match="never changed"):
        run_virtual(again)
    assert (tmp_path / "a.json").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no recorded history"),
        ('{"perdure_history": 2}', "is of version 2"),
        ('{"perdure_history": 1}', "is damaged"),
        ('{"perdure_history": 1, "pairs": 1}', "is damaged"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_other_files_are_refused(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(HistoryFileError, match=what) as caught:
        read_history(tmp_path / "a.json")
    assert caught.value.path == str(tmp_path / "a.json")


@pytest.mark.parametrize(
    "damage",
    [
        {"state": "sleepy"},
        {"state": 1},
        {"workflow": None},
        {"workflow_id": "\ud800"},
        {"recorded_at_ms": -1},
        {"recorded_at_ms": 2**64},
        {"recorded_at_ms": math.inf},
        {"recorded_at_ms": True},
        {"waits": [1]},
        {"outline": None},
        {"pairs": {"0": "00"}},
    ],
)
def test_a_file_of_which_a_field_is_damaged_is_refused_as_a_file(damage: dict[str, Any], tmp_path: Path) -> None:
    """S41: an edited file, or one of a merge that went wrong."""
    history = recorded(order)
    history.save(tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(content | damage))
    with pytest.raises(HistoryFileError, match="is damaged"):
        assert_replayable(order, tmp_path / "a.json")


def test_the_directory_of_the_first_history_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    history = recorded(order)

    async def main() -> None:
        await record_history(history.pairs, "tests/histories/order-waits.json")
        await record_history(history.pairs, "order-waits.json")

    run_virtual(main)
    assert_replayable(order, "tests/histories/order-waits.json")
    assert_replayable(order, "order-waits.json")


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryFileError, match="cannot be written") as caught:
        recorded(order).save(tmp_path / "file" / "order-waits.json")
    assert caught.value.path == str(tmp_path / "file" / "order-waits.json")


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HistoryFileError, match="is not there"):
        assert_replayable(order, tmp_path / "missing.json")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(HistoryFileError, match="not the SQLite file"):
        assert_replayable(order, tmp_path / "text")
    with pytest.raises(DecodeError, match="no workflow"):
        assert_replayable(order, {})
    with pytest.raises(InvalidArgumentError, match="give the path"):
        assert_replayable(order, 5)  # type: ignore[arg-type]
    snapshot = run_virtual(load_snapshot, MemoryDriver())
    with pytest.raises(InvalidArgumentError, match="stored bytes"):
        assert_replayable(order, snapshot)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"write workflows=\[parcel\]"):
        assert_replayable(order, recorded(order), workflows=order)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"not str and str; give dict\(await driver.list\(b''\)\)"):
        assert_replayable(order, {"a": "b"})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="'sleepy', the state of the history of 'w', is none"):
        assert_replayable(order, replace(recorded(order), state="sleepy"))
    with pytest.raises(InvalidArgumentError, match=r"workflow\(name='order'\)\(saga\)"):
        assert_replayable(saga, recorded(order))


async def test_it_works_in_an_async_test(autojump_clock: MockClock) -> None:
    history = await stored(order)
    assert assert_replayable(order, history).waits_for == ("shipped",)
    with pytest.raises(NotReplayableError):
        assert_replayable(renamed, history)


def test_it_works_under_asyncio() -> None:
    history = recorded(order)

    async def main() -> None:
        assert assert_replayable(order, history).waits_for == ("shipped",)

    asyncio.run(main())


def test_a_running_supervisor_s_workflow_and_its_files_are_sources(tmp_path: Path) -> None:
    """S42: a file is read only where nobody has its directory."""

    async def main() -> RecordedHistory:
        async with open_supervisor(tmp_path / "data", workflows=[order]) as supervisor:
            handle = await supervisor.spawn(order, "order-1", 5)
            while await handle.get_state() is not WorkflowState.SLEEPING:  # noqa: ASYNC110
                await trio.sleep(0.001)
            history = await record_history(supervisor, workflow_id="order-1")
            with pytest.raises(StoreLockedError):
                await record_history(supervisor.describe("order-1"))
            with pytest.raises(InvalidArgumentError, match="workflow_id='order-1'"):
                await record_history(supervisor)
            return history

    def the_file() -> Path:
        (found,) = [path for path in (tmp_path / "data").rglob("*.sqlite") if path.name.startswith("order-1-")]
        return found

    history = trio.run(main)
    calls.clear()
    assert (history.workflow_id, history.workflow, history.state) == ("order-1", "order", "sleeping")
    before = the_file().read_bytes()
    assert trio.run(record_history, the_file()).pairs == history.pairs
    assert assert_replayable(order, the_file()).waits_for == ("shipped",)
    assert assert_replayable(order, history).waits_for == ("shipped",)
    assert the_file().read_bytes() == before
    assert calls == []


async def test_nothing_is_recorded_of_what_is_no_source() -> None:
    with pytest.raises(InvalidArgumentError, match="give a supervisor"):
        await record_history(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="give a supervisor"):
        await record_history(MemoryDriver)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="not str and str"):
        await record_history({"a": "b"})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="the path of a file is needed, not 3"):
        await record_history(MemoryDriver(), 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="clock must be an object with now_ms"):
        await record_history(MemoryDriver(), clock=3)  # type: ignore[arg-type]
