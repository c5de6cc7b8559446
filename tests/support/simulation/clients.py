"""The clients of a simulation: what is done to workflows from outside, in one process after the other.

1. A client knows what it was told (`ClientState`), whatever becomes of the process that told it: the next one is asked to go on
   from there. What it was not told it asks for again, under the same id.
2. An error of the storage is no answer: the client asks again.
3. What it was told is told to the world, whose oracles remember it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import trio

from perdure.actors import Supervisor, WorkflowNotEndedError, WorkflowNotFoundError
from perdure.storage import StorageError
from perdure.workflow import (
    MailboxFullError,
    RequestTimeoutError,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowSuspendedError,
)
from simulation.plans import SINK, STREAM_SENDERS, WorkflowPlan, asks_of, mail_of, streams_of
from simulation.world import Key, World

__all__ = ["ClientState", "Clients"]

T = TypeVar("T")

_AGAIN_S = 0.5
"""How long a client waits before it asks again, in seconds; longer each time."""


@dataclass
class ClientState:
    """What the clients of one workflow know.

    Attributes:
        generation: How often the workflow was deleted.
        sent: The messages that they were told are there, or refused for good.
        acts: How many acts were done.
        is_repaired: Whether it was asked to recover.
        is_deleting: Whether it is to be deleted, which may have happened without anybody's being told.
        is_done: Whether nothing is left to be done.
    """

    generation: int = 0
    sent: set[str] = field(default_factory=set[str])
    acts: int = 0
    is_repaired: bool = False
    is_deleting: bool = False
    is_done: bool = False


class Clients:
    """The clients of one workflow, in one process.

    Args:
        world: Who is told.
        plan: The workflow.
        state: What they know.
        state_of: Where a workflow stands on the disk, for what may be asked only then.
    """

    def __init__(
        self, world: World, plan: WorkflowPlan, state: ClientState, state_of: Callable[[str], str | None]
    ) -> None:
        self.world = world
        self.plan = plan
        self.state = state
        self._state_of = state_of
        self._pauses = cycle(plan.pauses)

    @property
    def _key(self) -> Key:
        return self.plan.workflow_id, self.state.generation

    async def run(self, supervisor: Supervisor) -> None:
        """Do what is left to be done."""
        state = self.state
        while not state.is_done:
            if not state.is_deleting:
                await self._one_generation(supervisor)
            if state.generation == self.plan.remakes:
                state.is_done = True
            else:
                state.is_deleting = True
                await self._begin_again(supervisor)

    async def _one_generation(self, supervisor: Supervisor) -> None:
        plan, key = self.plan, self._key
        handle = await persist(partial(self._spawn, supervisor))
        await self._check_told(handle, key)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_mail, handle, key)
            for name, count in streams_of(plan.program):
                for sender in STREAM_SENDERS:
                    nursery.start_soon(self._send_stream, handle, key, name, sender, count)
            for name, count in asks_of(plan.program):
                nursery.start_soon(self._ask, handle, key, name, count)
            nursery.start_soon(self._act, handle)
            nursery.start_soon(self._send_letters, supervisor, key)
            await self._until_end(handle, key)
        await self._check_told(handle, key)

    async def _begin_again(self, supervisor: Supervisor) -> None:
        plan, state = self.plan, self.state
        await persist(partial(self._delete, supervisor))
        self.world.note(f"{plan.workflow_id} is deleted")
        self.world.repaired.discard(plan.workflow_id)
        self.world.recovering.discard(plan.workflow_id)
        state.generation, state.acts = state.generation + 1, 0
        state.is_repaired = state.is_deleting = False

    async def _spawn(self, supervisor: Supervisor) -> WorkflowHandle[Any]:
        plan = self.plan
        options: dict[str, Any] = {"start_at": plan.start_s} if plan.start_s else {}
        if plan.deadline_s is not None:
            options["deadline"] = plan.start_s + plan.deadline_s
        handle: WorkflowHandle[Any] = await supervisor.spawn(
            plan.kind, plan.workflow_id, plan.input(self.state.generation), **options
        )
        self.world.note(f"{plan.workflow_id} is spawned ({self.state.generation})")
        return handle

    async def _delete(self, supervisor: Supervisor) -> None:
        while True:
            try:
                await supervisor.delete(self.plan.workflow_id)
            except WorkflowNotFoundError:
                return  # the try before had done it
            except WorkflowNotEndedError:  # it still has to tell others
                if self._state_of(self.plan.workflow_id) not in ("completed", "failed", "cancelled", None):
                    self.world.blame("an end is final", f"{self.plan.workflow_id} had ended, and cannot be deleted")
                await trio.sleep(_AGAIN_S)
            else:
                return

    # Messages.

    async def _send_mail(self, handle: WorkflowHandle[Any], key: Key) -> None:
        for name, count in mail_of(self.plan.program):
            for number in range(count):
                if not await self._send(handle, key, name, number, f"{name}/{number}"):
                    return

    async def _send_stream(self, handle: WorkflowHandle[Any], key: Key, name: str, sender: str, count: int) -> None:
        for number in range(count):
            if not await self._send(handle, key, name, [sender, number], f"{name}/{sender}/{number}"):
                return

    async def _send_letters(self, supervisor: Supervisor, key: Key) -> None:
        """Send to the sink, whose mailbox is small: now waiting for room, now asking again."""
        sink = await persist(partial(supervisor.get, SINK))
        sender = f"client of {key[0]}/{key[1]}"
        for number in range(self.plan.letters):
            letter = f"{sender}/{number}"
            if letter in self.state.sent:
                continue
            send = sink.message if number % 2 else sink.message_nowait
            await persist(partial(send, "item", [sender, str(number)], id=letter), self.plan.patience_s)
            self.state.sent.add(letter)
            self.world.sent.setdefault(sender, []).append(str(number))

    async def _send(self, handle: WorkflowHandle[Any], key: Key, name: str, body: object, letter: str) -> bool:
        """Send a message until it is told to be there; `False` if the workflow has ended."""
        message_id = f"{key[0]}/{key[1]}/{letter}"
        if message_id in self.state.sent:
            return True
        await trio.sleep(next(self._pauses))
        try:
            await persist(partial(handle.message, name, body, id=message_id), self.plan.patience_s)
        except WorkflowEndedError:
            self.state.sent.add(message_id)
            return False
        self.state.sent.add(message_id)
        self.world.acknowledged.setdefault(key, set()).add(message_id)
        self.world.note(f"{message_id} is acknowledged")
        return True

    async def _ask(self, handle: WorkflowHandle[Any], key: Key, name: str, count: int) -> None:
        for number in range(count):
            request_id = f"{key[0]}/{key[1]}/{name}/{number}"
            try:
                reply = await persist(partial(self._request, handle, name, number, request_id), self.plan.patience_s)
            except WorkflowEndedError:
                if (before := self.world.replies.get(request_id)) is not None:
                    self.world.blame("acknowledged is kept", f"the reply {before} to {request_id} is gone")
                return
            if reply != number * 10 or self.world.replies.setdefault(request_id, repr(reply)) != repr(reply):
                self.world.blame("acknowledged is kept", f"the reply to {request_id} was {reply}")

    async def _request(self, handle: WorkflowHandle[Any], name: str, number: int, request_id: str) -> Any:
        while True:
            try:
                return await handle.request(name, number, timeout=500.0, id=request_id)
            except RequestTimeoutError:
                continue

    # Control.

    async def _act(self, handle: WorkflowHandle[Any]) -> None:
        for number, (pause_s, act) in enumerate(self.plan.acts):
            if number < self.state.acts:
                continue
            await trio.sleep(pause_s)
            if act == "evict":
                # Said before, as it takes a while; whoever asks for the workflow meanwhile brings it back.
                self.world.evicted.add(self.plan.workflow_id)
                await persist(handle.evict)
                self.world.note(f"{self.plan.workflow_id} is evicted")
                await trio.sleep(pause_s)
                await persist(handle.wake)
                self.world.evicted.discard(self.plan.workflow_id)
            elif act == "look":
                await persist(handle.history)
                await persist(handle.get_state)
                await persist(handle.children)
            elif act == "backlog":
                await persist(handle.undelivered)
            else:
                await persist(getattr(handle, act))
                if act == "cancel":
                    await self._check_cancelled(handle)
            self.world.note(f"{act} of {self.plan.workflow_id} is done")
            self.state.acts = number + 1

    async def _check_cancelled(self, handle: WorkflowHandle[Any]) -> None:
        state = (await persist(handle.get_state)).value
        if state not in ("cancelled", "completed", "failed"):
            self.world.blame("acknowledged is kept", f"{self.plan.workflow_id} was cancelled, and is {state}")

    async def _until_end(self, handle: WorkflowHandle[Any], key: Key) -> None:
        told = await persist(partial(_result, handle), self.plan.patience_s)
        if self.plan.ending == "repaired" and told[0] == "failed" and not self.state.is_repaired:
            self.world.note(f"{key[0]} has failed, and is repaired")
            if key[0] not in self.world.repaired:
                self._check_undone(key)
                self.world.forget_failures(key)
                self.world.repaired.add(key[0])
            await persist(handle.recover)
            self.state.is_repaired = True
            told = await persist(partial(_result, handle), self.plan.patience_s)
        if key not in self.world.told:
            self.world.told[key] = told
            self.world.note(f"{key} has ended: {told}")

    def _check_undone(self, key: Key) -> None:
        undone = self.world.undone.get(key, [])
        if undone != ["saga-2", "saga-1", "saga-0"]:
            self.world.blame("rollback in reverse", f"{key} undid {undone}")

    async def _check_told(self, handle: WorkflowHandle[Any], key: Key) -> None:
        """What was told of the end stays so."""
        before = self.world.told.get(key)
        if before is not None and (now := await persist(partial(_result, handle))) != before:
            self.world.blame("an end is final", f"{key} was told to have ended as {before}, and then as {now}")


async def _result(handle: WorkflowHandle[Any]) -> tuple[str, Any]:
    try:
        return "completed", await handle.result()
    except WorkflowFailedError as error:
        return "failed", error.name
    except WorkflowCancelledError:
        return "cancelled", None


async def persist(ask: Callable[[], Awaitable[T]], patience_s: float = 1e9) -> T:
    """Ask until there is an answer; who loses patience drops the question and asks again."""
    pause_s = _AGAIN_S
    while True:
        with trio.move_on_after(patience_s):
            try:
                return await ask()
            except (StorageError, WorkflowSuspendedError, MailboxFullError):
                pass
        patience_s *= 2  # or an answer that takes longer never comes
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, 60.0)


async def end_sink(supervisor: Supervisor, world: World) -> None:
    """Have the sink return what came to it, and check that."""
    handle = await persist(partial(supervisor.spawn, SINK, SINK))
    with suppress(WorkflowEndedError):
        await persist(partial(handle.message, "end", id="end"))
    seen: list[Any] = await persist(handle.result)
    came: dict[str, list[str]] = {}
    for sender, place in seen:
        came.setdefault(sender, []).append(place)
        if sender.startswith("client ") and came[sender] != sorted(came[sender]):
            world.blame("order of a sender", f"the sink was given {came[sender]} of {sender}")
    for sender, places in came.items():
        if len(set(places)) != len(places):
            world.blame("no effect twice", f"a message of {sender} came to the sink twice: {places}")
    for sender, places in world.sent.items():
        if missing := [place for place in places if place not in came.get(sender, [])]:
            world.blame("acknowledged is kept", f"{sender} has sent {missing}, which did not come to the sink")
