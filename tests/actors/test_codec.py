"""A supervisor with a value codec: nothing of the user's lies in its files as plain text, and no key is a failure."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock
from value_codecs import KeyRing, SealedCodec

from perdure.actors import Supervisor, WorkflowExistsError
from perdure.storage import (
    VALUE_BYTES_MAX,
    CodedDriver,
    MemoryDriver,
    OversizedValueError,
    ValueCodecError,
    ValueContext,
    layout,
)
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    InvalidArgumentError,
    RaceError,
    RollbackContext,
    StepError,
    TrioClock,
    WorkflowFailedError,
    WorkflowState,
    load_snapshot,
    replay_from_step,
    run_workflow,
    send_message,
    workflow,
)

effects: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()


class Key(SealedCodec):
    """A codec whose key service can be down, for encoding or for decoding."""

    is_down = False
    is_unreadable = False

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        if self.is_down:
            raise ConnectionError("no key service")
        return super().encode(data, context)

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        if self.is_unreadable:
            raise ConnectionError("no key service")
        return super().decode(data, context)


class SecretError(CriticalError):
    def __init__(self, name: str) -> None:
        super().__init__(f"secret-{name}-message")
        self.attribute = f"secret-{name}-attribute"


async def tell(name: str) -> str:
    effects.append(name)
    return f"secret-{name}"


async def fail(name: str) -> str:
    await tell(name)
    raise SecretError(name)


async def shaky(name: str) -> str:
    if effects.count(name) < 1:
        await tell(name)
        raise OSError(f"secret-{name}-attempt")
    return f"secret-{name}"


async def undo(ctx: RollbackContext, output: str) -> None:
    raise SecretError("undo")


@workflow(name="teller")
async def teller(ctx: Context, given: str) -> str:
    """Every kind of value, with a secret in each."""

    async def body(ctx: Context, state: str) -> Continue[str] | Break[str]:
        await ctx.step("undoable", tell, "undoable", rollback=undo)
        return Continue("secret-state-2") if state == "secret-state-1" else Break("secret-broken-with")

    async def good(ctx: Context) -> str:
        return "secret-branch"

    async def bad(ctx: Context) -> str:
        raise SecretError("branch")

    await ctx.rollback_checkpoint("checkpoint")
    await ctx.step("shaky", shaky, "shaky", retry_backoff_base=10)
    await ctx.step("told", tell, "told")
    await ctx.try_step("failing", fail, "failing")
    await ctx.loop("loop", body, "secret-state-1")
    await ctx.join("join", {"good": good})
    with suppress(RaceError):
        await ctx.race("race", {"bad": bad})
    message = await ctx.queue.next("inbox", names=["note"], completable=True)
    await message.complete()
    await ctx.queue.next("last", names=["go"])
    if message.body == "secret-body-fails":
        raise SecretError("workflow")
    return "secret-output"


SECRETS = [
    "secret-input",
    "secret-told",
    "secret-shaky-attempt",
    "secret-failing-message",
    "secret-failing-attribute",
    "secret-state-2",
    "secret-broken-with",
    "secret-undoable",
    "secret-branch",
    "secret-branch-message",
    "secret-waits",
    "secret-body",
]


def found_in(directory: Path) -> set[str]:
    """Every word that begins with `secret` in any byte of any file."""
    data = b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    return {secret for secret in (*SECRETS, *ENDS) if secret.encode() in data} | (
        {"secret"} if b"secret-" in data else set()
    )


ENDS = ["secret-output", "secret-workflow-message", "secret-workflow-attribute", "secret-undo-message"]


async def told(disk: Disk, codec: Any, words: dict[str, set[str]]) -> None:
    """Two workflows through every kind of value; what can be read in the files while they wait, and once they ended."""
    async with disk.process(teller, codec=codec) as supervisor:
        for name in ("works", "fails"):
            handle = await supervisor.spawn(teller, name, "secret-input")
            await handle.message("note", f"secret-body-{name}", id=f"note-{name}")
            await handle.message("waits", "secret-waits")
        await trio.sleep(60)
        words["waiting"] = found_in(disk.path)
        for name in ("works", "fails"):
            await (await supervisor.get(name)).message("go")
        assert await (await supervisor.get("works")).result() == "secret-output"
        with pytest.raises(WorkflowFailedError, match="secret-workflow-message"):
            await (await supervisor.get("fails")).result()
        words["ended"] = found_in(disk.path)
    words["closed"] = found_in(disk.path)


@pytest.mark.parametrize("is_coded", [True, False])
async def test_no_byte_of_any_file_holds_a_users_value(
    tmp_path: Path, autojump_clock: MockClock, is_coded: bool
) -> None:
    """In the database, its log and the catalog, while workflows wait and once they ended. Without a codec all of it is there."""
    disk = Disk("sqlite", tmp_path)
    words: dict[str, set[str]] = {}
    await told(disk, SealedCodec() if is_coded else None, words)
    if is_coded:
        assert words == {"waiting": set(), "ended": set(), "closed": set()}
        data = b"".join(path.read_bytes() for path in disk.path.rglob("*.sqlite*"))
        for legible in (b"works", b"teller", b"told", b"failing", b"note", b"completed", b"failed"):
            assert legible in data, "ids, types, names and states stay legible"
    else:
        assert words["waiting"] >= {*SECRETS}
        assert words["ended"] >= {*ENDS}


async def waiting(supervisor: Supervisor, name: str = "w") -> None:
    await supervisor.spawn(waiter, name, "secret-input")
    await trio.sleep(1)


@workflow(name="waiter")
async def waiter(ctx: Context, given: str) -> list[str]:
    first = await ctx.step("first", tell, "first")
    message = await ctx.queue.next("go", names=["go"])
    try:
        second = await ctx.step("second", tell, "second")
    except StepError:
        second = "failed"
    return [given, first, message.body, second]


@workflow(name="measure")
async def measure(ctx: Context, given: str) -> list[int]:
    message = await ctx.queue.next("go", names=["go"])
    return [len(given), len(message.body)]


RESULT = ["secret-input", "secret-first", "now", "secret-second"]


@pytest.mark.parametrize("codec", [SealedCodec(b"wrong"), None], ids=["wrong key", "no codec"])
async def test_with_a_wrong_key_or_none_a_workflow_is_in_trouble_and_goes_on_with_the_right_one(
    disk: Disk, autojump_clock: MockClock, codec: SealedCodec | None
) -> None:
    """Neither failed nor lost: nothing is written, and every operation says whose value cannot be decoded."""
    async with disk.process(waiter, codec=SealedCodec()) as supervisor:
        await waiting(supervisor)
    before = dict(disk.namespaces["w"])
    async with disk.process(waiter, codec=codec) as supervisor:
        handle = await supervisor.get("w")
        for operation in (handle.get_state, handle.history, handle.wake, lambda: handle.message("go", "now")):
            with pytest.raises(ValueCodecError, match="workflow 'w'"):
                await operation()
        with pytest.raises(ValueCodecError, match="workflow 'w'"):
            await supervisor.spawn(waiter, "w", "secret-input")
        await supervisor.spawn(waiter, "other", "secret-other")
        await trio.sleep(1)
        assert await (await supervisor.get("other")).get_state() is WorkflowState.SLEEPING, "the others go on"
    assert disk.namespaces["w"] == before
    async with disk.process(waiter, codec=SealedCodec()) as supervisor:
        handle = await supervisor.get("w")
        await handle.message("go", "now")
        assert await handle.result() == RESULT
    assert effects == ["first", "first", "second"], "one of them was the other's"


async def test_a_workflow_that_was_at_work_is_in_trouble_at_the_start_with_a_wrong_key(
    disk: Disk, autojump_clock: MockClock
) -> None:
    async with disk.process(waiter, codec=SealedCodec()) as supervisor:
        await waiting(supervisor)
        await (await supervisor.get("w")).evict()
        await (await supervisor.get("w")).message("go", "now")
        disk.die()
    async with disk.process(waiter, codec=SealedCodec(b"wrong")) as supervisor:
        await trio.sleep(1)
        assert isinstance(supervisor.troubles()["w"], ValueCodecError)
        with pytest.raises(ValueCodecError):
            await (await supervisor.get("w")).result()
    async with disk.process(waiter, codec=SealedCodec()) as supervisor:
        assert await (await supervisor.get("w")).result() == RESULT
        assert supervisor.troubles() == {}


async def test_a_codec_can_be_turned_on_and_its_key_rotated_under_workflows_that_are_under_way(
    disk: Disk, autojump_clock: MockClock
) -> None:
    async with disk.process(waiter) as supervisor:
        await waiting(supervisor)
    old, new = SealedCodec(b"old"), SealedCodec(b"new")
    async with disk.process(waiter, codec=old) as supervisor:
        await (await supervisor.get("w")).message("elsewhere", "secret-kept")
    async with disk.process(waiter, codec=KeyRing([new, old])) as supervisor:
        with pytest.raises(WorkflowExistsError):
            await supervisor.spawn(waiter, "w", "secret-other-input")
        handle = await supervisor.spawn(waiter, "w", "secret-input")
        await handle.message("go", "now")
        assert await handle.result() == RESULT
    assert effects == ["first", "second"]


async def test_what_cannot_be_encoded_is_no_failure_of_the_workflow_and_is_done_later(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S21: nothing is written and nothing acknowledged while the key service is down, and no step counts as failed."""
    codec = Key()
    async with disk.process(waiter, codec=codec) as supervisor:
        await waiting(supervisor)
        handle = await supervisor.get("w")
        codec.is_down = True
        before = dict(disk.namespaces["w"])
        with pytest.raises(ValueCodecError, match="no key service"):
            await handle.message("go", "lost")
        assert disk.namespaces["w"] == before
        with pytest.raises(ValueCodecError, match="no key service"):
            await supervisor.spawn(waiter, "v", "secret-input")
        codec.is_down = False
        await supervisor.spawn(waiter, "v", "secret-input")
    async with disk.process(waiter, codec=codec) as supervisor:
        for name in ("w", "v"):
            handle = await supervisor.get(name)
            await handle.message("go", "now")
            assert await handle.result() == RESULT


@workflow(name="ticker")
async def ticker(ctx: Context, given: None) -> list[str]:
    told: list[str] = []
    for number in range(5):
        await ctx.sleep(f"pause-{number}", 10)
        told.append(await ctx.step(f"tick-{number}", tell, str(number)))
    return told


async def test_a_workflow_at_work_goes_on_by_itself_once_its_values_can_be_encoded_again(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S21: the codec fails for minutes in between: the step whose result could not be stored runs again, and no other."""
    codec = Key()
    async with disk.process(ticker, codec=codec, idle_timeout=5) as supervisor:
        handle = await supervisor.spawn(ticker, "w", None)
        await trio.sleep(25)
        codec.is_down = True
        await trio.sleep(300)
        codec.is_down = False
        assert await handle.result() == [f"secret-{number}" for number in range(5)]
    assert sorted(set(effects)) == ["0", "1", "2", "3", "4"]
    assert [effects.count(name) for name in "0134"] == [1, 1, 1, 1]
    assert effects.count("2") > 1


async def test_an_alarm_that_is_due_while_nothing_can_be_decoded_is_not_lost(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S45: the workflow had left memory; it comes back by itself once its values can be read."""
    codec = Key()
    async with disk.process(ticker, codec=codec, idle_timeout=1) as supervisor:
        handle = await supervisor.spawn(ticker, "w", None)
        await trio.sleep(15)
        codec.is_unreadable = True
        await trio.sleep(300)
        with pytest.raises(ValueCodecError, match="no key service"):
            await handle.get_state()
        codec.is_unreadable = False
        await trio.sleep(1000)  # and nobody asks for it
        assert await handle.get_state() is WorkflowState.COMPLETED
        assert await handle.result() == [f"secret-{number}" for number in range(5)]
    assert effects == ["0", "1", "2", "3", "4"]


async def test_the_largest_input_and_message_fit_and_larger_ones_are_refused_without_a_trace(
    disk: Disk, autojump_clock: MockClock
) -> None:
    async with disk.process(measure, codec=SealedCodec()) as supervisor:
        with pytest.raises(OversizedValueError) as caught:
            await supervisor.spawn(measure, "w", "x" * VALUE_BYTES_MAX)
        assert await disk.store.get_row("w") is None
        largest = "x" * (caught.value.limit - 5)
        handle = await supervisor.spawn(measure, "w", largest)
        await handle.message("go", largest)
        assert await handle.result() == [len(largest), len(largest)]
        with pytest.raises(OversizedValueError):
            await supervisor.spawn(measure, "v", largest + "x")


@pytest.mark.parametrize("codec", [SealedCodec, object(), "codec"])
async def test_what_is_no_codec_is_refused_before_anything_is_opened(disk: Disk, codec: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a codec is an object with encode"):
        async with disk.process(waiter, codec=codec):
            raise AssertionError("not reached")
    assert disk.store.written == []


# The engine without a supervisor.


async def test_the_engines_functions_take_a_coded_driver(autojump_clock: MockClock) -> None:
    inner = MemoryDriver()
    driver = CodedDriver(inner, SealedCodec(), "w")
    clock = TrioClock()
    assert (await run_workflow("w", waiter, "secret-input", driver, clock=clock)).state is WorkflowState.SLEEPING
    await send_message(driver, "go", "now", clock=clock)
    assert (await run_workflow("w", waiter, "secret-input", driver, clock=clock)).output == RESULT
    assert (await load_snapshot(driver)).output == RESULT
    assert not any(b"secret" in value for value in inner.data.values())
    await replay_from_step(driver, None)
    assert (await run_workflow("w", waiter, "secret-input", driver, clock=clock)).output == RESULT
    assert effects == ["first", "second", "first", "second"]


async def test_without_the_codec_the_engine_refuses_before_it_runs_or_writes_anything(
    autojump_clock: MockClock,
) -> None:
    """Even where the input is from before the codec, and only a later value is coded."""
    inner = MemoryDriver()
    clock = TrioClock()
    await run_workflow("w", waiter, "secret-input", inner, clock=clock)
    await send_message(CodedDriver(inner, SealedCodec(), "w"), "go", "now", clock=clock)
    before = dict(inner.data)
    assert layout.CODEC_KEY in before
    with pytest.raises(ValueCodecError, match="pass it"):
        await run_workflow("w", waiter, "secret-input", inner, clock=clock)
    with pytest.raises(ValueCodecError, match="pass it"):
        await send_message(inner, "go", "again", clock=clock)
    with pytest.raises(ValueCodecError, match="pass it"):
        await load_snapshot(inner)
    assert inner.data == before
    assert effects == ["first"]


async def test_a_join_of_a_thousand_branches_fills_a_value_to_its_limit(autojump_clock: MockClock) -> None:
    """The overhead is that of one value, not of a thousand: what the engine lets in, the driver takes."""
    count = 1000
    driver = CodedDriver(MemoryDriver(), SealedCodec(), "w")

    @workflow(name="wide")
    async def wide(ctx: Context, given: None) -> int:
        async def branch(ctx: Context) -> bytes:
            return bytes(930)

        async def rest(ctx: Context) -> str:
            raise SecretError("x" * 2000)

        functions = {str(number): branch if number % 3 else rest for number in range(count)}
        try:
            await ctx.join("join", functions)
        except Exception as error:
            return len(error.errors)  # type: ignore[attr-defined]
        return 0

    result = await run_workflow("w", wide, None, driver, clock=TrioClock())
    assert result.output == 334
    stored = (await driver.list(layout.HISTORY_PREFIX))[0][1]
    assert len(stored) > 0.7 * VALUE_BYTES_MAX


async def test_the_input_of_a_schedule_is_coded_and_its_runs_get_it(tmp_path: Path, autojump_clock: MockClock) -> None:
    disk = Disk("sqlite", tmp_path)
    async with disk.process(teller, measure, codec=SealedCodec()) as supervisor:
        await supervisor.schedule("daily", measure, "secret-input", every=60, workflow_id="run-{time}")
        assert found_in(disk.path) == set()
        await trio.sleep(100)
        assert await disk.store.count_rows(workflow_type="measure") > 0
    assert found_in(disk.path) == set()
    async with disk.process(measure, codec=SealedCodec()) as supervisor:
        rows = await disk.store.list_rows(workflow_type="measure")
        handle = await supervisor.get(rows[0].workflow_id)
        await handle.message("go", "now")
        assert await handle.result() == [len("secret-input"), 3]
