"""The workflows of the simulation: they do what their input says, and tell the world what they see.

1. A place is where in its program a workflow is: the numbers of parts, branches and iterations. It is also what names what
   outside belongs to it, so nothing here depends on how the engine names places.
2. What is determined by the program alone is returned as it is, everything else as `["~", it]`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import trio

from perdure.actors import WorkflowLike
from perdure.workflow import (
    BlockFailure,
    Branch,
    Break,
    Context,
    Continue,
    CriticalError,
    JoinError,
    Message,
    QueueTimeoutError,
    RaceError,
    RollbackContext,
    StepError,
    StepOk,
    current_step,
    workflow,
)
from simulation.plans import CHILD, SHARED, SINK, Part, Program
from simulation.world import Key, World, current_world

__all__ = ["WORKFLOWS", "play"]

_UNRECORDED = ("block", "value")
"""Parts that are not recorded by themselves."""


class _Play:
    """One run of a workflow's program."""

    def __init__(self, ctx: Context, input: dict[str, Any]) -> None:
        self.world: World = current_world.get()
        self.key: Key = (ctx.workflow_id, input["generation"])
        self.input = input

    async def run(self, ctx: Context) -> Any:
        ending = self.input["ending"]
        if ending == "repaired":
            await ctx.rollback_checkpoint("checkpoint")
            for number in range(2):
                await self._saga_step(ctx, f"saga-{number}")
        values: Any
        try:
            values = await self.program(ctx, self.input["program"], "")
        except (StepError, JoinError, RaceError) as error:
            values = type(error).__name__
        if ending == "repaired":
            await self._saga_step(ctx, "saga-2")
            await ctx.step("last", self._last, max_retries=0)
        if ending == "fails":
            raise ValueError("as it was told")
        return values

    async def _saga_step(self, ctx: Context, name: str) -> None:
        async def undo(ctx: RollbackContext, output: Any) -> None:
            self.world.undo(self.key, name)
            await trio.sleep(0.01)

        value = await ctx.step(name, partial(self._effect, name, {"seconds": 0.2, "ending": "works"}), rollback=undo)
        self.world.observe(self.key, name, value)

    async def _last(self) -> None:
        if self.key[0] not in self.world.repaired:
            raise CriticalError("it is not repaired yet")

    async def program(self, ctx: Context, program: Program, place: str) -> list[Any]:
        return [
            await self.part(ctx, part, f"n{number}", f"{place}.{number}" if place else str(number))
            for number, part in enumerate(program)
        ]

    async def part(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        is_recorded, is_done = part["do"] not in _UNRECORDED, not part.get("is_ephemeral", False)
        try:
            value = await getattr(self, f"_{part['do']}")(ctx, part, name, place)
        except (StepError, JoinError, RaceError) as error:
            if is_recorded:
                self.world.observe(self.key, place, f"raised {type(error).__name__}: {error}", is_done=is_done)
            raise
        if is_recorded:
            self.world.observe(self.key, place, value, is_done=is_done)
        return value

    # Steps.

    async def _step(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        function: Any = self._plain_effect if part["is_plain"] else self._effect
        options: Any = {"max_retries": 1, "ephemeral": part["is_ephemeral"], "timeout": 600.0}
        if part["ending"] == "tried":
            outcome = await ctx.try_step(name, function, place, part, **options)
            assert not isinstance(outcome, StepOk), "it fails"
            return [outcome.kind, str(outcome.error)]
        return await ctx.step(name, function, place, part, **options)

    async def _effect(self, place: str, part: Part) -> str:
        self.world.begin(self.key, place, current_step().idempotency_key)
        await trio.sleep(part["seconds"])
        return _end(part["ending"])

    def _plain_effect(self, place: str, part: Part) -> str:
        self.world.begin(self.key, place, current_step().idempotency_key)
        return _end(part["ending"])

    async def _once(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        async def function() -> str:
            self.world.begin(self.key, place, current_step().idempotency_key, at_most_once=True)
            await trio.sleep(0.1)
            return "worked"

        outcome = await ctx.try_step(name, function, at_most_once=True)
        return ["~", outcome.value if isinstance(outcome, StepOk) else outcome.kind]

    # Time, and what derives from the seed.

    async def _sleep(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        return ["~", (await ctx.sleep(name, part["seconds"])).value]

    async def _value(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        version = await ctx.get_version(f"{name}-version", 3)
        return [version, ["~", await ctx.now(f"{name}-now"), str(ctx.uuid(name)), ctx.random(name).random()]]

    async def _attributes(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        await ctx.set_attributes(name, {"place": place})
        return None

    # Messages.

    def _given(self, message: Message[Any]) -> Any:
        self.world.arrive(self.key, message.name, message.id)
        return message.body

    async def _read(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        message = await ctx.queue.next(name, names=[f"mail {place}"], completable=part["is_completable"])
        body = self._given(message)
        if part["is_completable"]:
            await ctx.step(f"{name}-work", self._effect, f"{place}.work", {"seconds": 0.1, "ending": "works"})
            await message.complete()
        return body

    async def _batch(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        async def body(ctx: Context, done: list[Any]) -> Any:
            count = part["count"] - len(done)
            messages = await ctx.queue.next_batch("batch", names=[f"mail {place}"], count=count)
            done = [*done, *map(self._given, messages)]
            return Continue(done) if len(done) < part["count"] else Break(done)

        return await ctx.loop(name, body, list[Any]())

    async def _timed(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        try:
            message = await ctx.queue.next(name, names=[f"mail {place}"], timeout=part["seconds"])
        except QueueTimeoutError:
            return ["~", None]
        return ["~", self._given(message)]

    async def _stream(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        async def body(ctx: Context, done: list[Any]) -> Any:
            message = await ctx.queue.next("next", names=[f"stream {place}"])
            if part["nap"]:
                await ctx.sleep("nap", part["nap"])
            done = [*done, self._given(message)]
            return Continue(done) if len(done) < 2 * part["count"] else Break(done)

        read = await ctx.loop(name, body, list[Any](), history_prune_interval=2, history_size=1)
        return {sender: [number for by, number in read if by == sender] for sender in ("x", "y")}

    async def _answer(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        async def body(ctx: Context, done: int) -> Any:
            message = await ctx.queue.next("next", names=[f"ask {place}"], completable=True)
            number = self._given(message)
            if part["nap"]:
                await ctx.sleep("nap", part["nap"])
            await message.complete(number * 10)
            return Continue(done + 1) if done + 1 < part["count"] else Break(done + 1)

        return await ctx.loop(name, body, 0, history_prune_interval=1, history_size=0)

    async def _send(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        body = [f"{self.key[0]}/{self.key[1]}", place]
        await ctx.send(name, SINK, "item", body)
        if not self.world.is_offline:
            sent = self.world.sent.setdefault(body[0], [])
            if place not in sent:
                sent.append(place)

    # What has parts.

    async def _loop(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        async def body(ctx: Context, done: list[Any]) -> Any:
            done = [*done, await self.program(ctx, part["body"], f"{place}.{len(done)}")]
            return Continue(done) if len(done) < part["count"] else Break(done)

        return await ctx.loop(name, body, list[Any](), history_prune_interval=1, history_size=part["keeps"])

    async def _block(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        async def block(ctx: Context) -> Any:
            return await self.program(ctx, part["body"], place)

        outcome = await ctx.try_block(name, block)
        if isinstance(outcome, BlockFailure):
            return [outcome.source, outcome.name, outcome.step and outcome.step.kind]
        return outcome.value

    async def _join(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        async def branch(number: int, body: Program, ctx: Context) -> Any:
            return await self.program(ctx, body, f"{place}.b{number}")

        branches = [Branch(f"b{number}", partial(branch, number, body)) for number, body in enumerate(part["branches"])]
        return dict((await ctx.join(name, branches)).items())

    async def _race(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        is_tied, count = part["is_tied"], len(part["branches"])

        async def branch(number: int, ctx: Context) -> Any:
            body = part["branches"][0 if is_tied else number]
            inner = {"do": "block", "body": body}
            value = await self._block(ctx, inner, "block", f"{place}.b{number}")
            if number and not is_tied:
                await ctx.queue.next("for ever", names=["never"])
            return value

        result = await ctx.race(name, {f"b{number}": partial(branch, number) for number in range(count)})
        self.world.note_winner(self.key, place, result.winner, count)
        value = ["~", result.winner] if is_tied else result.winner
        return [value, result.value]

    async def _call(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        input = {
            "generation": self.key[1],
            "program": part["program"],
            "ending": "fails" if part["fails"] else "returns",
        }
        return await ctx.call(name, CHILD, input, on_parent_end=part["on_parent_end"])

    async def _shared(self, ctx: Context, part: Part, name: str, place: str) -> Any:
        number = part["number"]
        input = {"generation": 0, "program": SHARED[number], "ending": "returns"}
        return await ctx.call(name, CHILD, input, workflow_id=f"shared-{number}", on_parent_end="leave")


def _end(ending: str) -> str:
    match ending:
        case "critical" | "tried":
            raise CriticalError("for good")
        case "exhausted":
            raise ConnectionError("again and again")
        case "fails once" if current_step().attempt == 1:
            raise ConnectionError("once")
        case _:
            return "worked"


async def play(ctx: Context, input: dict[str, Any]) -> Any:
    """Do what the input says."""
    run = _Play(ctx, input)
    run.world.enter(ctx.workflow_id)
    try:
        return await run.run(ctx)
    finally:
        run.world.leave(ctx.workflow_id)


@workflow(name="play-a")
async def _play_a(ctx: Context, input: dict[str, Any]) -> Any:
    return await play(ctx, input)


@workflow(name="play-b")
async def _play_b(ctx: Context, input: dict[str, Any]) -> Any:
    return await play(ctx, input)


@workflow(name=CHILD)
async def _child(ctx: Context, input: dict[str, Any]) -> Any:
    return await play(ctx, input)


@workflow(name=SINK, mailbox_limit=2)
async def _sink(ctx: Context, _: None) -> list[Any]:
    """Collect what others send."""
    world = current_world.get()
    world.enter(ctx.workflow_id)

    async def read(ctx: Context, seen: list[Any]) -> Any:
        message = await ctx.queue.next("next")
        if message.name == "end":
            return Break(seen)
        await ctx.sleep("work", 0.05)
        return Continue([*seen, message.body])

    try:
        return await ctx.loop("read", read, list[Any]())
    finally:
        world.leave(ctx.workflow_id)


WORKFLOWS: tuple[WorkflowLike, ...] = (_play_a, _play_b, _child, _sink)
