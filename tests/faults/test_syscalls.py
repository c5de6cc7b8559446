"""What the shipped driver asks of the system, on the standard library's SQLite: syncs come first, and any call may fail.

1. The calls are those that `strace` sees; nothing in the process is replaced.
2. A call at which the process dies or an error comes back is each of those that the undisturbed run makes: enumerated, not
   drawn. Afterwards the program runs again, undisturbed, and comes to the same end.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from program import Told, live
from tracing import CALLS, SYNCS, WRITES, Call, Way, points, run

SHARDS = 8


@pytest.fixture
def scratch() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        yield Path(directory)


def acknowledgements(calls: list[Call]) -> Iterator[tuple[str, list[Call]]]:
    """What was told, each with the calls since the one before."""
    since: list[Call] = []
    for call in calls:
        if call.name == "writev":
            yield call.text.partition('iov_base="')[2].partition("\\n")[0], since
            since = []
        else:
            since.append(call)


each_way = pytest.mark.parametrize("way", ["journal", "files"])


@each_way
@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_the_log_is_synced_before_anything_is_acknowledged(scratch: Path, mode: str, way: Way) -> None:
    """S40: at full, on the stock SQLite: nothing written to the workflow's log is unsynced when somebody is told of it.

    Nor is anything that was written to the journal.
    """
    code, calls = run(scratch, mode, way)  # type: ignore[arg-type]
    assert code == 0
    told = dict(acknowledgements(calls))
    lines = list(told)
    assert [line for line in lines if line != "acknowledged message"] == [
        "acknowledged spawn",
        "did a",
        "recorded a",
        "did b",
        "recorded b",
        "acknowledged result",
    ]
    assert "acknowledged message" in lines
    unsynced: set[str] = set()
    synced: set[str] = set()
    for call in calls:
        if call.name == "writev":
            logs = {path for path in unsynced if path.endswith("-wal") and "/workflows/" in path}
            assert not logs | {path for path in unsynced if "/journal/" in path}, call
        elif call.name in SYNCS:
            unsynced.discard(call.path)
            synced.add(call.path)
        elif call.name in ("write", "pwrite64") and "/data/" in call.path:
            unsynced.add(call.path)
    data = str(scratch / "data")
    assert {data, f"{data}/workflows", f"{data}/catalog.sqlite-wal", f"{data}/lock"} <= synced
    wal = [path for path in synced if path.endswith(".sqlite-wal") and "/workflows/" in path]
    # The new file is synced before it has its name, and its directory before anybody is told.
    if way == "files":
        assert len(wal) == 1
        check_new_file(told["acknowledged spawn"], f"{data}/workflows", "link")
    else:
        assert wal == [], "it ended in the journal"
        check_new_file(told["acknowledged spawn"], f"{data}/journal", "rename")
        check_new_file(calls, f"{data}/workflows", "rename")


def check_new_file(calls: list[Call], directory: str, naming: str) -> None:
    """A file that gets its name in a directory is synced before, and the directory after."""
    names = [(call.name, "new" if ".new-" in call.text else "") for call in calls if directory in call.text]
    assert ("fsync", "new") in names
    assert names.index(("fsync", "new")) < names.index((naming, "new"))
    assert ("fsync", "") in names[names.index((naming, "new")) :]


def check_end(scratch: Path, fault: str, way: Way) -> None:
    """The next process comes to the end of an undisturbed run, and does nothing again that was recorded."""
    told = Told(scratch / "told")
    try:
        trio.run(lambda: live(scratch / "data", told, commit_in="inline", journal=way == "journal"))
        lines = told.lines()
        assert lines.count("acknowledged result") >= 1
        for name in "ab":
            assert 1 <= lines.count(f"did {name}") <= 3
            if f"recorded {name}" in lines:
                assert f"did {name}" not in lines[lines.index(f"recorded {name}") :], "it was recorded"
    except BaseException as error:
        error.add_note(f"after {fault}: {told.lines()}")
        raise


def shard_of(scratch: Path, names: tuple[str, ...], shard: int, way: Way) -> list[tuple[str, int]]:
    """One part of all calls of these names that the undisturbed program makes."""
    place = scratch / "undisturbed"
    place.mkdir()
    code, calls = run(place, "inline", way)
    assert code == 0
    shutil.rmtree(place)
    found = points(calls, names)
    assert len(found) > 80
    return found[shard::SHARDS]


@each_way
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_process_that_dies_at_any_call_is_carried_on_by_the_next(scratch: Path, shard: int, way: Way) -> None:
    """S39, S43: killed at the n-th write or sync, for each n that there is."""
    explored = shard_of(scratch, CALLS, shard, way)
    for name, number in explored:
        place = scratch / f"{name}-{number}"
        place.mkdir()
        fault = f"{name}:signal=KILL:when={number}"
        code, _ = run(place, "inline", way, fault=fault)
        assert code in (-9, 137), f"{fault}: it lived"
        check_end(place, fault, way)
        shutil.rmtree(place)


@each_way
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_an_error_of_any_call_is_a_typed_error_or_nothing_and_the_workflow_goes_on(
    scratch: Path, shard: int, error: str, way: Way
) -> None:
    """S41: at the n-th call, for each n: what was acknowledged is there for the next process, which comes to the end."""
    for name, number in shard_of(scratch, CALLS if error == "EIO" else WRITES, shard, way):
        place = scratch / f"{name}-{number}"
        place.mkdir()
        fault = f"{name}:error={error}:when={number}"
        _, calls = run(place, "inline", way, fault=fault)
        assert sum("(INJECTED)" in call.text for call in calls) >= 1, f"{fault}: nothing failed"
        check_end(place, fault, way)
        shutil.rmtree(place)
