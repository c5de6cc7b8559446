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
from tracing import CALLS, SYNCS, WRITES, Call, points, run

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


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_the_log_is_synced_before_anything_is_acknowledged(scratch: Path, mode: str) -> None:
    """S40: at full, on the stock SQLite: nothing written to the workflow's log is unsynced when somebody is told of it."""
    code, calls = run(scratch, mode)  # type: ignore[arg-type]
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
            assert not {path for path in unsynced if path.endswith("-wal") and "/workflows/" in path}, call
        elif call.name in SYNCS:
            unsynced.discard(call.path)
            synced.add(call.path)
        elif call.name in ("write", "pwrite64") and "/data/" in call.path:
            unsynced.add(call.path)
    wal = [path for path in synced if path.endswith(".sqlite-wal") and "/workflows/" in path]
    assert len(wal) == 1
    data = str(scratch / "data")
    assert {data, f"{data}/workflows", f"{data}/catalog.sqlite-wal", f"{data}/lock"} <= synced
    # The new file is synced before it has its name, and its directory before anybody is told.
    before_spawn = told["acknowledged spawn"]
    names = [(call.name, "new" if ".new-" in call.text else "") for call in before_spawn if "/workflows" in call.text]
    assert ("fsync", "new") in names
    assert names.index(("fsync", "new")) < names.index(("link", "new")) < names.index(("fsync", ""))


def check_end(scratch: Path, fault: str) -> None:
    """The next process comes to the end of an undisturbed run, and does nothing again that was recorded."""
    told = Told(scratch / "told")
    try:
        trio.run(lambda: live(scratch / "data", told, commit_in="inline"))
        lines = told.lines()
        assert lines.count("acknowledged result") >= 1
        for name in "ab":
            assert 1 <= lines.count(f"did {name}") <= 3
            if f"recorded {name}" in lines:
                assert f"did {name}" not in lines[lines.index(f"recorded {name}") :], "it was recorded"
    except BaseException as error:
        error.add_note(f"after {fault}: {told.lines()}")
        raise


def shard_of(scratch: Path, names: tuple[str, ...], shard: int) -> list[tuple[str, int]]:
    """One part of all calls of these names that the undisturbed program makes."""
    place = scratch / "undisturbed"
    place.mkdir()
    code, calls = run(place, "inline")
    assert code == 0
    shutil.rmtree(place)
    found = points(calls, names)
    assert len(found) > 80
    return found[shard::SHARDS]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_process_that_dies_at_any_call_is_carried_on_by_the_next(scratch: Path, shard: int) -> None:
    """S39, S43: killed at the n-th write or sync, for each n that there is."""
    explored = shard_of(scratch, CALLS, shard)
    for name, number in explored:
        place = scratch / f"{name}-{number}"
        place.mkdir()
        fault = f"{name}:signal=KILL:when={number}"
        code, _ = run(place, "inline", fault=fault)
        assert code in (-9, 137), f"{fault}: it lived"
        check_end(place, fault)
        shutil.rmtree(place)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_an_error_of_any_call_is_a_typed_error_or_nothing_and_the_workflow_goes_on(
    scratch: Path, shard: int, error: str
) -> None:
    """S41: at the n-th call, for each n: what was acknowledged is there for the next process, which comes to the end."""
    for name, number in shard_of(scratch, CALLS if error == "EIO" else WRITES, shard):
        place = scratch / f"{name}-{number}"
        place.mkdir()
        fault = f"{name}:error={error}:when={number}"
        _, calls = run(place, "inline", fault=fault)
        assert sum("(INJECTED)" in call.text for call in calls) >= 1, f"{fault}: nothing failed"
        check_end(place, fault)
        shutil.rmtree(place)
