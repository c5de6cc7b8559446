"""The histories that each release recorded: they load, stand still where nothing is new, and end as they did then.

tests/support/goldens.py has the workflows, record.py makes the files. Added to, never edited.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import goldens
import pytest
import trio
import trio.testing
from goldens import GOLDEN, HOSTED, MAIL, WORKFLOWS, effects, index_of, live_on

from perdure.actors import open_supervisor
from perdure.storage import MemoryDriver
from perdure.testing import (
    NotReplayableError,
    RecordedHistory,
    SimulatedClock,
    assert_replayable,
    read_history,
    record_history,
)
from perdure.workflow import (
    Context,
    RunMode,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowState,
    load_snapshot,
    run_workflow,
    start_workflow,
    workflow,
)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = _load("record")
RELEASES = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)


def stops() -> list[Any]:
    """Release, name of the workflow in its index, name of the stop."""
    return [
        pytest.param(release, name, stop, id=f"{release.name}-{stop}")
        for release in RELEASES
        for name, told in index_of(release).items()
        for stop in told["stops"]
    ]


each_stop = pytest.mark.parametrize(("release", "name", "stop"), stops())
each_mode = pytest.mark.parametrize("mode", ["yield", "live"])


@pytest.fixture(autouse=True)
def _no_effects() -> None:
    effects.clear()


def history_of(release: Path, stop: str) -> RecordedHistory:
    return read_history(release / f"{stop}.json")


def clock_of(history: RecordedHistory) -> SimulatedClock:
    return SimulatedClock(history.recorded_at_ms)


@each_release
def test_what_was_recorded_was_never_edited(release: Path) -> None:
    """Every file is listed with its sum, and is what it was."""
    lines = (release / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    assert listed == {name: record.digest_of(release / name) for name in record.files_of(release)}


def test_a_release_that_is_recorded_is_not_recorded_again(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="never edited"):
        record.record(RELEASES[0])


def test_all_that_this_release_has_is_recorded(tmp_path: Path) -> None:
    """Recording works, and gives what the newest recording has."""
    record.record(tmp_path / "again")
    names = [name for name in record.files_of(tmp_path / "again") if not name.startswith("data/workflows/")]
    assert names == [name for name in record.files_of(RELEASES[-1]) if not name.startswith("data/workflows/")]


@each_stop
@each_mode
async def test_a_history_stands_still_where_nothing_is_new(release: Path, name: str, stop: str, mode: RunMode) -> None:
    """S16: not a byte is written that differs, and nothing is called again."""
    history = history_of(release, stop)
    if name == "asked":  # there is a request to be answered
        assert assert_replayable(goldens.answering, history).waits_for == ()
        return
    driver = MemoryDriver(dict(history.pairs))
    function = WORKFLOWS[history.workflow.removeprefix("golden-")]
    ended: BaseException | None = None
    try:
        if mode == "yield" or WorkflowState(history.state).is_terminal:
            await run_workflow(history.workflow_id, function, None, driver, clock=clock_of(history), mode=mode)
        else:
            async with trio.open_nursery() as nursery:
                handle = await start_workflow(
                    nursery, history.workflow_id, function, None, driver, clock=clock_of(history)
                )
                await trio.testing.wait_all_tasks_blocked()
                await handle.evict()
    except (WorkflowFailedError, WorkflowCancelledError) as error:
        ended = error
    assert driver.data == history.pairs
    assert effects == []
    assert isinstance(ended, WorkflowFailedError) == (history.state == "failed")
    assert isinstance(ended, WorkflowCancelledError) == (history.state == "cancelled")


@each_stop
async def test_a_history_is_replayable_with_the_code_that_recorded_it(release: Path, name: str, stop: str) -> None:
    """S4: also one that has ended, over all of what it did."""
    history = history_of(release, stop)
    replay = assert_replayable(WORKFLOWS[history.workflow.removeprefix("golden-")], history)
    told = index_of(release)[name]["ending"]
    assert effects == []
    if history.state == "completed":
        assert plain(["completed", replay.output]) == told
    elif history.state == "failed" and replay.has_ended:
        assert replay.error is not None
        assert ["failed", replay.error.name, replay.error.message] == told
    else:
        assert not replay.has_ended


@each_stop
async def test_a_history_is_not_replayable_with_other_code(release: Path, name: str, stop: str) -> None:
    """S4: wherever it was recorded."""
    history = history_of(release, stop)

    @workflow(name=history.workflow)
    async def other(ctx: Context, _: Any) -> None:
        await ctx.step("something else", goldens.give)

    if history.outline:
        with pytest.raises(NotReplayableError):
            assert_replayable(other, history)
    else:
        assert assert_replayable(other, history).new == ("step 'something else'",)
    assert effects == []


@each_stop
@each_mode
async def test_a_history_goes_on_to_the_recorded_end(release: Path, name: str, stop: str, mode: RunMode) -> None:
    """S16: what was done then is not done again, what was not is done now."""
    history, told = history_of(release, stop), index_of(release)[name]
    driver = MemoryDriver(dict(history.pairs))
    ending = await live_on(history.workflow.removeprefix("golden-"), driver, clock_of(history), mode=mode)
    assert plain(ending) == told["ending"]
    assert told["stops"][stop] + effects == list(told["stops"].values())[-1]
    snapshot = await load_snapshot(driver)
    assert snapshot.state.value == told["ending"][0]


def plain(ending: list[Any]) -> Any:
    """As the index has it."""
    return json.loads(json.dumps(ending, default=repr))


@each_release
@pytest.mark.parametrize("catalog", ["as it is", "lost"])
def test_the_data_directory_of_a_release_is_opened_and_all_goes_on(release: Path, catalog: str, tmp_path: Path) -> None:
    """S50: parents, children, messages between workflows, schedules, ends of each kind; also without the catalog."""
    shutil.copytree(release / "data", tmp_path / "data")
    if catalog == "lost":
        (tmp_path / "data" / "catalog.sqlite").unlink()
    trio.run(_go_on, tmp_path / "data")


async def _go_on(directory: Path) -> None:
    async with open_supervisor(directory, workflows=HOSTED) as supervisor:
        states = {info.id: info.state.value for info in await supervisor.list()}
        assert {
            "friend": "completed",
            "parent-done": "completed",
            "child-done": "completed",
            "ended": "completed",
            "failed": "failed",
            "rolled-back": "failed",
            "cancelled": "cancelled",
        }.items() <= states.items()
        assert [info.id for info in await supervisor.list(attributes={"kind": "ended", "size": 1.5})] == ["ended"]
        assert [info.id for info in await supervisor.list(parent_id="parent-waits")] == ["child-waits"]
        with trio.fail_after(60):
            assert await (await supervisor.get("friend")).result() == ["parent-done", "parent-waits"]
            assert await (await supervisor.get("parent-done")).result() == 17
            assert await (await supervisor.spawn(goldens.short, "ended", 4)).result() == 4
            assert await (await supervisor.get("later")).result() == 3, "its start is past by now"
            await (await supervisor.get("child-waits")).message("go", MAIL["go"])
            assert await (await supervisor.get("parent-waits")).result() == 17
            for name in ("failed", "rolled-back"):
                with pytest.raises(WorkflowFailedError, match="refused"):
                    await (await supervisor.get(name)).result()
            with pytest.raises(WorkflowCancelledError):
                await (await supervisor.get("cancelled")).result()
        assert [each.name for each in await supervisor.schedules()] == ["daily"]
        assert await supervisor.faulted() == []
    assert "begin" not in effects, "what the parents had done was done again"


@each_release
def test_each_file_of_the_data_directory_is_replayable(release: Path, tmp_path: Path) -> None:
    shutil.copytree(release / "data", tmp_path / "data")
    code = {each.name: each for each in HOSTED}
    found: list[str] = []
    for path in sorted((tmp_path / "data" / "workflows").iterdir()):
        history = trio.run(record_history, path)
        at_ms = goldens.RECORDED_AT_MS + 61_000
        assert_replayable(code[history.workflow], path, workflows=HOSTED, at=at_ms / 1000)
        found.append(history.workflow_id)
    assert len(found) == 10
    assert effects == []
