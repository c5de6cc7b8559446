"""Histories of the reference engine: they load, resume and finish here, and what is written here decodes to the same.

The workflows are those of tests/vectors/README.md, written in Python. Files whose workflows need later primitives wait
for these. Ids and times differ by nature and are taken out before anything is compared; all else must be the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from harness import Host, MovableClock, Namespace, host
from trio.testing import MockClock

from perdure.storage import AlarmChange, Batch, decode_value, layout
from perdure.storage.keys import unpack
from perdure.storage.schema import (
    Entry,
    EntryMetadata,
    LoopEntry,
    LoopIteration,
    MessageEntry,
    StepEntry,
    decode_entry,
    decode_metadata,
    encode_entry,
    encode_metadata,
)
from perdure.workflow import Break, Context, Continue, RunMode, WorkflowFailedError, WorkflowState, current_step

VECTORS = Path(__file__).parents[1] / "vectors"
FILES = ("order", "retry", "sleep", "loop", "loopdone", "values", "errmeta", "migrate")
Dump = dict[bytes, bytes]

MESSAGE_ID = "11111111-2222-4333-8444-555555555555"
SENT_AT_MS = 1_700_000_000_000
RECORDED_AT_MS = 1_795_956_873_699
"""A moment after the first attempt of the retried step was recorded and before its retry was due."""
YEAR_2100_S = 4_102_444_800

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def stops_of(file: str) -> list[dict[str, Any]]:
    stops: list[dict[str, Any]] = json.loads((VECTORS / f"{file}.json").read_text(encoding="utf-8"))
    return stops


def dump_of(stop: dict[str, Any]) -> Dump:
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in stop["kv"]}


def input_of(file: str) -> Any:
    return decode_value(dump_of(stops_of(file)[0])[layout.INPUT_KEY])


# The workflows of tests/vectors/README.md.


async def give(name: str, value: Any) -> Any:
    calls.append(name)
    return value


async def order(ctx: Context, order_id: str) -> dict[str, Any]:
    payment = await ctx.step("process-payment", give, "pay", {"id": f"pay-{order_id}", "cents": 1999})
    message = await ctx.queue.next("wait-shipping", names=["shipment-confirmed"])
    await ctx.step("notify-customer", give, "notify", None)
    return {"orderId": order_id, "payment": payment, "tracking": message.body}


class Error(Exception):
    """Named like JavaScript's."""


async def flaky() -> int:
    attempt = current_step().attempt
    calls.append(f"attempt {attempt}")
    if attempt < 3:
        raise Error(f"boom {attempt}")
    return attempt


async def retry(ctx: Context, _: object) -> int:
    return await ctx.step("flaky", flaky, max_retries=3, retry_backoff_base=0.001)


async def sleep(ctx: Context, given: dict[str, float]) -> str:
    await ctx.sleep_until("new-year-2100", given["at"] / 1000)
    return "woke"


def counting(pause_at: int | None) -> Callable[[Context, Any], Awaitable[Any]]:
    async def workflow(ctx: Context, until: int) -> Any:
        async def body(inner: Context, state: dict[str, int]) -> Continue[dict[str, int]] | Break[dict[str, int]]:
            total = await inner.step("add", give, f"add {state['total']}", state["total"] + 1)
            if total == pause_at:
                await inner.sleep_until("pause", YEAR_2100_S)
            return Break({"total": total}) if total == until else Continue({"total": total})

        return await ctx.loop("count", body, {"total": 0})

    return workflow


async def values(ctx: Context, given: dict[str, Any]) -> dict[str, Any]:
    await ctx.step("undefined", give, "undefined", None)
    nothing = await ctx.step("null", give, "null", None)
    await ctx.step("bigint", give, "bigint", 123456789012345678901234567890)
    await ctx.step("date", give, "date", datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC))
    await ctx.step("set", give, "set", {1, 2, 3})
    await ctx.step("map", give, "map", {"k": 1, 2: "v"})
    numbers = await ctx.step("nan", give, "nan", [math.nan, math.inf, -math.inf, 0, 0.1, 1e300])
    text = await ctx.step("long", give, "long", "x" * 300)
    return {"input": given, "b": nothing, "g": len(numbers), "h": len(text)}


class PaymentError(Exception):
    """An error with properties, one of them plain."""

    def __init__(self) -> None:
        super().__init__("custom")
        self.code = 402
        self.details = {"card": "x"}


async def errmeta(ctx: Context, _: object) -> None:
    raise PaymentError


async def migrate(ctx: Context, _: object) -> int:
    await ctx.removed("old-validation", "step")
    version = await ctx.get_version("pricing", 2)
    return await ctx.step("price", give, "price", version * 10)


WORKFLOWS: dict[str, Callable[[Context, Any], Awaitable[Any]]] = {
    "order": order,
    "retry": retry,
    "sleep": sleep,
    "loop": counting(25),
    "loopdone": counting(None),
    "values": values,
    "errmeta": errmeta,
    "migrate": migrate,
}

OUTCOMES: dict[str, Any] = {"sleep": "woke", "loop": {"total": 45}}
"""Of those whose recording ends before the workflow does; the others' are in the recording."""

EFFECTS: dict[str, list[list[str]]] = {
    # What runs after resuming each stop.
    "order": [["notify"], []],
    "retry": [["attempt 2", "attempt 3"], ["attempt 3"], []],
    "sleep": [[]],
    "loop": [[f"add {total}" for total in range(25, 45)]],
    "loopdone": [[]],
    "values": [[]],
    "errmeta": [[]],
    "migrate": [[]],
}


def plain(value: Any) -> Any:
    """A recorded result as JSON has it, with what JSON cannot hold in its place."""
    if isinstance(value, dict):
        if set(value) == {"$bytes"}:
            return bytes.fromhex(value["$bytes"])
        if set(value) == {"$bigint"}:
            return int(value["$bigint"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


async def load(process: Host, stop: dict[str, Any]) -> None:
    """Put a stop of the reference engine into the namespace, its armed alarm included."""
    driver = await process.namespace.driver()
    await driver.batch(Batch(puts=list(dump_of(stop).items())))
    if stop["alarm"] is not None:
        await driver.set_alarm(process.workflow_id, stop["alarm"])


async def send_next(process: Host, stops: list[dict[str, Any]]) -> None:
    for stop in stops:
        if stop["sent"] is not None:
            await process.send(*stop["sent"], id=MESSAGE_ID)


def all_stops() -> list[Any]:
    return [
        pytest.param(file, number, id=f"{file}-{number}") for file in FILES for number in range(len(stops_of(file)))
    ]


@pytest.mark.parametrize(("file", "number"), all_stops())
async def test_a_stop_of_the_reference_engine_resumes_and_finishes_with_the_recorded_outcome(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, file: str, number: int
) -> None:
    """S16: what was done there is not done again here, and the end is stored and read as any other."""
    stops = stops_of(file)
    stop, last = stops[number], stops[-1]["result"]
    async with host(namespace, mode, clock=MovableClock(RECORDED_AT_MS)) as process:
        await load(process, stop)
        before = await namespace.snapshot()
        assert before.state.value == stop["result"].get("state", "failed")
        stored = await namespace.dump()
        await send_next(process, stops[number + 1 :])
        if "threw" in last:
            with pytest.raises(WorkflowFailedError) as caught:
                await process.finish(WORKFLOWS[file])
            assert {"name": caught.value.name, "message": caught.value.message} == last["threw"]
            assert caught.value.metadata == {"code": 402}
            assert caught.value.stack is not None
            assert "oracle.mjs" in caught.value.stack, "the stack is that of the recorded run"
        else:
            output = await process.finish(WORKFLOWS[file])
            assert output == (plain(last["output"]) if "output" in last else OUTCOMES[file])
        assert calls == EFFECTS[file][number]
        await process.restart()
        after = await namespace.snapshot()
        assert after.state is (WorkflowState.FAILED if "threw" in last else WorkflowState.COMPLETED)
        assert after.input == before.input
        driver = await namespace.driver()
        assert await driver.get_alarm(process.workflow_id) is None
        if before.state.is_terminal:
            assert await namespace.dump() == stored, "a terminal workflow was written to"
        ids = {entry.path: entry.id for entry in after.entries}
        kept = {entry.path: entry.id for entry in before.entries if entry.path in ids}
        assert kept.items() <= ids.items(), "a recorded entry was replaced"
        assert len(kept) == len(before.entries) or file == "loop", "only a loop forgets entries"


@pytest.mark.parametrize(("file", "number"), all_stops())
async def test_a_stop_resumes_after_another_restart_in_its_middle(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, file: str, number: int
) -> None:
    """S16: what this engine adds to the reference's bytes can be resumed like the rest."""
    stops = stops_of(file)
    last = stops[-1]["result"]
    async with host(namespace, mode, clock=MovableClock(RECORDED_AT_MS)) as process:
        await load(process, stops[number])
        if "threw" in last:
            for _ in range(2):
                with pytest.raises(WorkflowFailedError):
                    await process.stop(WORKFLOWS[file])
                await process.restart()
            return
        await process.stop(WORKFLOWS[file])
        await process.restart()
        await send_next(process, stops[number + 1 :])
        await process.stop(WORKFLOWS[file])
        await process.restart()
        output = await process.finish(WORKFLOWS[file])
        assert output == (plain(last["output"]) if "output" in last else OUTCOMES[file])
    assert calls == EFFECTS[file][number]


# What this engine writes for the same workflows.


async def run_like_the_recording(process: Host, file: str) -> list[tuple[Dump, int | None]]:
    """Run a workflow afresh; what is stored, and the armed alarm, at each of the recording's stops."""
    dumps: list[tuple[Dump, int | None]] = []
    driver = await process.namespace.driver()
    for number, stop in enumerate(stops_of(file)):
        if stop["sent"] is not None:
            await process.send(*stop["sent"], id=MESSAGE_ID)
        elif number:
            alarm = await driver.get_alarm(process.workflow_id)
            assert alarm is not None
            await process.advance(max(0, alarm - process.clock.now_ms()) / 1000)
        try:
            await process.stop(WORKFLOWS[file], input_of(file))
        except WorkflowFailedError:
            assert "threw" in stop["result"]
        dumps.append((await process.namespace.dump(), await driver.get_alarm(process.workflow_id)))
    return dumps


def names_of(dump: Dump) -> list[str]:
    return [value.decode() for key, value in sorted(dump.items()) if key.startswith(layout.NAMES_PREFIX)]


def entries_of(dump: Dump) -> list[Entry]:
    return [decode_entry(value) for key, value in sorted(dump.items()) if key.startswith(layout.HISTORY_PREFIX)]


def path_of(entry: Entry, names: list[str]) -> tuple[Any, ...]:
    return tuple(
        (names[part.loop], part.iteration) if isinstance(part, LoopIteration) else names[part]
        for part in entry.location
    )


def comparable(value: Any) -> Any:
    """A decoded value as something that equals itself, NaN included, with its type."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return type(value).__name__, repr(value)


def content_of(entry: Entry) -> Any:
    """What an entry says, decoded. No time in it is relative: deadlines are in the year 2100, the message's is given."""
    kind = entry.kind
    match kind:
        case StepEntry():
            return kind.error, comparable(None if kind.output is None else decode_value(kind.output))
        case LoopEntry():
            output = None if kind.output is None else decode_value(kind.output)
            return kind.iteration, comparable(decode_value(kind.state)), comparable(output)
        case MessageEntry():
            return kind.name, comparable(decode_value(kind.body))
        case _:
            return kind


def timeless(metadata: EntryMetadata) -> EntryMetadata:
    """Metadata without its times, but with whether it has one."""
    completed_at_ms = None if metadata.completed_at_ms is None else 1
    attempted = 1 if metadata.last_attempt_at_ms else 0
    return replace(metadata, last_attempt_at_ms=attempted, created_at_ms=1, completed_at_ms=completed_at_ms)


def meaning_of(dump: Dump) -> dict[str, Any]:
    """All that a dump says in the reference's own keys, without ids and times."""
    names = names_of(dump)
    entries = entries_of(dump)
    paths = {entry.id: path_of(entry, names) for entry in entries}
    metadata = {
        paths[layout.parse_metadata_key(key)]: timeless(decode_metadata(value))
        for key, value in dump.items()
        if key.startswith(layout.METADATA_PREFIX)
    }
    fields = {key: decode_value(dump[key]) for key in (layout.OUTPUT_KEY, layout.INPUT_KEY) if key in dump}
    error = decode_value(dump[layout.ERROR_KEY]) if layout.ERROR_KEY in dump else {}
    return {
        "names": names,
        "entries": {path_of(entry, names): (type(entry.kind).__name__, content_of(entry)) for entry in entries},
        "metadata": metadata,
        "state": dump[layout.STATE_KEY],
        "fields": {key: comparable(value) for key, value in fields.items()},
        "error": {key: value for key, value in error.items() if key != "stack"},
        "stack": sorted(set(error) & {"stack"}),
    }


@pytest.mark.parametrize("file", FILES)
async def test_what_is_written_for_the_same_workflow_decodes_to_the_same(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, file: str
) -> None:
    """S16: names, entries, metadata, state and values at every stop; beside them only keys the reference ignores."""
    async with host(namespace, mode, clock=MovableClock(SENT_AT_MS)) as process:
        ours = await run_like_the_recording(process, file)
    stops = stops_of(file)
    assert len(ours) == len(stops)
    for (dump, alarm), stop in zip(ours, stops, strict=True):
        theirs = dump_of(stop)
        assert meaning_of(dump) == meaning_of(theirs)
        extra = [unpack(key)[0] for key in dump if unpack(key)[0] not in (1, 2, 3, 4)]
        assert all(isinstance(first, int) and first >= 32 for first in extra)
        check_alarms(file, dump, alarm, theirs, stop["alarm"])


def check_alarms(file: str, dump: Dump, alarm: int | None, theirs: Dump, their_alarm: int | None) -> None:
    """The same alarms: absolute ones exactly, a retry's counted from the attempt that failed."""
    if file == "retry" and their_alarm is not None:
        assert alarm is not None
        assert alarm - last_attempt(dump) == their_alarm - last_attempt(theirs)
    else:
        assert alarm == their_alarm


def last_attempt(dump: Dump) -> int:
    (metadata,) = [decode_metadata(value) for key, value in dump.items() if key.startswith(layout.METADATA_PREFIX)]
    return metadata.last_attempt_at_ms


def holds_map(data: bytes | None) -> bool:
    """Whether a value has a CBOR map anywhere; their maps have 16-bit lengths, which nobody else writes."""
    pending = [] if data is None else [decode_value(data)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return True
        if isinstance(value, list):
            pending += value
    return False


def user_data(entry: Entry) -> list[bytes | None]:
    match entry.kind:
        case StepEntry():
            return [entry.kind.output]
        case LoopEntry():
            return [entry.kind.state, entry.kind.output]
        case MessageEntry():
            return [entry.kind.body]
        case _:
            return []


@pytest.mark.parametrize("file", FILES)
async def test_what_is_written_is_the_same_bytes_where_no_map_id_or_time_is_in_it(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, file: str
) -> None:
    """S16: keys, names, state, values without a map, entries and metadata once their ids and times are alike."""
    compared: set[str] = set()
    async with host(namespace, mode, clock=MovableClock(SENT_AT_MS)) as process:
        ours = await run_like_the_recording(process, file)
    for (dump, _), stop in zip(ours, stops_of(file), strict=True):
        theirs = dump_of(stop)
        shared = {key for key in dump if unpack(key)[0] in (1, 2, 3)}
        assert shared == {key for key in theirs if unpack(key)[0] in (1, 2, 3)}, "a key differs"
        their_metadata = metadata_by_location(theirs)
        for location, metadata in metadata_by_location(dump).items():
            assert encode_metadata(metadata) == encode_metadata(their_metadata.pop(location))
            compared.add("metadata")
        assert not their_metadata
        for key in shared:
            first = unpack(key)[0]
            value, their_value = dump[key], theirs[key]
            if first == 2:
                entry, their_entry = decode_entry(value), decode_entry(their_value)
                if path_of(entry, names_of(dump)) == ("null",):
                    # What is None here is stored as absent; there `null` and `undefined` differ.
                    assert (user_data(entry), user_data(their_entry)) == ([None], [b"\xf6"])
                    continue
                if any(holds_map(data) for data in user_data(entry)):
                    continue
                # The id follows the version, with its length before it; all that is behind it must be the same.
                assert value[:3] == their_value[:3]
                assert value[3 + 36 :] == their_value[3 + 36 :]
                assert encode_entry(entry._replace(id=their_entry.id)) == their_value
                compared.add(type(entry.kind).__name__)
            elif first == 1 or key == layout.STATE_KEY or not (key == layout.ERROR_KEY or holds_map(value)):
                assert value == their_value
                compared.add("name" if first == 1 else "field")
    assert compared >= BYTE_EQUAL[file]


BYTE_EQUAL: dict[str, set[str]] = {
    "order": {"name", "field", "metadata", "StepEntry", "MessageEntry"},
    "retry": {"name", "field", "metadata", "StepEntry"},
    "sleep": {"name", "field", "SleepEntry"},
    "loop": {"name", "field", "metadata", "StepEntry", "SleepEntry"},
    "loopdone": {"name", "field", "metadata", "StepEntry"},
    "values": {"name", "field", "metadata", "StepEntry"},
    "errmeta": {"field"},
    "migrate": {"name", "field", "metadata", "StepEntry", "RemovedEntry", "VersionCheckEntry"},
}
"""What must at least have been compared byte by byte, so that the test cannot pass by leaving everything out."""


def metadata_by_location(dump: Dump) -> dict[Any, EntryMetadata]:
    locations = {entry.id: entry.location for entry in entries_of(dump)}
    return {
        locations[layout.parse_metadata_key(key)]: timeless(decode_metadata(value))
        for key, value in dump.items()
        if key.startswith(layout.METADATA_PREFIX)
    }


async def test_an_alarm_of_a_loaded_dump_is_kept_until_it_is_due(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16: resuming a sleeping workflow keeps its alarm, and arms it where the recording lost it."""
    (stop,) = stops_of("sleep")
    async with host(namespace, mode, clock=MovableClock(RECORDED_AT_MS)) as process:
        await load(process, stop)
        stopped = await process.stop(sleep)
        assert stopped.sleep_until == YEAR_2100_S
        driver = await namespace.driver()
        assert await driver.get_alarm(process.workflow_id) == stop["alarm"]
        await process.restart()
        driver = await namespace.driver()
        await driver.batch(Batch(alarm=AlarmChange(process.workflow_id, None)))
        await process.stop(sleep)
        assert await driver.get_alarm(process.workflow_id) == stop["alarm"]
