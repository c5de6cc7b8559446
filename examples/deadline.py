"""Race work against the clock: the whole report if it is ready in time, a summary if it is not.

    python examples/deadline.py               the pages take too long: the deadline wins, the work is cancelled
    python examples/deadline.py --page 0.05   the report is ready in time: the deadline is forgotten

1. `ctx.race` runs its branches beside each other. The first to return wins; it is durable before the others are
   cancelled, and what those had recorded is deleted in the same write.
2. The deadline is a `ctx.sleep`, so it is recorded: stopping the program does not give the work more time.
3. Cancelled means cancelled: the step's function that is in progress is left with `trio.Cancelled`, and can clean up. What
   it and earlier steps did outside stays done. A race decides what counts, it does not undo.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypedDict

import trio

from perdure.actors import WorkflowExistsError, open_supervisor
from perdure.workflow import Context, workflow

REPORT_ID = "report-1"


class Request(TypedDict):
    """What is to be written, and until when; the workflow's input. Durations are in seconds."""

    pages: int
    page_takes: float
    limit: float


@workflow
async def report(ctx: Context, request: Request) -> str:
    """Write the report, or a summary if that takes too long."""

    async def write(ctx: Context) -> str:
        for number in range(1, request["pages"] + 1):
            await ctx.step(f"page-{number}", write_page, number, request["page_takes"])
        return f"a report of {request['pages']} pages"

    async def deadline(ctx: Context) -> None:
        await ctx.sleep("limit", request["limit"])

    result = await ctx.race("write-in-time", {"write": write, "deadline": deadline})
    if result.value is None:  # the deadline won
        return await ctx.step("summarise", summarise)
    return result.value


async def write_page(number: int, takes: float) -> None:
    """Work that takes a while. It may be cancelled in between, so it says when a page is whole."""
    try:
        await trio.sleep(takes)
    except trio.Cancelled:
        print(f"  page {number}: cancelled half-way", flush=True)
        raise
    print(f"  page {number}: written", flush=True)


async def summarise() -> str:
    """What can be done at once."""
    print("  summary: written", flush=True)
    return "a summary"


async def main(data: Path, request: Request) -> None:
    """Start the report, or go on with it, and tell what became of it and what is recorded."""
    async with open_supervisor(data, workflows=[report]) as supervisor:
        try:
            handle = await supervisor.spawn(report, REPORT_ID, request)
        except WorkflowExistsError:
            print(f"  {REPORT_ID} was started with another request; going on with that one", flush=True)
            handle = await supervisor.get(REPORT_ID)
        print(f"  readers get: {await handle.result()}", flush=True)
        print("  recorded:", flush=True)
        for entry in await handle.history():
            print(f"    {' > '.join(map(str, entry.path)):<32} {entry.kind}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Race work against a deadline.")
    parser.add_argument("--data", type=Path, default=Path("deadline-data"), help="directory for its data")
    parser.add_argument("--pages", type=int, default=5, help="pages of the report (5)")
    parser.add_argument("--page", type=float, default=0.4, help="seconds that a page takes (0.4)")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds until the deadline (1)")
    flags = parser.parse_args()
    trio.run(main, flags.data, Request(pages=flags.pages, page_takes=flags.page, limit=flags.limit))
