"""The process that is killed: `worker.py DIRECTORY COUNT` hosts COUNT workflows and their senders until all have ended.

1. The oracle is a file: a line for each effect, each acknowledged spawn and each acknowledged message, written and synced
   before whoever made it goes on. What is in it has happened, whatever else the killing took away.
2. What was acknowledged is never asked for again; what was not is asked for again under the same id.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import trio

from perdure.actors import Supervisor, open_supervisor
from perdure.storage import FileStore
from perdure.workflow import Break, Context, Continue, StepInterruptedError, WorkflowHandle, current_step, workflow

MESSAGES = 3
TURNS = 4
EFFECTS = ["prepare", "shaky", "thread", *(f"got-{n}" for n in range(MESSAGES)), *(f"turn-{n}" for n in range(TURNS))]
"""What each workflow must have done at least once; besides `charge`, at most once."""


class Oracle:
    """The file of what has happened."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "oracle"
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, *words: object) -> None:
        """Add a line; it is on disk on return."""
        os.write(self._file, " ".join(map(str, words)).encode() + b"\n")
        os.fsync(self._file)

    def lines(self) -> list[list[str]]:
        """All lines, as words."""
        return [line.split() for line in self._path.read_text().splitlines()]


oracle: Oracle


def effect(name: str) -> str:
    info = current_step()
    oracle.note("effect", info.workflow_id, name, info.idempotency_key)
    return name


async def slow_effect(name: str) -> str:
    await trio.sleep(0.02)
    effect(name)
    await trio.sleep(0.01)
    return name


async def shaky() -> str:
    await slow_effect("shaky")
    if current_step().attempt == 1:
        raise OSError("not the first time")
    return "shaky"


@workflow(name="job")
async def job(ctx: Context, number: int) -> dict[str, Any]:
    """Steps, a retry, a thread, a step that runs at most once, messages, a sleep, a loop."""
    prepared = await ctx.step("prepare", slow_effect, "prepare")
    await ctx.step("shaky", shaky, retry_backoff_base=0.02)
    await ctx.step("thread", effect, "thread")
    try:
        charge = await ctx.step("charge", slow_effect, "charge", at_most_once=True)
    except StepInterruptedError:
        charge = "interrupted"
    bodies: list[Any] = []
    for index in range(MESSAGES):
        message = await ctx.queue.next(f"message-{index}", names=["go"])
        bodies.append(message.body)
        await ctx.step(f"got-{index}", slow_effect, f"got-{message.body}")
    await ctx.sleep("nap", 0.05)

    async def turn(ctx: Context, total: int) -> Continue[int] | Break[int]:
        await ctx.step("turn", slow_effect, f"turn-{total}")
        return Continue(total + 1) if total + 1 < TURNS else Break(total + 1)

    turns = await ctx.loop("turns", turn, 0, history_prune_interval=2)
    return {"number": number, "prepared": prepared, "charge": charge, "bodies": bodies, "turns": turns}


async def client(supervisor: Supervisor, number: int, known: set[tuple[str, ...]]) -> None:
    """Start one workflow, send its messages, wait for its end."""
    workflow_id = f"job-{number}"
    if ("spawned", workflow_id) in known:
        handle: WorkflowHandle = await supervisor.get(workflow_id)
    else:
        handle = await supervisor.spawn(job, workflow_id, number)
        oracle.note("spawned", workflow_id)
    for index in range(MESSAGES):
        message_id = f"{workflow_id}/{index}"
        if ("sent", workflow_id, message_id) not in known:
            await trio.sleep(0.01)
            await handle.message("go", index, id=message_id)
            oracle.note("sent", workflow_id, message_id)
    await handle.result()


async def serve(directory: Path, count: int) -> None:
    known = {tuple(words) for words in oracle.lines() if words[0] in ("spawned", "sent")}
    async with open_supervisor(FileStore(directory / "data", durability="full"), [job]) as supervisor:
        print("ready", flush=True)
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(client, supervisor, number, known)


def main() -> None:
    global oracle
    directory = Path(sys.argv[1])
    oracle = Oracle(directory)
    trio.run(serve, directory, int(sys.argv[2]))
    print("finished", flush=True)


if __name__ == "__main__":
    main()
