"""A small shop: an order is paid, packed and shipped; if nobody packs it within a week, the money goes back.

Its tests (test_shop.py) let the process die at every single write. Run them with `pytest examples/tested_order`, and, to see them
find a bug, with TESTED_ORDER_BUG=1: then the shop makes a new idempotency key for every attempt to charge a card.
"""

from __future__ import annotations

import os
import uuid
from typing import Any, Protocol

from perdure.workflow import Context, current_step, workflow

WEEK_S = 7 * 24 * 3600.0


class Bank(Protocol):
    """A payment service. It does a thing once for each idempotency key."""

    async def charge(self, cents: int, key: str) -> str:
        """Charge the card; the number of the payment."""
        ...

    async def refund(self, payment: str, key: str) -> None:
        """Give the money back."""
        ...


class Carrier(Protocol):
    """Whoever brings the parcels."""

    def order_pickup(self, parcel: str, key: str) -> str:
        """Have it picked up; the tracking number."""
        ...


class Services:
    """Whom the shop has to do with; set as its program starts, or by a test."""

    bank: Bank
    carrier: Carrier


services = Services()


async def charge_card(cents: int) -> str:
    key = current_step().idempotency_key
    if os.environ.get("TESTED_ORDER_BUG"):
        key = str(uuid.uuid4())  # it looks right: it is a key, and a unique one
    return await services.bank.charge(cents, key)


async def give_back(payment: str) -> None:
    await services.bank.refund(payment, current_step().idempotency_key)


def ship(parcel: str) -> str:
    return services.carrier.order_pickup(parcel, current_step().idempotency_key)


@workflow
async def order(ctx: Context, order: dict[str, Any]) -> str:
    payment = await ctx.step("charge-card", charge_card, order["cents"])
    packed = await ctx.queue.next_batch("packed", timeout=WEEK_S)
    if not packed:
        await ctx.step("give-back", give_back, payment)
        return "given back"
    return await ctx.step("ship", ship, packed[0].body)
