"""An order with a workflow of its own for each parcel, and a ledger that all of them write to.

    python examples/children.py                     each parcel is shipped; one cannot be, and is refunded
    python examples/children.py --crash             the same, with a kill -9 while the parcels are on their way;
    python examples/children.py                     run it again: all goes on, and nothing is done twice

1. `ctx.call` starts a child once, whatever happens, and waits for its result out of memory. Here a join has three of them.
2. A child that fails is an error that the parent may catch. Its name and message are the child's own.
3. `ctx.send` puts a message into another workflow's mailbox exactly once: the ledger's sum is right after any crash.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import TypedDict

import trio

from perdure.actors import open_supervisor
from perdure.workflow import ChildFailedError, Context, CriticalError, workflow

ORDER_ID = "order-1"
LEDGER_ID = "ledger"
CENTS = {"lamp": 4900, "piano": 250000, "book": 1900}


class Entry(TypedDict):
    """What is written to the ledger."""

    item: str
    cents: int


# The workflows.


@workflow
async def ledger(ctx: Context, entries: int) -> int:
    """Add up so many entries, whoever sends them."""
    total = 0
    for number in range(entries):
        message = await ctx.queue.next(f"entry-{number}", names=["entry"], type=Entry)
        total += message.body["cents"]
    return total


@workflow
async def parcel(ctx: Context, item: str) -> str:
    """Pack an item, carry it, and have it paid."""
    await ctx.step("pack", pack, item)
    await ctx.sleep("carry", 0.3)
    await ctx.send("book", LEDGER_ID, "entry", Entry(item=item, cents=CENTS[item]))
    return f"{item} delivered"


@workflow
async def order(ctx: Context, items: list[str]) -> list[str]:
    """Send each item as a parcel; what cannot be sent is refunded."""
    delivered = await ctx.join("deliver", {item: partial(deliver, item) for item in items})
    return list(delivered.values())


async def deliver(item: str, ctx: Context) -> str:
    """One branch of the order."""
    try:
        return await ctx.call("parcel", parcel, item)
    except ChildFailedError as failure:
        await ctx.send("book", LEDGER_ID, "entry", Entry(item=item, cents=0))
        return f"{item} refunded, {failure.error.message}"


async def pack(item: str) -> None:
    """The work of the warehouse."""
    if item == "piano":
        raise CriticalError("it is too heavy")
    tell(item, "packed")
    await trio.sleep(0.01)


# The program.


def tell(who: str, what: str) -> None:
    """Print one line of the account."""
    print(f"  {who:<10} {what}", flush=True)


async def main(data: Path, *, is_crashing: bool) -> None:
    """Have everything delivered, and look at what was called."""
    async with open_supervisor(data, workflows=[order, parcel, ledger]) as supervisor:
        counting = await supervisor.spawn(ledger, LEDGER_ID, len(CENTS))
        handle = await supervisor.spawn(order, ORDER_ID, list(CENTS))
        if is_crashing:
            await trio.sleep(0.2)
            tell("process", "killed")
            os.kill(os.getpid(), signal.SIGKILL)
        for line in await handle.result():
            tell(ORDER_ID, line)
        tell(LEDGER_ID, f"{await counting.result()} cents")
        for child in sorted(await handle.children(), key=lambda child: child.path):
            tell(str(child.path[1]), f"{child.outcome}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An order with a workflow of its own for each parcel.")
    parser.add_argument("--data", type=Path, default=Path("children-data"), help="directory for its data")
    parser.add_argument("--crash", action="store_true", help="kill this process while the parcels are on their way")
    flags = parser.parse_args()
    # That a parcel failed is told in the account; the engine's own line about it would come twice.
    logging.getLogger("perdure").setLevel(logging.ERROR)
    trio.run(partial(main, flags.data, is_crashing=flags.crash))
