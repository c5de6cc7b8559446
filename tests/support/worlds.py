"""What is outside of a workflow and survives the deaths of its process: effects, and mail that arrives when it is waited for.

1. An effect knows its step's path. What returned to the workflow is durable, so an effect below a path that was
   acknowledged (`World.acknowledge`) may not happen again: `recurred` names those that did.
2. A message arrives when the workflow waits for one of its name, under an id of its own: sent again by the next process, it is
   one delivery.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import inf
from typing import Any, TypeAlias

import trio
from harness import Crash, Exploration, Host, Namespace, crashes, host

from perdure.storage import Batch, layout
from perdure.storage.schema import EntryKind, decode_entry
from perdure.workflow import ANY_MESSAGE, Context, RollbackContext, RunMode, WorkflowState, current_step

Path: TypeAlias = "tuple[str | int, ...]"
WorldFunction: TypeAlias = "Callable[[World, Context], Awaitable[Any]]"


@dataclass
class World:
    """The outside of one workflow.

    Attributes:
        function: The workflow's function, which is also given its world.
        mail: Name and body of the messages that arrive, in order, each once somebody waits for its name.
        effects: The path of every step's function that was begun, in order.
        acknowledged: Paths at which nothing may happen any more.
        recurred: The effects that did all the same.
        facts: Anything else that there is to know.
    """

    function: WorldFunction
    mail: Sequence[tuple[str, Any]] = ()
    effects: list[Path] = field(default_factory=list)
    acknowledged: set[Path] = field(default_factory=set)
    recurred: list[Path] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    async def workflow(self, ctx: Context, _: object) -> Any:
        return await self.function(self, ctx)

    def begin(self) -> Path:
        """An effect takes place, in the step in whose function the caller is."""
        path = current_step().path
        if any(path[: len(done)] == done for done in self.acknowledged):
            self.recurred.append(path)
        self.effects.append(path)
        return path

    async def step(self, ctx: Context, name: str, value: Any = None, seconds: float = 0.0, **options: Any) -> Any:
        """A step that takes a while; acknowledged as it returns, unless it is ephemeral."""
        path: list[Path] = []
        result = await ctx.step(name, self.effect(value, seconds, path), **options)
        if not options.get("ephemeral"):
            self.acknowledged.update(path)
        return result

    def effect(
        self, value: Any = None, seconds: float = 0.0, path: list[Path] | None = None
    ) -> Callable[[], Awaitable[Any]]:
        """A step's function that takes a while. An exception as the value is raised; a function of the attempt is called."""

        async def effect() -> Any:
            begun = self.begin()
            if path is not None:
                path.append(begun)
            await trio.sleep(seconds)
            result = value(current_step().attempt) if callable(value) else value
            if isinstance(result, Exception):
                raise result
            return result

        return effect

    async def undo(self, ctx: RollbackContext, output: Any) -> None:
        """A step's rollback handler: an effect below its step, which may not recur once the next handler has begun."""
        path = (*ctx.path, "undo")
        if path in self.acknowledged:
            self.recurred.append(path)
        self.acknowledged.update(done for done in self.effects if done[-1] == "undo" and done != path)
        self.effects.append(path)
        await trio.lowlevel.checkpoint()

    def acknowledge(self, *path: str | int) -> None:
        """Nothing at or below this path is to happen again."""
        self.acknowledged.add(path)

    def count(self, name: str) -> int:
        """How often the functions of steps by this name were begun."""
        return sum(path[-1] == name for path in self.effects)

    async def live_on(self, process: Host, *, restarts: bool | Iterator[bool] = False) -> Any:
        """Run to the end, letting time pass and mail arrive; with a restart at every stop, or at those that are told."""
        restarting = repeat(restarts) if isinstance(restarts, bool) else restarts
        sent: set[int] = set()
        while True:
            stopped = await process.stop(self.workflow)
            if stopped.state is WorkflowState.COMPLETED:
                return stopped.output
            if stopped.sleep_until is None and stopped.waiting_for_messages is None:
                # Live mode, and a step's function is in progress: let time pass to whatever is due next.
                pause_s = trio.lowlevel.current_statistics().seconds_to_next_deadline
                assert pause_s != inf, "a step's function waits for ever"
                await process.advance(max(0.0, pause_s))
                continue
            if next(restarting, False):
                await process.restart()
            names = stopped.waiting_for_messages or ()
            due = [
                number
                for number, (name, _) in enumerate(self.mail)
                if number not in sent and (name in names or names == ANY_MESSAGE)
            ]
            if due:
                sent.add(due[0])
                name, body = self.mail[due[0]]
                await process.send(name, body, id=f"message {due[0]}")
                continue
            assert stopped.sleep_until is not None, f"nobody sends {names}"
            await process.advance(max(0.001, stopped.sleep_until - process.clock.now_ms() / 1000))


async def run_in_world(
    namespace: Namespace, mode: RunMode, function: WorldFunction, mail: Sequence[tuple[str, Any]] = (), **options: Any
) -> tuple[Any, World]:
    """One process runs the workflow to its end; its output, and its world."""
    world = World(function, mail)
    async with host(namespace, mode) as process:
        with trio.fail_after(1e9):
            output = await world.live_on(process, **options)
    return output, world


async def explore(
    make_namespace: Callable[[], Namespace],
    mode: RunMode,
    function: WorldFunction,
    check: Callable[[Any, World, Namespace, Crash | None], Awaitable[None]],
    mail: Sequence[tuple[str, Any]] = (),
) -> Exploration:
    """Run to the end with a restart at every stop; then again with a death before and after each write of that."""
    worlds: dict[Namespace, World] = {}

    async def scenario(namespace: Namespace) -> Any:
        world = worlds.setdefault(namespace, World(function, mail))
        async with host(namespace, mode) as process:
            return await world.live_on(process, restarts=True)

    async def checked(output: Any, namespace: Namespace, crash: Crash | None) -> None:
        world = worlds[namespace]
        assert world.recurred == []
        await check(output, world, namespace, crash)

    return await crashes(scenario, make_namespace, checked)


async def outline(namespace: Namespace, *, with_losers: bool = True) -> list[Any]:
    """History without ids and times, by place; `with_losers` unless it is no matter at what a race's losers were stopped."""
    lines: list[Any] = []
    for entry in (await namespace.snapshot()).entries:
        data = {key: value for key, value in entry.data.items() if key != "deadline_ms"}
        if isinstance(data.get("body"), dict):
            data["body"] = {key: data["body"][key] for key in ("name", "body", "completed")}
        if entry.kind == "race" and not with_losers and data["winner"] is not None:
            data["branches"] = data["branches"][data["winner"]]
        metadata = entry.metadata
        lines.append((entry.path, entry.kind, data, metadata and (metadata.status, metadata.attempts, metadata.error)))
    return sorted(lines, key=repr)


def entries_put(batch: Batch) -> list[tuple[tuple[Any, ...], EntryKind]]:
    """Location and content of the entries that a batch writes."""
    return [
        ((entry := decode_entry(value)).location, entry.kind)
        for key, value in batch.puts
        if key.startswith(layout.HISTORY_PREFIX)
    ]


__all__ = ["World", "entries_put", "explore", "outline", "run_in_world"]
