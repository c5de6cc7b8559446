"""Ask a person, remind, escalate: a wait of days that no restart forgets.

    python examples/approval.py                                  nobody answers: reminded twice, then the manager decides
    python examples/approval.py --answer approved --after 0.7    somebody answers after 0.7 s
    python examples/approval.py --patience 86400                 a day between reminders; stop it and start it as you like

1. Each wait is `ctx.queue.next` with a timeout. Its deadline is recorded by the first run, so stopping the program does
   not start the time again: a deadline that passed meanwhile has passed.
2. The rounds are a `ctx.loop`, whose old iterations are forgotten. A `for` loop would do for three reminders; one that
   asks every day for years must not keep, and replay, all of them.
3. What the loop knows travels in its state. A variable outside of it would be empty again after a restart.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypedDict

import trio

from perdure.actors import WorkflowExistsError, open_supervisor
from perdure.workflow import (
    Break,
    Context,
    Continue,
    QueueTimeoutError,
    WorkflowEndedError,
    WorkflowHandle,
    current_step,
    workflow,
)

APPROVAL_ID = "approval-1"


class Request(TypedDict):
    """What is to be approved, and how long people get; the workflow's input. Durations are in seconds."""

    what: str
    patience: float
    reminders_max: int
    cooling_off: float


class Round(TypedDict):
    """The loop's state: who is asked now, and how often they were reminded."""

    approver: str
    reminders: int


@workflow
async def approval(ctx: Context, request: Request) -> str:
    """Ask for an approval until somebody answers or nobody is left to ask."""
    await ctx.step("ask", send, "lead", f"please approve: {request['what']}")

    async def ask_once(ctx: Context, state: Round) -> Continue[Round] | Break[str]:
        approver, reminders = state["approver"], state["reminders"]
        try:
            answer = await ctx.queue.next("answer", names=["approved", "rejected"], timeout=request["patience"])
        except QueueTimeoutError:
            if reminders < request["reminders_max"]:
                await ctx.step("remind", send, approver, f"reminder {reminders + 1}: {request['what']}")
                return Continue(Round(approver=approver, reminders=reminders + 1))
            if approver == "lead":
                await ctx.step("escalate", send, "manager", f"nobody answered, please decide: {request['what']}")
                return Continue(Round(approver="manager", reminders=0))
            return Break("expired")
        return Break(f"{answer.name} by {answer.body}")

    decision = await ctx.loop("rounds", ask_once, Round(approver="lead", reminders=0))
    # The time in which whoever decided may still add a comment.
    await ctx.sleep("cooling-off", request["cooling_off"])
    comments = await ctx.queue.next_batch("comments", names=["comment"], count=10, timeout=0)
    remarks = [f" ({comment.body})" for comment in comments]
    await ctx.step("tell-requester", send, "requester", decision + "".join(remarks))
    return decision


async def send(to: str, text: str) -> None:
    """Stands for a mail or a chat message; the key lets a real service drop a repetition."""
    print(f"  to {to:<10} {text}   [{current_step().idempotency_key[:8]}]", flush=True)


async def answer_later(handle: WorkflowHandle, answer: str, after_s: float) -> None:
    """Somebody who takes a while; the ids make it harmless to send the same again."""
    await trio.sleep(after_s)
    try:
        await handle.message(answer, "ada", id="answer-of-ada")
        await handle.message("comment", "mind the budget", id="comment-of-ada")
    except WorkflowEndedError:
        print("  ada was too late", flush=True)


async def main(data: Path, request: Request, answer: str | None, after_s: float) -> None:
    """Start the approval, or go on with it, and await the decision."""
    async with open_supervisor(data, workflows=[approval]) as supervisor:
        try:
            handle = await supervisor.spawn(approval, APPROVAL_ID, request)
        except WorkflowExistsError:
            print(f"  {APPROVAL_ID} was started with another request; going on with that one", flush=True)
            handle = await supervisor.get(APPROVAL_ID)
        async with trio.open_nursery() as nursery:
            if answer is not None and not (await handle.get_state()).is_terminal:
                nursery.start_soon(answer_later, handle, answer, after_s)
            print(f"  decision: {await handle.result()}", flush=True)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A human approval with reminders and an escalation.")
    parser.add_argument("--data", type=Path, default=Path("approval-data"), help="directory for its data")
    parser.add_argument("--patience", type=float, default=1.0, help="seconds until a reminder (1)")
    parser.add_argument("--reminders", type=int, default=2, help="reminders until it is escalated (2)")
    parser.add_argument(
        "--cooling-off", type=float, default=0.2, help="seconds between decision and announcement (0.2)"
    )
    parser.add_argument("--answer", choices=["approved", "rejected"], help="somebody answers this ...")
    parser.add_argument("--after", type=float, default=0.0, help="... after this many seconds (0)")
    flags = parser.parse_args()
    asked: Request = {
        "what": "a new teapot",
        "patience": flags.patience,
        "reminders_max": flags.reminders,
        "cooling_off": flags.cooling_off,
    }
    trio.run(main, flags.data, asked, flags.answer, flags.after)
