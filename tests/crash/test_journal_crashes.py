"""Crashes of a store whose workflows are young: killed, or without power, at any moment.

1. Programs drawn from seeds (`support/young_lives.py`) work with several workflows at once, over a journal so small that all
   that it does, it does often.
2. Every moment counts: for power cuts each sync and each mark (`support/power_disk.py`), for deaths each change of a file
   (`support/deaths.py`); and all that once more in the recovery from it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from file_stores import opened
from power_disk import PLANS, Recording
from power_sqlite import map_error
from young_lives import IDS, Lineage, Lives, Mark, allowed, found, small_journal

from perdure.storage.sqlite_connection import Durability


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where the system has one."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_journal(monkeypatch)


async def check(
    data: Path, boot_id: str, marks: Sequence[Mark], durability: Durability, where: object, *, is_power_lost: bool
) -> dict[str, Lineage | str | None]:
    """Open what a crash left, and see that each workflow is as it may be."""
    what: dict[str, Lineage | str | None] = {}
    async with opened(data, boot_id, commit_in="inline") as store:
        for workflow_id in IDS:
            may_be = allowed(marks, workflow_id, durability, is_power_lost=is_power_lost)
            try:
                what[workflow_id] = await found(store, workflow_id)
            except AssertionError as error:
                error.add_note(f"{workflow_id} at {where}, where it may be {may_be}")
                raise
            assert what[workflow_id] in may_be, (where, workflow_id)
        assert {each.workflow_id for each in await store.list_rows()} == {
            key for key, each in what.items() if each is not None
        }
    assert not list((data / "journal").iterdir()), where
    return what


async def live(recording: Recording, seed: int, durability: Durability) -> Lives:
    """A program in two processes, with a mark for all that it is told."""
    options: dict[str, Any] = {"commit_in": "inline", "connect": recording.connect, "map_error": map_error}
    lives = Lives(seed, recording.mark)
    with recording.on():
        for _ in range(2):
            async with opened(recording.directory, durability=durability, **options) as store:
                await lives.live(store, 40)
    recording.check()
    return lives


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_young_workflows_survive_a_power_cut(scratch: Path, durability: Durability, seed: int) -> None:
    """S40, S52: at full no batch that was acknowledged is lost, at normal only a suffix; no deleted workflow comes back."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    lives = await live(recording, seed, durability)
    draw = random.Random(seed)
    seen: set[int] = set()
    what: dict[str, Lineage | str | None] = {}
    for cut in recording.cuts():
        for plan in ("lost", draw.choice(PLANS)):
            image = scratch / "image"
            left = hash((cut.leave(image, plan, draw.randrange(2**32)), cut.marks))
            if left not in seen:
                seen.add(left)
                what = await check(image, "boot-2", cut.marks, durability, (cut.number, plan), is_power_lost=True)
            shutil.rmtree(image)
    lives.check(what)
    assert len(seen) > 150
