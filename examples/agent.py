"""An agent that answers requests for as long as it lives: it remembers, uses tools, asks a person, and survives kill -9.

    python examples/agent.py                     a short conversation; a manager approves what costs money
    python examples/agent.py --crash             the same, killed while it waits for the manager; start it again without
    python examples/agent.py --manager rejects   the manager says no (`--manager sleeps --patience 1`: nothing in time)

1. A question is a request: `handle.request` sends it and waits for `message.complete(answer)`. It has an id, so asking again
   after a crash gives the same answer, and nothing is thought about or paid twice.
2. What the agent remembers is the state of a `ctx.loop`, so its file stays small in years of conversation. When nobody has
   asked for a while it sums up what was said.
3. Thinking (here some rules; else a language model) and every tool are steps: what they returned is recorded, and what a crash
   interrupts is done again with the same idempotency key.
4. A person is asked with a message and a timeout. Until then the agent waits, without any process if need be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
from pathlib import Path
from typing import Literal, TypedDict

import trio

from perdure.actors import open_supervisor
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

AGENT_ID = "agent-1"
TURNS_MAX = 12
TOOLS_MAX = 5


class Persona(TypedDict):
    """The agent's input. Durations are in seconds."""

    name: str
    desk: str
    patience: float
    booking: float
    idle: float


class Turn(TypedDict):
    """Something that was said, by whom."""

    who: Literal["user", "agent", "tool", "summary"]
    text: str


class Thought(TypedDict):
    """What to do next: use a tool on an order, or say something."""

    tool: Literal["look_up", "refund"] | None
    text: str


@workflow(name="agent", mailbox_limit=100)
async def agent(ctx: Context, persona: Persona) -> str:
    """Answer one question after the other until somebody says `stop`."""

    async def turn(ctx: Context, memory: list[Turn]) -> Continue[list[Turn]] | Break[str]:
        idle = persona["idle"] if len(memory) > 1 else None
        try:
            message = await ctx.queue.next("mail", names=["ask", "stop"], timeout=idle, completable=True)
        except QueueTimeoutError:
            return Continue([await ctx.step("sum-up", sum_up, memory)])
        if message.name == "stop":
            await message.complete("Goodbye.")
            return Break("stopped")
        memory = [*memory, Turn(who="user", text=message.body)]
        answer = "I did not get to the end of this."
        for number in range(TOOLS_MAX):
            thought = await ctx.step(f"think-{number}", think, memory)
            if thought["tool"] is None:
                answer = thought["text"]
                break
            found = await use(ctx, number, thought, persona)
            memory = [*memory, Turn(who="tool", text=found)]
        await message.complete(answer)
        return Continue([*memory, Turn(who="agent", text=answer)][-TURNS_MAX:])

    beginning: list[Turn] = []
    return await ctx.loop("conversation", turn, beginning, history_prune_interval=10)


async def use(ctx: Context, number: int, thought: Thought, persona: Persona) -> str:
    """Use a tool. What costs money is a person's to decide."""
    order = thought["text"]
    if thought["tool"] == "look_up":
        return await ctx.step(f"look-up-{number}", look_up, order)
    await ctx.step(f"ask-manager-{number}", tell_manager, persona["desk"], f"{persona['name']}: refund order {order}?")
    try:
        decision = await ctx.queue.next(
            f"decision-{number}", names=["approved", "rejected"], timeout=persona["patience"]
        )
    except QueueTimeoutError:
        return f"nobody decided on the refund of order {order} in time"
    if decision.name == "rejected":
        return f"the refund of order {order} was rejected"
    receipt = await ctx.step(f"refund-{number}", refund, persona["desk"], order)
    await ctx.sleep(f"booking-{number}", persona["booking"])
    return f"order {order} was refunded, receipt {receipt}"


async def think(memory: list[Turn]) -> Thought:
    """Stands for a language model."""
    last = memory[-1]
    if last["who"] == "tool":
        return Thought(tool=None, text=f"I see that {last['text']}.")
    if "hank" in last["text"]:
        return Thought(tool=None, text="You are welcome.")
    order = re.search(r"\d+", last["text"])
    if order is None:
        questions = sum(turn["who"] == "user" for turn in memory)
        return Thought(tool=None, text=f"Which order do you mean? (That was question {questions}.)")
    return Thought(tool="refund" if "refund" in last["text"] else "look_up", text=order[0])


async def sum_up(memory: list[Turn]) -> Turn:
    """Stands for a language model as well."""
    return Turn(who="summary", text=f"{len(memory)} turns, the last one: {memory[-1]['text']}")


async def look_up(order: str) -> str:
    """Stands for a look into the shop."""
    return f"order {order} is on its way"


async def tell_manager(desk: str, text: str) -> None:
    """Stands for a mail to a person."""
    _append(desk, {"asked": text, "key": current_step().idempotency_key})


async def refund(desk: str, order: str) -> str:
    """Stands for a payment service, which drops what it has seen: it is told the same key again after a crash."""
    receipt = current_step().idempotency_key[:8]
    if receipt not in {line.get("receipt") for line in _lines(desk)}:
        _append(desk, {"refunded": order, "receipt": receipt})
    return receipt


def _append(desk: str, line: dict[str, str]) -> None:
    with Path(desk).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _lines(desk: str) -> list[dict[str, str]]:
    path = Path(desk)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# Those who talk to it.

QUESTIONS = {
    "question-1": "Hello?",
    "question-2": "Where is order 17?",
    "question-3": "I want a refund for order 17.",
    "question-4": "Thanks!",
}


async def converse(handle: WorkflowHandle) -> None:
    """Ask all questions. Each has an id, so that asking again, in the next process, is the same question."""
    for request_id, question in QUESTIONS.items():
        print(f"  user:  {question}", flush=True)
        answer = await handle.request("ask", question, timeout=60, id=request_id, reply_type=str)
        print(f"  agent: {answer}", flush=True)
    print(f"  agent: {await handle.request('stop', timeout=60, id='goodbye')}", flush=True)


async def manage(handle: WorkflowHandle, desk: str, manager: str, *, is_crash: bool) -> None:
    """The manager's side: decide once asked; or the process is killed instead."""
    while not any("asked" in line for line in _lines(desk)):  # noqa: ASYNC110 - the desk tells nobody
        await trio.sleep(0.02)
    if is_crash:
        print("  (killed while the manager thinks about it)", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if manager != "sleeps":
        try:
            await handle.message("approved" if manager == "approves" else "rejected", id="decision-1")
        except WorkflowEndedError:
            print("  (the manager was too late)", flush=True)


async def main(data: Path, persona: Persona, manager: str, *, is_crash: bool) -> None:
    """Start the agent, or find it, and talk to it."""
    async with open_supervisor(data, workflows=[agent]) as supervisor:
        handle = await supervisor.spawn(agent, AGENT_ID, persona)
        async with trio.open_nursery() as nursery:
            if not (await handle.get_state()).is_terminal:
                nursery.start_soon(lambda: manage(handle, persona["desk"], manager, is_crash=is_crash))
            await converse(handle)
            print(f"  the agent {await handle.result()}", flush=True)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A long-lived agent that answers requests.")
    parser.add_argument("--data", type=Path, default=Path("agent-data"), help="directory for its data")
    parser.add_argument("--manager", choices=["approves", "rejects", "sleeps"], default="approves")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that the manager has (600)")
    parser.add_argument("--idle", type=float, default=3600.0, help="seconds until it sums up what was said (3600)")
    parser.add_argument("--crash", action="store_true", help="kill the process while the manager is asked")
    flags = parser.parse_args()
    flags.data.mkdir(exist_ok=True)
    who: Persona = {
        "name": "Ada",
        "desk": str(flags.data / "desk.jsonl"),
        "patience": flags.patience,
        "booking": 0.1,
        "idle": flags.idle,
    }
    trio.run(lambda: main(flags.data / "workflows", who, flags.manager, is_crash=flags.crash))
