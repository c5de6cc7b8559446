"""Histories of the reference engine: they load, resume and finish here, and what is written here decodes to the same.

The workflows are those of tests/vectors/README.md, written in Python in tests/support/vectors.py. What is made alike before
two dumps are compared is listed in tests/support/dumps.py; all else must be the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from dumps import Dump, contents_of, meaning_of, same_bytes
from harness import Host, MovableClock, Namespace, host
from trio.testing import MockClock
from vectors import (
    EFFECTS,
    MESSAGE_ID,
    OUTCOMES,
    RECORDED_AT_MS,
    SENT_AT_MS,
    VECTORS,
    WORKFLOWS,
    YEAR_2100_S,
    Stop,
    dump_of,
    effects,
    input_of,
    plain,
    stops_of,
)

from perdure.storage import AlarmChange, Batch
from perdure.workflow import RunMode, WorkflowFailedError, WorkflowState

FILES = sorted(WORKFLOWS)


def test_every_recording_is_resumed() -> None:
    """S16: no file in tests/vectors is left out."""
    assert sorted(path.stem for path in VECTORS.glob("*.json")) == FILES == sorted(BYTE_EQUAL) == sorted(EFFECTS)


@pytest.fixture(autouse=True)
def _no_effects() -> None:
    effects.clear()


async def load(process: Host, stop: Stop) -> None:
    """Put a stop of the reference engine into the namespace, its armed alarm included."""
    driver = await process.namespace.driver()
    await driver.batch(Batch(puts=list(dump_of(stop).items())))
    if stop["alarm"] is not None:
        await driver.set_alarm(process.workflow_id, stop["alarm"])


async def send_next(process: Host, stops: list[Stop]) -> None:
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
            assert caught.value.metadata == ({"code": 402} if file == "errmeta" else {})
            assert caught.value.stack is not None
            assert "oracle.mjs" in caught.value.stack, "the stack is that of the recorded run"
        else:
            output = await process.finish(WORKFLOWS[file])
            assert output == (plain(last["output"]) if "output" in last else OUTCOMES[file])
        assert effects == EFFECTS[file][number]
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
    assert effects == EFFECTS[file][number]


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


@pytest.mark.parametrize("file", FILES)
async def test_what_is_written_for_the_same_workflow_decodes_to_the_same(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, file: str
) -> None:
    """S16: entries, metadata, state and values at every stop; beside them only keys the reference ignores."""
    async with host(namespace, mode, clock=MovableClock(SENT_AT_MS)) as process:
        ours = await run_like_the_recording(process, file)
    stops = stops_of(file)
    assert len(ours) == len(stops)
    for (dump, alarm), stop in zip(ours, stops, strict=True):
        theirs = dump_of(stop)
        assert meaning_of(dump) == meaning_of(theirs)
        here, there = contents_of(dump), contents_of(theirs)
        if file not in ("join", "race"):  # concurrent branches come to their names in any order
            assert here.names == there.names
        assert all(first >= 32 for first in here.own)
        assert not there.own
        check_alarms(file, dump, alarm, theirs, stop["alarm"])


def check_alarms(file: str, dump: Dump, alarm: int | None, theirs: Dump, their_alarm: int | None) -> None:
    """The same alarms: absolute ones exactly, a retry's counted from the attempt that failed."""
    if file == "retry" and their_alarm is not None:
        assert alarm is not None
        assert alarm - last_attempt(dump) == their_alarm - last_attempt(theirs)
    else:
        assert alarm == their_alarm


def last_attempt(dump: Dump) -> int:
    (metadata,) = contents_of(dump).metadata.values()
    return metadata.last_attempt_at_ms


@pytest.mark.parametrize("file", FILES)
async def test_what_is_written_is_the_same_bytes_where_no_map_id_or_time_is_in_it(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, file: str
) -> None:
    """S16: names, fields, entries and metadata, byte for byte where dumps.py does not say that they differ by nature."""
    async with host(namespace, mode, clock=MovableClock(SENT_AT_MS)) as process:
        ours = await run_like_the_recording(process, file)
    compared: set[str] = set()
    for (dump, _), stop in zip(ours, stops_of(file), strict=True):
        compared |= same_bytes(dump, dump_of(stop))
    assert compared == BYTE_EQUAL[file]


BYTE_EQUAL: dict[str, set[str]] = {
    "order": {"name", "field", "metadata", "StepEntry", "MessageEntry"},
    "retry": {"name", "field", "metadata", "StepEntry"},
    "sleep": {"name", "field", "SleepEntry"},
    "loop": {"name", "field", "metadata", "LoopEntry", "StepEntry", "SleepEntry"},
    "loopdone": {"name", "field", "metadata", "LoopEntry", "StepEntry"},
    "values": {"name", "field", "metadata", "StepEntry"},
    "errmeta": {"field"},
    "migrate": {"name", "field", "metadata", "StepEntry", "RemovedEntry", "VersionCheckEntry"},
    "join": {"name", "field", "metadata", "JoinEntry", "StepEntry", "MessageEntry"},
    "race": {"name", "field", "metadata", "StepEntry", "RaceEntry"},
    "rollback": {"name", "field", "metadata", "StepEntry", "RollbackCheckpointEntry"},
    "tried": {"name", "field", "metadata", "StepEntry"},
}
"""What must at least have been compared byte by byte, so that the test cannot pass by leaving everything out."""


async def test_an_alarm_of_a_loaded_dump_is_kept_until_it_is_due(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16: resuming a sleeping workflow keeps its alarm, and arms it where the recording lost it."""
    (stop,) = stops_of("sleep")
    async with host(namespace, mode, clock=MovableClock(RECORDED_AT_MS)) as process:
        await load(process, stop)
        stopped = await process.stop(WORKFLOWS["sleep"])
        assert stopped.sleep_until == YEAR_2100_S
        driver = await namespace.driver()
        assert await driver.get_alarm(process.workflow_id) == stop["alarm"]
        await process.restart()
        driver = await namespace.driver()
        await driver.batch(Batch(alarm=AlarmChange(process.workflow_id, None)))
        await process.stop(WORKFLOWS["sleep"])
        assert await driver.get_alarm(process.workflow_id) == stop["alarm"]
