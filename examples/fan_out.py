"""Ask several services at once, and live with those that fail.

    python examples/fan_out.py              a carrier refuses, and the depot is down: it fails, and is recovered
    python examples/fan_out.py --depot up   the depot answers at once

1. A join waits for all of its branches, also when one has failed. What has answered by then is kept.
2. What the result can do without is a `ctx.try_step`, whose failure is a value: the offer is made without that carrier.
   What it cannot do without is a `ctx.step`: the join then raises `JoinError`, with the errors of its branches by name.
3. `recover()` runs a failed workflow again. Only what failed is asked again; the count of requests at the end shows it.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from pathlib import Path
from typing import TypedDict

import trio

from perdure.actors import open_supervisor
from perdure.workflow import (
    Branch,
    Context,
    CriticalError,
    JoinError,
    StepFailure,
    StepOk,
    WorkflowFailedError,
    workflow,
)

OFFER_ID = "offer-1"
PRICES = {"north-express": 1290, "slow-and-steady": 640}


class Parcel(TypedDict):
    """What is to be sent; the workflow's input."""

    item: str
    kilograms: float


class Offer(TypedDict):
    """The workflow's output.

    Attributes:
        in_stock: How many the depot has.
        carrier: The cheapest of those that answered.
        cents: Its price.
        left_out: Why each of the others made no offer, by name.
    """

    in_stock: int
    carrier: str
    cents: int
    left_out: dict[str, str]


# The workflow.


@workflow
async def make_offer(ctx: Context, parcel: Parcel) -> Offer:
    """Ask the depot and every carrier at once, and take the cheapest carrier that answers."""

    async def ask_depot(ctx: Context) -> int:
        return await ctx.step("count", services.count_stock, parcel["item"], max_retries=1, retry_backoff_base=0.01)

    def carrier(name: str) -> Branch[int | str]:
        async def ask(ctx: Context) -> int | str:
            match await ctx.try_step("price", services.price, name, parcel["kilograms"], max_retries=0):
                case StepOk(cents):
                    return cents
                case StepFailure() as failure:
                    return failure.error.message

        return Branch(name, ask)

    depot = Branch("depot", ask_depot)
    carriers = [carrier(name) for name in (*PRICES, "light-wings")]
    try:
        answers = await ctx.join("ask-everybody", [depot, *carriers])
    except JoinError as failure:
        for name, error in failure.errors.items():
            tell(name, "failed", f"{error.name}: {error.message}")
        raise
    prices: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for branch in carriers:
        match answers[branch]:
            case int(cents):
                prices[branch.name] = cents
            case str(reason):
                left_out[branch.name] = reason
    cheapest = min(prices, key=prices.__getitem__)
    return Offer(in_stock=answers[depot], carrier=cheapest, cents=prices[cheapest], left_out=left_out)


# What it asks: stand-ins for three companies' servers.


class Services:
    """The depot and the carriers.

    Attributes:
        is_depot_up: Whether the depot answers.
        requests: How often each was asked.
    """

    def __init__(self) -> None:
        self.is_depot_up = False
        self.requests: Counter[str] = Counter()

    async def count_stock(self, item: str) -> int:
        """What the depot has of an item."""
        self.requests["depot"] += 1
        if not self.is_depot_up:
            tell("depot", "asked", "no answer")
            raise ConnectionError("the depot does not answer")
        tell("depot", "asked", f"3 of {item}")
        return 3

    async def price(self, carrier: str, kilograms: float) -> int:
        """What a carrier takes for a parcel, in cents."""
        self.requests[carrier] += 1
        if carrier not in PRICES:
            tell(carrier, "asked", "refused")
            # Asking again would not help, so it is not retried.
            raise CriticalError(f"{kilograms} kg are too heavy for us")
        tell(carrier, "asked", f"{PRICES[carrier]} cents")
        return PRICES[carrier]


services = Services()


# The program.


def tell(who: str, what: str, detail: str) -> None:
    """Print one line of the account. In the workflow's own code a line comes again whenever that code runs again."""
    print(f"  {who:<16} {what:<10} {detail}", flush=True)


async def main(data: Path) -> None:
    """Make the offer; if that fails, have the depot repaired and recover it."""
    parcel = Parcel(item="teapot", kilograms=2.5)
    async with open_supervisor(data, workflows=[make_offer]) as supervisor:
        handle = await supervisor.spawn(make_offer, OFFER_ID, parcel)
        try:
            offer = await handle.result()
        except WorkflowFailedError as failure:
            tell(OFFER_ID, "failed", failure.name)
            services.is_depot_up = True
            tell("somebody", "repairs", "the depot, and calls recover()")
            await handle.recover()
            offer = await handle.result()
        tell(OFFER_ID, "completed", f"{offer['carrier']} for {offer['cents']} cents, {offer['in_stock']} in stock")
        for name, reason in offer["left_out"].items():
            tell(name, "left out", reason)
    counts = [f"{name} {count}" for name, count in sorted(services.requests.items())]
    tell("requests", "made", ", ".join(counts) or "none, it was completed by an earlier run")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask several services at once, and live with those that fail.")
    parser.add_argument("--data", type=Path, default=Path("fan-out-data"), help="directory for its data")
    parser.add_argument("--depot", choices=["up", "down"], default="down", help="whether the depot answers (down)")
    flags = parser.parse_args()
    services.is_depot_up = flags.depot == "up"
    # That the workflow failed is told in the account; the engine's own line about it would come twice.
    logging.getLogger("perdure").setLevel(logging.ERROR)
    trio.run(main, flags.data)
