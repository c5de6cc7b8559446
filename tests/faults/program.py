"""A small workflow and its client in a process of their own, which somebody lets die or fail at any system call.

What is acknowledged, and what the steps do, goes to a file by `writev`, a call that is never made to fail, before the next thing
is done. The client asks only for what the file does not say was acknowledged; so the same program, run again, goes on.

Usage: program.py DIRECTORY TOLD MODE WAY, with MODE "inline" (everything in one thread) or "thread" (as it is shipped), and WAY
"journal" (new workflows are in the journal) or "files" (each has its file at once).
Exit codes: 0 it came to the end; 3 an error of Perdure's own, whose class is the last line told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from perdure.actors import open_supervisor
from perdure.storage import FileStore, PerdureError
from perdure.workflow import Context, workflow

RESULT = ["a", "b", 7]
PATIENCE_S = 8.0


class Told:
    """The file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tell(self, line: str) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.writev(descriptor, [f"{line}\n".encode()])
        os.close(descriptor)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


def make_order(told: Told) -> Any:
    """The workflow: two steps around a message."""

    async def effect(name: str) -> str:
        told.tell(f"did {name}")
        return name

    @workflow(name="order")
    async def order(ctx: Context, input: int) -> list[Any]:
        first = await ctx.step("a", effect, "a")
        told.tell("recorded a")
        message = await ctx.queue.next("go", names=["go"])
        second = await ctx.step("b", effect, "b")
        told.tell("recorded b")
        return [first, second, message.body]

    return order


async def live(directory: Path, told: Told, *, commit_in: Any, journal: bool) -> None:
    """One life: ask for what was not acknowledged, and wait for the end."""
    order = make_order(told)
    done = set(told.lines())
    store = FileStore(directory, commit_in=commit_in, journal=journal)
    async with open_supervisor(store, [order], grace=0) as supervisor:
        if "acknowledged spawn" in done:
            handle = await supervisor.get("o-1")  # it is there, or an acknowledged workflow was lost
        else:
            handle = await supervisor.spawn(order, "o-1", 1)
            told.tell("acknowledged spawn")
        if "acknowledged message" not in done:
            await handle.message("go", 7, id="m-1")
            told.tell("acknowledged message")
        with trio.fail_after(PATIENCE_S):
            result = await handle.result()
        assert result == RESULT, result
        told.tell("acknowledged result")


def main(arguments: list[str], exit: Callable[[int], None]) -> None:
    """See above."""
    told = Told(Path(arguments[1]))
    try:
        trio.run(lambda: live(Path(arguments[0]), told, commit_in=arguments[2], journal=arguments[3] == "journal"))
    except* trio.TooSlowError:
        told.tell("error TooSlowError")  # it is tried again after a pause, longer than this client waits
        exit(3)
    except* PerdureError as group:
        told.tell(f"error {type(group.exceptions[0]).__name__}")
        exit(3)


if __name__ == "__main__":
    main(sys.argv[1:], lambda code: os._exit(code))
