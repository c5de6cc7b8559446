"""A program that hosts workflows, for the tests of signals: `program.py DIRECTORY MODE`. Says on stdout what happens."""

from __future__ import annotations

import sys
from typing import Any

import trio

from perdure.actors import open_supervisor
from perdure.workflow import Context, Continue, workflow

SECONDS = {"quick": 0.3, "slow": 60.0, "stubborn": 60.0}
"""How long the worker's step takes, by the mode's first word."""


def say(text: str) -> None:
    print(text, flush=True)


@workflow(name="worker")
async def worker(ctx: Context, mode: str) -> str:
    async def work() -> str:
        say("begun")
        with trio.CancelScope(shield=mode == "stubborn"):
            await trio.sleep(SECONDS[mode])
        say("done")
        return mode

    worked = await ctx.step("work", work, timeout=0)
    await ctx.step("never-at-shutdown", say, "next")
    return worked


@workflow(name="waiter")
async def waiter(ctx: Context, input: None) -> Any:
    return (await ctx.queue.next("go")).body


@workflow(name="spinner")
async def spinner(ctx: Context, input: None) -> None:
    """Never rests: a step, and the next."""

    async def body(ctx: Context, state: int) -> Continue[int]:
        await ctx.step("turn", turn, state)
        return Continue(state + 1)

    await ctx.loop("turns", body, 0)


async def turn(number: int) -> int:
    return sum(range(2000)) + number


async def serve(directory: str, mode: str) -> None:
    what, _, how = mode.partition("-")
    options: dict[str, Any] = {"handle_signals": how == "handled", "grace": 60.0 if what == "slow" else 1.0}
    async with open_supervisor(directory, [worker, waiter, spinner], **options) as supervisor:
        if what == "busy":
            for number in range(20):
                await supervisor.spawn(spinner, f"spinner-{number}")
        else:
            await supervisor.spawn(waiter, "waiter-1")
            await supervisor.spawn(worker, "worker-1", what)
        await trio.sleep(0.2)
        say("ready")
        await trio.sleep_forever()


def main() -> None:
    directory, mode = sys.argv[1:]
    try:
        trio.run(serve, directory, mode)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
