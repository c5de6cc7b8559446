"""The process that is killed: `soak_worker.py DIRECTORY OPTIONS` hosts a soak's workflows and clients until all have ended.

1. The oracle is a file: a line for each effect, and for each thing that a client was told, written and synced before whoever
   made it goes on. What is in it has happened, whatever else the killing took away.
2. What was acknowledged is never asked for again; what was not is asked for again, under the same id.
3. Few workflows are live at once and idle ones leave memory at once, so most of what happens meets a workflow that is
   arriving, leaving or away.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import trio
from soak_plans import ASKER, NOTES, SENDERS, Plan, child_id, message_id, plan_of, sink_id, sinks_of, workflow_id

from perdure.actors import Supervisor, WorkflowLimit, WorkflowNotFoundError, open_supervisor
from perdure.storage import FileStore, Store, ValueContext
from perdure.workflow import (
    Break,
    Context,
    Continue,
    RequestTimeoutError,
    RequestUnansweredError,
    StepInterruptedError,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowState,
    current_step,
    workflow,
)

__all__ = ["Line", "Options", "Oracle", "SoakCodec", "read_lines", "soak"]


class Options(NamedTuple):
    """What a soak is made of."""

    workflows: int
    seed: int
    max_live: int
    idle_timeout: float
    is_coded: bool


class Line(NamedTuple):
    """One line of the oracle: what happened, to which workflow, and the rest."""

    what: str
    workflow_id: str
    rest: tuple[str, ...]


class Oracle:
    """The file of what has happened."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / "oracle", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, *words: object) -> None:
        """Add a line; it is on disk on return."""
        os.write(self._file, " ".join(map(str, words)).encode() + b"\n")
        os.fdatasync(self._file)


def read_lines(directory: Path) -> Iterator[Line]:
    """All lines of the oracle."""
    path = directory / "oracle"
    for text in path.read_text().splitlines() if path.exists() else ():
        what, workflow_id, *rest = text.split()
        yield Line(what, workflow_id, tuple(rest))


class SoakCodec:
    """A codec that hides nothing and sees every change, of data and of place."""

    overhead_bytes = 8

    def encode(self, data: bytes, context: ValueContext) -> bytes:
        return self._tag(data, context) + data[::-1]

    def decode(self, data: bytes, context: ValueContext) -> bytes:
        plain = data[:7:-1]
        if self._tag(plain, context) != data[:8]:
            raise ValueError("the tag is wrong")
        return plain

    def _tag(self, data: bytes, context: ValueContext) -> bytes:
        return sha256(f"{context.workflow_id}/{context.kind}".encode() + data).digest()[:8]


MAILBOX_LIMIT = 3
"""So small that senders, and workflows that send, often have to wait for room."""

CHILDREN_MAX = 3
"""How many of the workflows that others call may be at work; the callers wait for their turn."""

oracle: Oracle

_ASKED = ("answered", "refused", "unanswered")
"""What an asker is told in the end."""

_TERMINAL = {state.value for state in WorkflowState if state.is_terminal}


def effect(name: str) -> str:
    """Something that happens in the world: it is in the oracle, under a word of its own, when this returns."""
    info = current_step()
    token = os.urandom(8).hex()
    oracle.note("effect", info.workflow_id, name, info.idempotency_key, token)
    return token


async def slow_effect(name: str) -> str:
    await trio.sleep(0.01)
    token = effect(name)
    await trio.sleep(0.005)
    return token


async def shaky(name: str) -> str:
    token = await slow_effect(name)
    if current_step().attempt == 1:
        raise OSError("not the first time")
    return token


@workflow(name="child")
async def child(ctx: Context, given: None) -> str:
    """What another workflow calls."""
    await ctx.sleep("nap", 0.02)
    return await ctx.step("child", slow_effect, "child")


@workflow(name="sink")
async def sink(ctx: Context, given: None) -> int:
    """What others send to, until it is told to stop."""
    for index in count():
        message = await ctx.queue.next(f"m{index}", names=["note", "stop"])
        if message.name == "stop":
            return index
    raise AssertionError("it counts for ever")


@workflow(name="soak")
async def soak(ctx: Context, plan: dict[str, Any]) -> dict[str, Any]:
    """Steps of every kind, messages, naps, a join, a race and a loop; the result is what each gave."""
    naps = dict(map(tuple, plan["naps"]))
    tokens = {"prepare": await ctx.step("prepare", slow_effect, "prepare")}
    tokens["shaky"] = await ctx.step("shaky", shaky, "shaky", retry_backoff_base=0.02)
    tokens["thread"] = await ctx.step("thread", effect, "thread")
    try:
        tokens["charge"] = await ctx.step("charge", slow_effect, "charge", at_most_once=True)
    except StepInterruptedError:
        tokens["charge"] = "interrupted"
    bodies: list[Any] = []
    for index in range(plan["reads"]):
        message = await ctx.queue.next(f"m{index}", names=["go"], completable=True)
        bodies.append(message.body)
        tokens[f"handle-{index}"] = await ctx.step(f"handle-{index}", slow_effect, f"handle-{index}")
        await message.complete(tokens[f"handle-{index}"])
        if index in naps:
            await ctx.sleep(f"nap-{index}", naps[index])

    if plan["sink"] is not None:
        for index in range(NOTES):
            await ctx.send(f"send-{index}", plan["sink"], "note", [plan["number"], index])
    if plan["has_child"]:
        tokens["child"] = await ctx.call("call", child, None, workflow_id=child_id(plan["number"]))

    async def left(ctx: Context) -> str:
        await ctx.sleep("rest", 0.02)
        return await ctx.step("left", slow_effect, "left")

    async def right(ctx: Context) -> str:
        return await ctx.step("right", slow_effect, "right")

    tokens |= await ctx.join("both", {"left": left, "right": right})

    async def loser(ctx: Context) -> str:
        await ctx.step("loser", slow_effect, "loser")
        await ctx.sleep("too long", 3600)
        return "never"

    async def quick(ctx: Context) -> str:
        return await ctx.step("quick", slow_effect, "quick")

    raced = await ctx.race("first", {"quick": quick, "loser": loser})
    tokens["raced"] = raced.value

    async def turn(ctx: Context, number: int) -> Continue[int] | Break[int]:
        await ctx.step("turn", slow_effect, f"turn-{number}")
        return Continue(number + 1) if number < 2 else Break(number + 1)

    turns = await ctx.loop("turns", turn, 0, history_prune_interval=1)
    return {"number": plan["number"], "bodies": bodies, "tokens": tokens, "winner": raced.winner, "turns": turns}


class Clients:
    """The clients of one workflow.

    Args:
        supervisor: Where it is.
        store: Its store.
        plan: What they do.
        told: What earlier processes' clients were told of it.
    """

    def __init__(self, supervisor: Supervisor, store: Store, plan: Plan, told: set[tuple[str, ...]]) -> None:
        self._supervisor = supervisor
        self._store = store
        self._plan = plan
        self._told = told
        self._id = workflow_id(plan.number)

    async def run(self) -> None:
        """Start it, send it messages, do what else the plan says, and wait for its end."""
        if ("ended",) in self._told:
            return
        await trio.sleep(self._plan.delay_s)
        handle = await self._handle()
        async with trio.open_nursery() as nursery:
            for sender in SENDERS:
                nursery.start_soon(self._send, handle, sender)
            nursery.start_soon(self._ask, handle)
            nursery.start_soon(self._act, handle)
            nursery.start_soon(self._await_end, handle)
        self._note("ended")

    async def _handle(self) -> WorkflowHandle:
        if ("spawned",) in self._told:
            return await self._supervisor.get(self._id)
        plan = self._plan
        handle: WorkflowHandle = await self._supervisor.spawn(
            soak, self._id, plan.input(), start_at=plan.start_s or None, deadline=plan.deadline_s
        )
        self._note("spawned")
        return handle

    async def _send(self, handle: WorkflowHandle, sender: str) -> None:
        for index in range(self._plan.messages):
            if {("sent", sender, str(index)), ("refused", sender, str(index))} & self._told:
                continue
            await trio.sleep(self._plan.pause_s)
            try:
                await handle.message("go", [sender, index], id=message_id(self._plan.number, sender, index))
            except WorkflowEndedError:
                self._note("refused", sender, index)
            else:
                self._note("sent", sender, index)

    async def _ask(self, handle: WorkflowHandle) -> None:
        for index in range(self._plan.asks):
            if {words[:3] for words in self._told} & {(told, ASKER, str(index)) for told in _ASKED}:
                continue
            try:
                reply = await self._answer(handle, index)
            except WorkflowEndedError:
                self._note("refused", ASKER, index)
            except RequestUnansweredError:
                self._note("unanswered", ASKER, index)
            else:
                self._note("answered", ASKER, index, reply)
                if await self._answer(handle, index) != reply:
                    self._note("changed", ASKER, index)

    async def _answer(self, handle: WorkflowHandle, index: int) -> str:
        while True:
            try:
                body = [ASKER, index]
                reply: str = await handle.request(
                    "go", body, timeout=5.0, id=message_id(self._plan.number, ASKER, index)
                )
            except RequestTimeoutError:
                continue
            return reply

    async def _act(self, handle: WorkflowHandle) -> None:
        for index, act in enumerate(self._plan.acts):
            if ("did", str(index)) in self._told:
                continue
            await trio.sleep(0.05)
            match act:
                case "pause":
                    await trio.sleep(0.2)
                case "look":
                    await handle.get_state()
                    await handle.history()
                case "cancel":
                    await handle.cancel()
                    if await handle.get_state() is WorkflowState.CANCELLED:
                        self._note("cancelled")
                case _:
                    await getattr(handle, act)()
            self._note("did", index)

    async def _await_end(self, handle: WorkflowHandle) -> None:
        if self._plan.is_left_alone:
            await self._await_row()
        patience_s = 1.0 if self._plan.needs_wakes else inf
        while True:
            try:
                with trio.move_on_after(patience_s):
                    await handle.result()
                    break
            except WorkflowCancelledError:
                break
            except WorkflowFailedError as error:
                if error.name == "WorkflowDeadlineError":
                    self._note("expired")
                    break
                if error.name != "CrashLoopError":
                    self._note("failed", error.name)
                    break
                self._note("looped")  # killed at every step it began, ten times in a row: as it has to be
                await handle.recover()
            else:
                patience_s = min(15.0, 1.5 * patience_s)
                await handle.wake()
        await self._await_child()

    async def _await_row(self) -> None:
        row = await self._store.get_row(self._id)
        while row is None or row.state not in _TERMINAL:
            await trio.sleep(0.5)
            row = await self._store.get_row(self._id)

    async def _await_child(self) -> None:
        """A workflow that was cancelled has its child cancelled afterwards, unless it never got as far as to call it."""
        if self._plan.has_child:
            with suppress(WorkflowNotFoundError, WorkflowCancelledError):
                await (await self._supervisor.get(child_id(self._plan.number))).result()

    def _note(self, what: str, *rest: object) -> None:
        oracle.note(what, self._id, *rest)


async def run_sink(supervisor: Supervisor, name: str, told: set[tuple[str, ...]], others: trio.Event) -> None:
    """Tell a sink to stop once all others have ended, and wait for its end."""
    if ("ended",) in told:
        return
    await others.wait()
    handle = await supervisor.get(name)
    if ("stopped",) not in told:
        await handle.message("stop", id="stop")
        oracle.note("stopped", name)
    await handle.result()
    oracle.note("ended", name)


async def serve(directory: Path, options: Options) -> None:
    told: dict[str, set[tuple[str, ...]]] = {}
    for line in read_lines(directory):
        if line.what != "effect":
            told.setdefault(line.workflow_id, set()).add((line.what, *line.rest))
    store = FileStore(directory / "data", durability="full")
    async with open_supervisor(
        store,
        [soak, child, sink],
        codec=SoakCodec() if options.is_coded else None,
        max_live=options.max_live,
        idle_timeout=options.idle_timeout,
        mailbox_limit=MAILBOX_LIMIT,
        limits={"child": WorkflowLimit(concurrency=CHILDREN_MAX)},
        handle_signals=True,
        grace=2.0,
    ) as supervisor:
        print("ready", flush=True)
        sinks = [sink_id(number) for number in range(sinks_of(options.workflows))]
        for name in sinks:
            if ("spawned",) not in told.get(name, set()):
                await supervisor.spawn(sink, name)
                oracle.note("spawned", name)
        have_ended = trio.Event()
        async with trio.open_nursery() as nursery:
            for name in sinks:
                nursery.start_soon(run_sink, supervisor, name, told.get(name, set()), have_ended)
            async with trio.open_nursery() as inner:
                for number in range(options.workflows):
                    plan = plan_of(options.seed, number, options.workflows)
                    clients = Clients(supervisor, store, plan, told.get(workflow_id(number), set()))
                    inner.start_soon(clients.run)
            have_ended.set()


def end_with_the_killer() -> None:
    """Its end of the pipe is closed when it is gone, however that came about: leave nothing behind that runs for ever."""
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    global oracle
    threading.Thread(target=end_with_the_killer, daemon=True).start()
    directory = Path(sys.argv[1])
    oracle = Oracle(directory)
    trio.run(serve, directory, Options(*json.loads(sys.argv[2])))
    print("finished", flush=True)


if __name__ == "__main__":
    main()
