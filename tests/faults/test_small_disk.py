"""Disks that are really full or read-only: a small file system in a mount namespace of one's own, which needs no root."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("small_disk.py")
SCRIPT = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -B "$3" "$1" "$4"'


@pytest.mark.parametrize("what", ["full", "restart", "read-only"])
def test_a_disk_without_room_or_right_stops_its_workflow_and_with_it_the_workflow_goes_on(
    tmp_path: Path, what: str
) -> None:
    """S41: the error is a refusal or says that the outcome is unknown, and names the file; others go on; repair is enough."""
    command = ["unshare", "-rm", "sh", "-euc", SCRIPT, "sh", str(tmp_path), sys.executable, str(PROGRAM), what]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.stdout.endswith("well\n"), ended.stderr[-4000:]


LIMITED = """
import resource, runpy, sys
import trio
sys.path.insert(0, sys.argv[2])
import small_disk
from perdure.actors import open_supervisor

async def main(directory):
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    async with open_supervisor(directory, [small_disk.filler, small_disk.small], grace=0) as supervisor:
        handle = await supervisor.spawn(small_disk.filler, "filler", None)
        trouble = await small_disk.until_trouble(supervisor, "filler")
        assert directory in str(trouble), trouble
        other = await supervisor.spawn(small_disk.small, "small", None)
        await other.message("go", 3)
        assert await other.result() == 3, "the others go on"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await handle.wake()
        assert await handle.result() == "filled"

trio.run(main, sys.argv[1])
print("well")
"""


def test_a_quota_stops_one_workflow_and_once_raised_it_goes_on(tmp_path: Path) -> None:
    """S41: a limit on the size of files, as a quota has it (`EFBIG`)."""
    command = [sys.executable, "-B", "-c", LIMITED, str(tmp_path / "data"), str(PROGRAM.parent)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.stdout.endswith("well\n"), ended.stderr[-4000:]
