"""An order that survives `kill -9`: charge a card, wait for the shipping message, tell the customer.

    python examples/order.py --crash during     dies inside the charge: the money is taken, the step has not returned
    python examples/order.py --crash after      charges, then dies while it waits for the shipment; so does --crash alone
    python examples/order.py                    goes on from what is recorded, and finishes

1. What Perdure records happens once in history. What a step does to the outside happens *at least* once: a process can
   die after the effect and before its record. Hence the idempotency key, which is the same on every attempt.
2. The payment service is a stand-in, a file in place of somebody's servers; it is synced before it answers, so that it
   remembers what this process forgets when it is killed.
3. `order` is what a program of yours would hold. Everything else here tells what happens.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import trio

from perdure.actors import open_supervisor
from perdure.workflow import Context, WorkflowHandle, WorkflowState, current_step, workflow

ORDER_ID = "order-123"
WAIT_FOR_STATE_S = 0.02


class Cart(TypedDict):
    """What the customer ordered; the workflow's input."""

    item: str
    cents: int
    customer: str


CART: Cart = {"item": "teapot", "cents": 1999, "customer": "ada@example.com"}


# The workflow.


@workflow
async def order(ctx: Context, cart: Cart) -> dict[str, str]:
    """Charge, wait for the shipment, notify."""
    payment = await ctx.step("charge-card", charge_card, cart)
    scene.tell_outcome("charge-card", payment)
    shipment = await ctx.queue.next("wait-for-shipment", names=["shipment-confirmed"])
    tracking = str(shipment.body)
    scene.tell("wait-for-shipment", "received", f"{tracking} (message id {shipment.id})")
    await ctx.step("notify-customer", notify_customer, cart["customer"], tracking)
    scene.tell_outcome("notify-customer", cart["customer"])
    return {"payment": payment, "tracking": tracking}


def charge_card(cart: Cart) -> str:
    """The effect that must not happen twice. A plain function: it runs in a worker thread."""
    scene.ran.add("charge-card")
    key = current_step().idempotency_key
    scene.tell("charge-card", "running", f"charge {cart['cents']} cents under idempotency key {key}")
    payment, is_new = scene.payments.charge(cart["cents"], idempotency_key=key)
    if is_new:
        scene.tell("payment service", "charged", f"{payment}: the money is taken")
    else:
        scene.tell("payment service", "known key", f"{payment}: charged before under this key, not charged again")
    if scene.crash == "during":
        scene.die("the money is taken, the step has not returned, nothing is recorded")
    return payment


async def notify_customer(customer: str, tracking: str) -> None:
    """Stands for an e-mail."""
    scene.ran.add("notify-customer")
    scene.tell("notify-customer", "running", f"to {customer}: your parcel is on its way, {tracking}")


# The stand-in for a payment service.


class PaymentService:
    """Charges once per idempotency key. One line of JSON per request, synced before it is answered.

    Args:
        path: The ledger; made at the first request.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def requests(self) -> list[dict[str, Any]]:
        """Every request ever made: `key`, `cents`, `payment`, `charged`."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def charge(self, cents: int, *, idempotency_key: str) -> tuple[str, bool]:
        """Take the money, unless this key was charged before.

        Returns:
            The payment's id, and whether money was taken now. Durable on return.
        """
        earlier = self.requests()
        payments = [request["payment"] for request in earlier if request["key"] == idempotency_key]
        count = sum(bool(request["charged"]) for request in earlier)
        payment = payments[0] if payments else f"pay-{count + 1}"
        request = {"key": idempotency_key, "cents": cents, "payment": payment, "charged": not payments}
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(request).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return payment, not payments


# Telling what happens.


@dataclass
class Scene:
    """This run of the program: what it was asked to do, and what it did.

    Attributes:
        data: Where the supervisor's directory and the ledger are.
        crash: `during`, `after` or `None`.
        ran: The steps whose functions were called in this process.
    """

    data: Path = Path("demo-data")
    crash: str | None = None
    ran: set[str] = field(default_factory=set[str])

    @property
    def payments(self) -> PaymentService:
        """The stand-in service."""
        return PaymentService(self.data / "payment-service.jsonl")

    def tell(self, what: str, status: str, detail: str) -> None:
        """Print one line of the account."""
        colour = {"running": "36", "replayed": "33", "killed": "31"}.get(status, "32")
        print(f"  {what:<18} {paint(f'{status:<10}', colour)} {detail}", flush=True)

    def tell_outcome(self, step: str, value: str) -> None:
        """Say whether a step's function ran, or its result was taken from history."""
        if step in self.ran:
            self.tell(step, "recorded", f"{value}; from here on it is never called again")
        else:
            self.tell(step, "replayed", f"{value}, from history: its function was not called")

    def die(self, why: str) -> NoReturn:
        """`kill -9` for this process."""
        self.tell("this process", "killed", why)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process does not survive SIGKILL")


scene = Scene()


def paint(text: str, colour: str) -> str:
    """The text in an ANSI colour, where there is a terminal that wants colours."""
    is_wanted = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[{colour}m{text}\x1b[0m" if is_wanted else text


def shorten(path: str | Path) -> str:
    """A path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def look_into(file: str) -> str:
    """The command that shows what is in a workflow's file."""
    beside = Path(sys.executable).with_name("sqlite-utils")
    tool = [shorten(beside)] if beside.exists() else [shorten(sys.executable), "-m", "sqlite_utils"]
    # Keys are tuples: (1, n) names, (2, place) history, (3, 1) the state, (32, 1) id, (32, 2) type; the rest is binary.
    is_text = "key < x'1502' or key in (x'15031501', x'15201501', x'15201502')"
    query = f"select hex(key) as key, length(value) as bytes, iif({is_text}, cast(value as text), '') as text from kv"
    return f'{shlex.join([*tool, "query", shorten(file)])} "{query}" --table'


def tell_account(file: str) -> None:
    """What it cost, why the card was charged once, and where to look."""
    requests = scene.payments.requests()
    charged = sum(bool(request["charged"]) for request in requests)
    print()
    print(f"  attempts at the charge:      {paint(str(len(requests)), '1')}")
    print(f"  times the card was charged:  {paint(str(charged), '1')}")
    print()
    print("  Perdure calls a step again when its process died before the result was recorded, so an effect on the")
    print("  outside world happens at least once. That the card was charged once is the idempotency key's doing: each")
    print("  attempt carries the same key, and the service charges once per key.")
    print()
    print("  The whole workflow is one SQLite file, which nobody holds now. Look into it with:")
    print()
    print(look_into(file), flush=True)


# The program.


async def run_to_the_end(handle: WorkflowHandle) -> None:
    """Send the shipment (a second time does no harm: it has an id) and await the end."""
    await handle.message("shipment-confirmed", "TRACK-456", id=f"shipment-of-{ORDER_ID}")
    result = await handle.result()
    scene.tell(ORDER_ID, "completed", json.dumps(result))


async def wait_until_it_waits(handle: WorkflowHandle) -> WorkflowState:
    """Return once the workflow waits for the shipment, or has ended."""
    while True:
        state = await handle.get_state()
        if state is WorkflowState.SLEEPING or state.is_terminal:
            return state
        await trio.sleep(WAIT_FOR_STATE_S)


async def main() -> None:
    """Start the order or go on with it; crash where asked to."""
    async with open_supervisor(scene.data / "perdure", workflows=[order]) as supervisor:
        handle = await supervisor.spawn(order, ORDER_ID, CART)
        file = supervisor.describe(ORDER_ID)
        print(f"  {paint(ORDER_ID, '1')} lives in {shorten(file)}", flush=True)
        if (await handle.get_state()).is_terminal:
            result = await handle.result()
            scene.tell(ORDER_ID, "completed", f"by an earlier run; nothing ran in this one. {json.dumps(result)}")
        else:
            state = await wait_until_it_waits(handle)
            if scene.crash == "after" and state is WorkflowState.SLEEPING:
                scene.tell("wait-for-shipment", "waiting", "for a message")
                scene.die("the payment is recorded, and it waits for the shipment")
            await run_to_the_end(handle)
    if scene.crash is not None:
        print(f"  There was no place left to crash {scene.crash} the charge; use a fresh --data directory.", flush=True)
    tell_account(file)


def parse_arguments() -> Scene:
    """The scene that the command line asks for."""
    parser = argparse.ArgumentParser(description="An order that survives kill -9.")
    parser.add_argument("--data", type=Path, default=Path("demo-data"), help="directory for its data (demo-data)")
    parser.add_argument(
        "--crash",
        choices=["during", "after"],
        nargs="?",
        const="after",
        help="kill -9 this process during or after the charge (after, if it is not said)",
    )
    arguments = parser.parse_args()
    return Scene(arguments.data, arguments.crash)


if __name__ == "__main__":
    scene = parse_arguments()
    scene.data.mkdir(parents=True, exist_ok=True)
    trio.run(main)
