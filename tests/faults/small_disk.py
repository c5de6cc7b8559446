"""Runs in a mount namespace of its own, on a file system of its own that is small, full, or read-only; see test_small_disk.py.

Usage: small_disk.py DIRECTORY WHAT. Prints "well" at the end.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from perdure.actors import open_supervisor
from perdure.storage import BatchRefusedError, CommitUnknownError, StorageError
from perdure.workflow import Context, workflow

BLOB_BYTES = 60_000
STEPS = 30


@workflow(name="filler")
async def filler(ctx: Context, input: Any) -> str:
    """Stores more than there is room for."""

    async def fill() -> bytes:
        return b"x" * BLOB_BYTES

    for number in range(STEPS):
        await ctx.step(f"fill {number}", fill)
    return "filled"


@workflow(name="small")
async def small(ctx: Context, input: Any) -> Any:
    return (await ctx.queue.next("go")).body


def mount(directory: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(directory)], check=True)


async def until_trouble(supervisor: Any, workflow_id: str) -> BaseException:
    while workflow_id not in supervisor.troubles():  # noqa: ASYNC110  (real time, in a process that does nothing else)
        await trio.sleep(0.01)
    trouble: BaseException = supervisor.troubles()[workflow_id]
    return trouble


async def full(directory: Path) -> None:
    """The disk is full; there is room again; nobody starts anything anew."""
    async with open_supervisor(directory / "data", [filler, small], grace=0) as supervisor:
        waiting = await supervisor.spawn(small, "small", None)
        handle = await supervisor.spawn(filler, "filler", None)
        trouble = await until_trouble(supervisor, "filler")
        assert isinstance(trouble, BatchRefusedError | CommitUnknownError), repr(trouble)
        assert str(directory / "data") in str(trouble), str(trouble)
        before = len(await handle.history())
        assert 3 < before < STEPS
        mount(directory, "size=16m")
        await waiting.message("go", 1)
        assert await waiting.result() == 1
        await handle.wake()
        assert await handle.result() == "filled"
        assert supervisor.troubles() == {}


async def full_over_a_restart(directory: Path) -> None:
    """The disk is full, the process ends, and the next one finds room."""
    with suppress(StorageError):  # the catalog cannot note that it was closed in order
        async with open_supervisor(directory / "data", [filler], grace=0) as supervisor:
            await supervisor.spawn(filler, "filler", None)
            await until_trouble(supervisor, "filler")
    mount(directory, "size=16m")
    async with open_supervisor(directory / "data", [filler], grace=0) as supervisor:
        assert await (await supervisor.get("filler")).result() == "filled"


async def read_only(directory: Path) -> None:
    """A directory that became read-only is refused with its name, and serves again once it can be written to."""
    async with open_supervisor(directory / "data", [small], grace=0) as supervisor:
        await supervisor.spawn(small, "small", None)
    mount(directory, "ro")
    refusal = None
    try:
        async with open_supervisor(directory / "data", [small], grace=0):
            pass
    except StorageError as error:
        refusal = error
    assert refusal is not None, "it was opened"
    assert str(directory / "data") in str(refusal), str(refusal)
    mount(directory, "rw")
    async with open_supervisor(directory / "data", [small], grace=0) as supervisor:
        handle = await supervisor.get("small")
        await handle.message("go", 2)
        assert await handle.result() == 2


if __name__ == "__main__":
    trio.run({"full": full, "restart": full_over_a_restart, "read-only": read_only}[sys.argv[2]], Path(sys.argv[1]))
    print("well")
