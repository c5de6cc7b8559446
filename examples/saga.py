"""A trip over three services, none of which can roll another one back: book, book, pay, and undo what is booked.

    python examples/saga.py            the card is refused: the hotel and the flight are cancelled, in this order
    python examples/saga.py --crash    the process is killed inside the hotel's cancellation
    python examples/saga.py            goes on from there: the hotel is asked once more, under the same key, then the flight
    python examples/saga.py --card ok  recovers the failed trip: what was cancelled is booked again, and paid

1. After `ctx.rollback_checkpoint`, a step may say what undoes it. Should the workflow fail, the handlers of the steps that
   have completed run, the last completed first, each recorded before the next begins.
2. A handler happens *at least* once, like a step, hence the key. It is another one than the step's, and both change when
   an undone step runs again: booking anew is not a repetition of the booking that was cancelled.
3. The services are a stand-in, a file in place of somebody's servers; it is synced before it answers, so that it remembers
   what this process forgets when it is killed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import trio

from perdure.actors import open_supervisor
from perdure.workflow import (
    Context,
    CriticalError,
    RollbackContext,
    WorkflowFailedError,
    WorkflowState,
    current_step,
    workflow,
)

TRIP_ID = "trip-1"


class Wishes(TypedDict):
    """Where to, and for how much; the workflow's input."""

    city: str
    cents: int


# The workflow.


@workflow
async def trip(ctx: Context, wishes: Wishes) -> str:
    """Book a flight and a hotel, and pay for both; or nothing of it."""
    await ctx.rollback_checkpoint("bookings")
    flight = await ctx.step("flight", book, "flight", wishes["city"], rollback=cancel)
    hotel = await ctx.step("hotel", book, "hotel", wishes["city"], rollback=cancel)
    receipt = await ctx.step("pay", pay, wishes["cents"], rollback=refund)
    await ctx.step("confirm", confirm, [flight, hotel, receipt])
    return f"{flight}, {hotel}, {receipt}"


async def book(service: str, city: str) -> str:
    """A step: returns the number of the booking, which is what its handler gets."""
    return services.ask(service, "book", city, current_step().idempotency_key)


async def cancel(ctx: RollbackContext, booking: str) -> None:
    """Undoes either booking."""
    services.ask(ctx.step_name, "cancel", booking, ctx.idempotency_key)
    if services.kills_in == ctx.step_name:
        os.kill(os.getpid(), signal.SIGKILL)  # cancelled there, and not yet recorded here


async def pay(cents: int) -> str:
    """Nothing is retried here: a refused card stays refused."""
    if not services.card_is_good:
        services.tell("bank", "refuse", f"{cents} cents")
        raise CriticalError("the card was refused")
    return services.ask("bank", "charge", f"{cents} cents", current_step().idempotency_key)


async def refund(ctx: RollbackContext, receipt: str) -> None:
    """Not needed here, as nothing fails after the payment."""
    services.ask("bank", "refund", receipt, ctx.idempotency_key)


async def confirm(numbers: list[str]) -> None:
    """The last step has nothing to undo."""
    services.tell("mail", "confirm", " and ".join(numbers))


# The stand-in for the services.


@dataclass
class Services:
    """What others run: a file of requests. A key that was seen before changes nothing, and gets the same answer."""

    path: Path = Path()
    card_is_good: bool = False
    kills_in: str | None = None
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def open(self, path: Path) -> None:
        """Remember what was asked before."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ask(self, service: str, action: str, what: str, key: str) -> str:
        """Do something once for each key; returns the number under which it is filed."""
        earlier = [line for line in self.lines if line["key"] == key]
        number = earlier[0]["number"] if earlier else f"{service}-{len(self.lines) + 1}"
        line = {"service": service, "action": action, "what": what, "key": key, "number": number, "new": not earlier}
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.tell(service, action, f"{what} -> {number}" + (" (known already)" if earlier else ""))
        return str(number)

    def tell(self, service: str, action: str, what: str) -> None:
        """Say what happens."""
        print(f"  {service:<8} {action:<8} {what}", flush=True)


services = Services()


async def main(data: Path, *, recovers: bool) -> None:
    """Start the trip, or go on with it; recover it if it has failed and the card is good now."""
    services.open(data / "services.jsonl")
    async with open_supervisor(data, workflows=[trip]) as supervisor:
        handle = await supervisor.spawn(trip, TRIP_ID, Wishes(city="Lisbon", cents=48_900))
        if recovers and await handle.get_state() is WorkflowState.FAILED:
            await handle.recover()
        try:
            print(f"  {TRIP_ID} booked: {await handle.result()}", flush=True)
        except WorkflowFailedError as failure:
            print(f"  {TRIP_ID} failed: {failure.error.message}", flush=True)
        for entry in await handle.history():
            if entry.metadata is not None:
                is_undone = entry.metadata.rollback_completed_at_ms is not None
                told = "undone" if is_undone else entry.metadata.status.name.lower()
                print(f"    {entry.path[-1]:<8} {told}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A trip over three services that is undone when it cannot be paid.")
    parser.add_argument("--data", type=Path, default=Path("saga-data"), help="directory for its data")
    parser.add_argument("--card", choices=["refused", "ok"], default="refused", help="what the bank says to the card")
    parser.add_argument("--crash", action="store_true", help="be killed inside the hotel's cancellation")
    flags = parser.parse_args()
    logging.getLogger("perdure.workflow").setLevel(logging.ERROR)  # the failure is told below
    services.card_is_good = flags.card == "ok"
    services.kills_in = "hotel" if flags.crash else None
    trio.run(lambda: main(flags.data, recovers=services.card_is_good))
