"""Record the golden histories of this release: `python tests/replay/record.py`, with tests/support on the path.

Histories are added to and never edited: a release that is recorded is refused. See tests/support/goldens.py for what it is
that is recorded, and test_golden.py for what becomes of it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import goldens
import trio
import trio.testing
from goldens import GOLDEN, HOSTED, MAIL, RECORDED_AT_MS, WORKFLOWS, effects, live_on

from perdure.actors import Supervisor
from perdure.storage import MemoryDriver
from perdure.testing import SimulatedClock, SimulatedDisk, Simulation, record_history
from perdure.workflow import WorkflowState, run_workflow, send_request, start_workflow

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Record everything that this version has, into a directory of its name."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    record(GOLDEN / version)


def record(target: Path) -> None:
    """Record everything into a directory that is not there.

    Raises:
        SystemExit: It is there.
    """
    if target.exists():
        sys.exit(f"{target} exists; golden histories are added to, never edited: release under another version")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / "made"
        made.mkdir()
        index = {name: trio.run(_record_workflow, name, made) for name in WORKFLOWS}
        index["cancelled"] = trio.run(_record_cancelled, made)
        index["asked"] = trio.run(_record_request, made)
        (made / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False, default=repr) + "\n", "utf-8")
        _record_directory(made, Path(directory))
        lines = [f"{digest_of(made / name)}  {name}" for name in files_of(made)]
        (made / "SHA256SUMS").write_text("\n".join(lines) + "\n", "utf-8")
        made.rename(target)


def files_of(release: Path) -> list[str]:
    """The files of a release, but for the list of their sums."""
    found = (path.relative_to(release).as_posix() for path in release.rglob("*") if path.is_file())
    return sorted(name for name in found if name != "SHA256SUMS")


def digest_of(path: Path) -> str:
    """The SHA-256 sum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def _record_workflow(name: str, directory: Path) -> dict[str, Any]:
    effects.clear()
    driver, clock = MemoryDriver(), SimulatedClock(RECORDED_AT_MS)
    stops: dict[str, list[str]] = {}

    async def on_stop(state: WorkflowState) -> None:
        stop = f"{name}-{len(stops):02}"
        await record_history(driver, directory / f"{stop}.json", workflow_id=name, clock=clock)
        stops[stop] = list(effects)

    ending = await live_on(name, driver, clock, on_stop=on_stop)
    return {"ending": ending, "stops": stops}


async def _record_cancelled(directory: Path) -> dict[str, Any]:
    effects.clear()
    driver, clock = MemoryDriver(), SimulatedClock(RECORDED_AT_MS)
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "failing", goldens.failing, None, driver, clock=clock)
        await trio.testing.wait_all_tasks_blocked(0.05)
        await handle.cancel()
    await record_history(driver, directory / "cancelled-00.json", workflow_id="failing", clock=clock)
    return {"ending": ["cancelled"], "stops": {"cancelled-00": list(effects)}}


async def _record_request(directory: Path) -> dict[str, Any]:
    """A request that is in the mailbox, and one that was answered."""
    effects.clear()
    driver, clock = MemoryDriver(), SimulatedClock(RECORDED_AT_MS)
    stops: dict[str, list[str]] = {}
    await run_workflow("answering", goldens.answering, None, driver, clock=clock)
    for number in range(2):
        await send_request(driver, "one", MAIL["one"], id=f"request-{number}", clock=clock)
        stop = f"asked-{number:02}"
        await record_history(driver, directory / f"{stop}.json", workflow_id="answering", clock=clock)
        stops[stop] = []
        clock.move(2)
        await run_workflow("answering", goldens.answering, None, driver, clock=clock)
        clock.move(2)
        await run_workflow("answering", goldens.answering, None, driver, clock=clock)
    return {"ending": ["completed", [MAIL["one"], MAIL["one"]]], "stops": stops}


def _record_directory(made: Path, scratch: Path) -> None:
    disk = SimulatedDisk(scratch / "disk")
    Simulation(HOSTED, disk=disk, clock=SimulatedClock(RECORDED_AT_MS)).run(_fill)
    assert disk.path is not None
    shutil.copytree(disk.path, made / "data")


async def _fill(supervisor: Supervisor) -> None:
    await supervisor.spawn(goldens.friend, "friend", 2)
    await supervisor.spawn(goldens.parent, "parent-done", "child-done")
    await trio.sleep(1)
    await (await supervisor.get("child-done")).message("go", MAIL["go"])
    await supervisor.spawn(goldens.parent, "parent-waits", "child-waits")
    await supervisor.spawn(goldens.short, "later", 3, start_at=7 * 86_400.0, attributes={"kind": "later"})
    await supervisor.spawn(goldens.short, "ended", 4, attributes={"kind": "ended", "size": 1.5})
    await supervisor.spawn(goldens.failing, "failed", None)
    await supervisor.spawn(goldens.saga, "rolled-back", None)
    await (await supervisor.spawn(goldens.short, "cancelled", 5, start_at=1e6)).cancel()
    await supervisor.schedule("daily", goldens.short, 6, every=86_400.0)
    await trio.sleep(60)


if __name__ == "__main__":
    main()
