"""One simulation: processes that live and die on one disk, their clients, and the oracles that look at all of it.

The oracles, by the names under which they are blamed:

- *acknowledged is kept*: what a sender, asker or canceller was told is in history or mailbox, was given to the code, or is
  told again;
- *no effect twice*: nothing is done again whose outcome the code has seen; at most once is at most once; no key is used twice;
- *replay identical*: what was recorded stays byte for byte, and operations return to each run what they returned before; after
  each death every history is replayed aside, and fits;
- *winner stable*: a race that returned has the same winner for ever;
- *an end is final*: a workflow that has ended stays as it is, and whoever asks is told the same;
- *rollback in reverse*: handlers run in reverse order, each done before the next begins;
- *order of a sender*: what a client or a workflow sends under one name comes in that order;
- *no overdue wake unarmed*: at every write the catalog is no later than the workflow, and nobody who is due stays away;
- *one live activation*: a workflow's function runs once at a time;
- *progress*: once nothing goes wrong any more, everything ends;
- *as its twin*: the run ends as one in which nothing ever goes wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from perdure.actors import Supervisor, WorkflowLimit
from perdure.storage import StorageError
from perdure.storage.wake import TERMINAL_STATES
from perdure.testing import SimulatedClock, SimulatedDisk, run_virtual, virtual_supervisor
from simulation.clients import Clients, ClientState, end_sink, persist
from simulation.interpreter import WORKFLOWS
from simulation.picture import Picture, about
from simulation.plans import CHILD, SINK, LifePlan, Plan, WorkflowPlan, make_plan
from simulation.replay import replay_aside
from simulation.world import Key, Violation, World, current_world, determined

__all__ = ["Figures", "Outcome", "run_plan", "simulate"]

_PATIENCE_S = 60 * 24 * 3600.0
"""Virtual seconds after which what has not come to its end hangs."""

_LATE_S = 400.0
"""How many virtual seconds a workflow that is due may stay away, more than the longest pause between two tries."""


@dataclass
class Figures:
    """What simulations did, to be added up.

    Attributes:
        runs: How many.
        incarnations: How many processes there were.
        killed: How many of them died at a write, after they had begun new history.
        points: At what these died: the primitive that was written, or about to be, and on which side of the write.
        writes: How many writes were made.
        effects: How often the function of a step was begun.
        replays: How many histories were replayed aside.
        faults: What went wrong with writes.
    """

    runs: int = 0
    incarnations: int = 0
    killed: int = 0
    points: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    writes: int = 0
    effects: int = 0
    replays: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: Figures) -> None:
        """Count those of another run too."""
        self.runs += other.runs
        self.incarnations += other.incarnations
        self.killed += other.killed
        self.points += other.points
        self.writes += other.writes
        self.effects += other.effects
        self.replays += other.replays
        self.faults += other.faults


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        ends: How each workflow ended, each time its id was used.
        effects: What was done that is determined: not by the losers of races.
        figures: What was counted.
        log: What happened.
    """

    ends: dict[Key, tuple[str, Any]]
    effects: set[tuple[Key, str]]
    figures: Figures
    log: Sequence[str]


class _Run:
    """One run of a plan."""

    def __init__(self, plan: Plan, directory: Path | None, world: World) -> None:
        self.plan = plan
        self.world = world
        self.disk = SimulatedDisk(directory, atomic=plan.is_atomic)
        self.clock = SimulatedClock()
        self.picture = Picture(world, self.disk)
        self.disk.on_write = self.picture.watch
        self.states = {workflow.workflow_id: ClientState() for workflow in plan.workflows}
        self.figures = Figures(runs=1)
        self.have_ticked = False
        self.options = {
            **plan.options,
            "limits": {kind: WorkflowLimit(concurrency=count) for kind, count in plan.limits.items()},
        }

    def all_lives(self) -> Outcome:
        for number, life in enumerate([*self.plan.lives, None]):
            if self.one_life(number, life):
                break
        self._check_end()
        self.world.check()
        ends = dict(self.world.told)
        return Outcome(ends, self._determined_effects(), self.figures, list(self.world.log))

    def one_life(self, number: int, life: LifePlan | None) -> bool:
        """Run one process; whether all is done."""
        world, picture = self.world, self.picture
        world.boot()
        picture.is_new, picture.dies_at = False, None if life is None else life.dies_at
        if life is not None and life.loses_catalog and self.disk.path is not None:
            for file in self.disk.path.glob("catalog.sqlite*"):
                file.unlink()
        is_done = run_virtual(self._process, life or LifePlan(), seed=self.plan.schedule_seed + number)
        world.now, world.on_blame = (lambda: 0.0), None
        gate = self.disk.gate
        self.figures.incarnations += 1
        self.figures.writes += len(gate.writes)
        for fault_at, fault in gate.faults.items():
            if fault_at < gate.begun:
                self.figures.faults[fault] += 1
        world.note("the process died" if gate.is_dead else "the process left")
        if picture.is_new and gate.died_at is not None and gate.crash_at is not None:
            self.figures.killed += 1
            self.figures.points[about(gate.died_at), gate.crash_at.when] += 1
        world.check()
        if not is_done:
            self._check_acknowledged()
            self._replay_all()
            world.check()
        return is_done

    async def _process(self, life: LifePlan) -> bool:
        world = self.world
        world.now = trio.current_time
        is_done = False
        with trio.CancelScope() as blamed:
            world.on_blame = blamed.cancel
            async with virtual_supervisor(
                WORKFLOWS,
                disk=self.disk,
                clock=self.clock,
                crash_at=life.crash_at,
                faults=life.faults,
                **self.options,
            ) as supervisor:
                self.disk.gate.delay_s = life.write_s
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._move_clock, life)
                    nursery.start_soon(self._watch_wakes, supervisor)
                    nursery.start_soon(_run_errands, supervisor, life)
                    if life.dies_after_s is not None:
                        nursery.start_soon(self._die, life.dies_after_s)
                    with trio.move_on_after(_PATIENCE_S if life.leaves_after_s is None else life.leaves_after_s):
                        await self._all_clients(supervisor)
                        is_done = True
                    if life.leaves_after_s is None and not is_done:
                        self._blame_hang(supervisor)
                    nursery.cancel_scope.cancel()
                if life.drains:
                    with suppress(StorageError):  # of the catalog, which is tried again as the block is left
                        await supervisor.drain()
        return is_done and not self.disk.has_crashed

    async def _all_clients(self, supervisor: Supervisor) -> None:
        await persist(partial(supervisor.spawn, SINK, SINK))
        async with trio.open_nursery() as nursery:
            if self.plan.ticks_s is not None:
                nursery.start_soon(self._tick, supervisor, self.plan.ticks_s)
            for workflow in self.plan.workflows:
                clients = Clients(self.world, workflow, self.states[workflow.workflow_id], self.picture.state)
                nursery.start_soon(clients.run, supervisor)
        await self._until_rest(supervisor, besides=SINK)
        await end_sink(supervisor, self.world)
        await self._until_rest(supervisor)

    async def _until_rest(self, supervisor: Supervisor, besides: str | None = None) -> None:
        """Wait until every workflow has ended, and owes nothing."""
        while True:
            rows = await persist(partial(supervisor.list, limit=10_000))
            left = [row for row in rows if row.id != besides and row.state.value not in TERMINAL_STATES]
            if not left and all(self.picture.wake_ms(row.id) is None for row in rows if row.id != besides):
                return
            await trio.sleep(30)

    async def _tick(self, supervisor: Supervisor, every_s: float) -> None:
        """Have workflows started by the clock for a while; a tick is one workflow, however often its start was tried."""
        part = {"do": "step", "seconds": 0.5, "ending": "works", "is_ephemeral": False, "is_plain": False}
        input = {"generation": 0, "program": [part], "ending": "returns"}
        if not self.have_ticked:
            await persist(partial(supervisor.schedule, "tick", CHILD, input, every=every_s, overlap="queue"))
            await trio.sleep(10 * every_s)
        self.have_ticked = True
        await persist(partial(_unschedule, supervisor))

    async def _move_clock(self, life: LifePlan) -> None:
        for pause_s, seconds in life.clock_moves:
            await trio.sleep(pause_s)
            self.clock.move(seconds)
            self.world.note(f"the clock is set by {seconds} s")

    async def _die(self, after_s: float) -> None:
        await trio.sleep(after_s)
        self.disk.crash()

    # Oracles.

    async def _watch_wakes(self, supervisor: Supervisor) -> None:
        """Whoever is due is there, or soon will be."""
        late: dict[str, float] = {}
        pause_s = 5.0
        residents = supervisor._residents
        while True:
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, 7200.0)
            await wait_all_tasks_blocked()
            now_ms = self.clock.now_ms()
            for workflow_id in list(self.picture.namespaces):
                if self.picture.state(workflow_id) is None:
                    continue
                wake_ms = self.picture.wake_ms(workflow_id)
                is_there = residents.is_running(workflow_id) or workflow_id in residents.dispatcher._queued
                is_held = self.picture.state(workflow_id) == "pending" and bool(self.plan.limits)
                if wake_ms is None or wake_ms > now_ms or is_there or is_held or workflow_id in self.world.evicted:
                    late.pop(workflow_id, None)
                elif trio.current_time() - late.setdefault(workflow_id, trio.current_time()) > _LATE_S:
                    self.world.blame(
                        "no overdue wake unarmed",
                        f"{workflow_id} ({self.picture.state(workflow_id)}) is due since {wake_ms}, and stays away",
                    )

    def _blame_hang(self, supervisor: Supervisor) -> None:
        waiting = {
            workflow_id: self.picture.state(workflow_id)
            for workflow_id in self.picture.namespaces
            if self.picture.state(workflow_id) not in TERMINAL_STATES
        }
        self.world.blame(
            "progress",
            f"not ended: {waiting}; clients: {self.states}; live: {sorted(supervisor._residents.live)}; "
            f"troubles: {supervisor.troubles()}",
        )

    def _check_acknowledged(self) -> None:
        for key, ids in self.world.acknowledged.items():
            workflow_id, generation = key
            if self.states[workflow_id].generation != generation or workflow_id not in self.picture.namespaces:
                continue  # it was deleted, whether its clients were told or not
            given = {id for (whose, _), arrived in self.world.arrived.items() if whose == key for id in arrived}
            if missing := ids - given - self.picture.kept(workflow_id):
                self.world.blame("acknowledged is kept", f"{workflow_id} lost {sorted(missing)}")

    def _replay_all(self) -> None:
        for workflow_id, pairs in self.picture.namespaces.items():
            if self.picture.state(workflow_id) in ("running", "sleeping"):
                self.figures.replays += 1
                replay_aside(self.world, workflow_id, pairs)

    def _check_end(self) -> None:
        self._check_acknowledged()
        self._check_order()
        if self.disk.path is None and (differing := self.picture.differing()):
            self.world.blame("replay identical", f"the disk holds something else than was written: {differing}")
        self.figures.effects = sum(self.world.effects.values())
        for workflow in self.plan.workflows:
            for generation in range(workflow.remakes + 1):
                if (workflow.workflow_id, generation) not in self.world.told:
                    self.world.blame("progress", f"nobody was told how {workflow.workflow_id} ended")

    def _check_order(self) -> None:
        for (key, name), ids in self.world.arrived.items():
            if not name.startswith(("stream ", "ask ")):
                continue
            by_sender: dict[str, list[int]] = {}
            for message_id in ids:
                sender, _, number = message_id.rpartition("/")
                by_sender.setdefault(sender, []).append(int(number))
            for sender, numbers in by_sender.items():
                if numbers != list(range(len(numbers))):
                    self.world.blame("order of a sender", f"{key} was given {numbers} of {sender}")

    def _determined_effects(self) -> set[tuple[Key, str]]:
        def has_lost(key: Key, place: str) -> bool:
            parts = place.split(".")
            return any((key, ".".join(parts[:count])) in self.world.lost for count in range(1, len(parts) + 1))

        certain = self.world.effects.keys() - self.world.uncertain
        return {(key, place) for key, place in certain if not has_lost(key, place)}


async def _run_errands(supervisor: Supervisor, life: LifePlan) -> None:
    for pause_s, errand in life.errands:
        await trio.sleep(pause_s)
        await persist(getattr(supervisor, errand))


async def _unschedule(supervisor: Supervisor) -> None:
    if any(schedule.name == "tick" for schedule in await supervisor.schedules()):
        await supervisor.unschedule("tick")


def run_plan(plan: Plan, directory: Path | None = None) -> Outcome:
    """Run a plan, and its twin in which nothing goes wrong.

    Args:
        plan: What is done.
        directory: Where to keep SQLite files; `None` for a disk in memory.

    Raises:
        Violation: An oracle failed.
    """
    expected = _run_in_world(_without_trouble(plan), None)
    found = _run_in_world(plan, directory)
    for workflow in plan.workflows:
        for generation in range(workflow.remakes + 1):
            _compare(workflow, expected, found, (workflow.workflow_id, generation))
    compared = {workflow.workflow_id for workflow in plan.workflows if workflow.is_compared and not _is_tied(workflow)}
    if odd := {(key, place) for key, place in expected.effects ^ found.effects if key[0] in compared}:
        raise _with_log(Violation("as its twin", f"only one of them did {sorted(odd)}"), found.log)
    return found


def _is_tied(workflow: WorkflowPlan) -> bool:
    """Whether some race has no winner that is given."""
    return "'is_tied': True" in repr(workflow.program)


def _compare(workflow: WorkflowPlan, expected: Outcome, found: Outcome, key: Key) -> None:
    if not workflow.is_compared:
        return
    before, after = expected.ends[key], found.ends[key]
    if determined(list(before)) != determined(list(after)):
        raise _with_log(Violation("as its twin", f"{key} ended as {after}, its twin as {before}"), found.log)


def _without_trouble(plan: Plan) -> Plan:
    """The same workflows, in one life in which nothing goes wrong."""
    workflows = tuple(replace(workflow, acts=(), patience_s=1e6) for workflow in plan.workflows)
    return replace(plan, workflows=workflows, lives=(), limits={}, options={}, is_atomic=True, ticks_s=None)


def _run_in_world(plan: Plan, directory: Path | None) -> Outcome:
    world = World()
    context = copy_context()
    context.run(current_world.set, world)
    try:
        return context.run(_Run(plan, directory, world).all_lives)
    except Violation as violation:
        raise _with_log(violation, list(world.log)) from None
    except BaseException as error:
        error.add_note("\n".join([*world.log][-60:]))
        raise


def _with_log(violation: Violation, log: Sequence[str]) -> Violation:
    violation.add_note("\n".join([*log][-400:]))
    return violation


def simulate(seed: int, directory: Path | None = None) -> Figures:
    """Run the plan of a seed.

    Args:
        seed: Any integer.
        directory: Where to keep SQLite files; `None` for a disk in memory.

    Returns:
        What was done.

    Raises:
        Violation: An oracle failed; its notes say how to repeat it, and what happened.
    """
    try:
        return run_plan(make_plan(Random(seed)), directory).figures
    except BaseException as error:
        where = "" if directory is None else " --sqlite"
        error.add_note(f"again: python tests/simulation/simulate.py {seed}{where}")
        raise
