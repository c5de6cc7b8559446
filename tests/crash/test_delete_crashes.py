"""A supervisor killed at any point of ending, deleting and spawning again under one id: never the old result.

Every system call that changes the directory is such a point (`deaths.py`). Each state that a killed process could have left
is opened on the same start of the machine, where the catalog is trusted, and on another, where it is read again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import trio
from deaths import Deaths
from harness import MovableClock
from trio.testing import MockClock

from perdure.actors import WorkflowNotFoundError, open_supervisor
from perdure.storage import FileStore
from perdure.storage.directory import Host
from perdure.workflow import Context, WorkflowState, workflow

effects: list[str] = []


async def effect(name: str) -> str:
    effects.append(name)
    return name


@workflow(name="job")
async def job(ctx: Context, name: str) -> str:
    done = await ctx.step("do", effect, name)
    await ctx.sleep("nap", 5)
    return f"done {done}"


def store(data: Path, boot_id: str) -> FileStore:
    return FileStore(data, durability="normal", commit_in="inline", host=Host(boot_id=lambda: boot_id))


async def life(deaths: Deaths, clock: MovableClock) -> None:
    deaths.phase = "first"
    async with open_supervisor(store(deaths.data, "boot-1"), [job], clock=clock) as supervisor:
        neighbour = await supervisor.spawn(job, "neighbour", "neighbour")
        old = await supervisor.spawn(job, "job", "old", attributes={"life": 1})
        assert await old.result() == "done old"
        assert await neighbour.result() == "done neighbour"
        await trio.sleep(1)
        deaths.phase = "ended"
        deaths.point()
        deaths.phase = "deleting"
        await supervisor.delete("job")
        deaths.phase = "deleted"
        deaths.point()
        deaths.phase = "respawning"
        new = await supervisor.spawn(job, "job", "new", attributes={"life": 2})
        deaths.phase = "respawned"
        deaths.point()
        assert await new.result() == "done new"


ALLOWED = {
    "first": {None, "done old"},
    "ended": {"done old"},
    "deleting": {"done old", None},
    "deleted": {None},
    "respawning": {None, "done new"},
    "respawned": {"done new"},
}


async def look(data: Path, boot_id: str, clock: MovableClock) -> str | None:
    """What a new process makes of it, given time; then the id is deleted and used a third time."""
    async with open_supervisor(store(data, boot_id), [job], clock=clock) as supervisor:
        await trio.sleep(20)
        infos = {info.id: info for info in await supervisor.list()}
        assert {info.state for info in infos.values()} <= {WorkflowState.COMPLETED}
        assert {info.reason for info in infos.values()} <= {None}
        found = None
        if "job" in infos:
            found = await (await supervisor.get("job")).result()
            life = {"done old": 1, "done new": 2}[found]
            assert [info.id for info in await supervisor.list(attributes={"life": life})] == ["job"]
            assert await supervisor.count(attributes={"life": 3 - life}) == 0
            await supervisor.delete("job")
        else:
            with pytest.raises(WorkflowNotFoundError):
                await supervisor.get("job")
            assert await supervisor.count(attributes={"life": 1}) == 0
        assert await (await supervisor.spawn(job, "job", "third")).result() == "done third"
        assert await supervisor.reindex() == 0
    return found


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
async def test_the_old_result_never_comes_back(tmp_path: Path, autojump_clock: MockClock, boot_id: str) -> None:
    """S50, S52: killed at any point, and after a power cut; what was acknowledged is so, and nothing is done twice."""
    effects.clear()
    clock = MovableClock()
    deaths = Deaths(tmp_path / "data", tmp_path / "copies", commits=True)
    with deaths.watched():
        await life(deaths, clock)
    assert sorted(effects) == ["neighbour", "new", "old"]
    found: Counter[tuple[str, str | None]] = Counter()
    for phase, copy in deaths.found:
        effects.clear()
        result = await look(copy, boot_id, clock)
        assert result in ALLOWED[phase], (phase, copy)
        if phase not in ("first", "respawning", "respawned"):
            assert effects == ["third"], "what had ended is not done again"
        found[phase, result] += 1
    assert {phase for phase, _ in found} == set(ALLOWED)
    assert found["deleting", "done old"]
    assert found["deleting", None]
    assert found["respawned", "done new"]
    assert sum(found.values()) > 50
