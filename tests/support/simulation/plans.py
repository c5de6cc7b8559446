"""What one simulation does, as data: programs of workflows, what is done to them from outside, and what goes wrong.

1. Everything is drawn from one `random.Random`: that of a seed, or Hypothesis's own, which then shrinks the plan.
2. A program is *confluent*: what it returns does not depend on what happened when. Every read has a message name of its own
   (but for streams, of which each sender's order counts); the first branch of a race cannot fail and the others never end; what
   may come out in two ways (a read that times out, a sleep that may be woken) is marked so, and not compared.
3. It can always end: nobody waits for what nobody sends, and what does not have to be read is not sent.
4. Programs are plain data, because they are the inputs of workflows.

Rejected: only a seed, and draws while it runs. Nothing of that could be shrunk, and a run could not be told before it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeAlias

from perdure.testing import CrashPoint, Fault
from perdure.testing.faults import When

__all__ = [
    "CHILD",
    "PLAY_KINDS",
    "SHARED",
    "SINK",
    "LifePlan",
    "Part",
    "Plan",
    "Program",
    "WorkflowPlan",
    "asks_of",
    "mail_of",
    "make_plan",
    "streams_of",
]

Part: TypeAlias = "dict[str, Any]"
"""One thing that a program does: `do` says what, the rest how."""

Program: TypeAlias = "list[Part]"

PLAY_KINDS: Final = ("play-a", "play-b")
"""The types of the workflows that clients start. All do the same; limits hold for a type."""

CHILD: Final = "child"
"""The type of the workflows that others call."""

SINK: Final = "sink"
"""The id and the type of the workflow that others send to; its mailbox is small."""

STREAM_SENDERS: Final = ("x", "y")
"""The clients that send to one stream, each in its order."""

_KINDS: Final = (
    *("race", "race", "join", "loop", "step", "message", "sleep", "versioncheck", "rollbackcheckpoint"),
    *("arrival", "state", "alarm", "other", "create", "delete", "own"),
)
"""Kinds of writes, as `picture.about` names them."""

_FAULTS: Final[Sequence[Fault]] = ("refused", "full", "io", "lost", "applied")


@dataclass(frozen=True, slots=True)
class WorkflowPlan:
    """One workflow, and what its clients do. Durations in seconds.

    Attributes:
        workflow_id: Its id.
        kind: Its type.
        program: What it does.
        ending: How it ends: it `returns`, it `fails`, or it is `repaired` after it failed and was rolled back.
        start_s: How long after it was asked for it starts.
        deadline_s: How long after it was asked for it fails, unless it has ended; `None` for never.
        acts: What somebody does to it, each after a pause: `wake`, `evict`, `look` or `cancel`.
        pauses: How long a client waits before each message; used in turn.
        patience_s: How long a client waits for an answer before it asks again.
        remakes: How often it is deleted once it has ended, and its id used again.
        letters: How many messages its client sends to the sink besides.
    """

    workflow_id: str
    kind: str
    program: Program
    ending: str = "returns"
    start_s: float = 0.0
    deadline_s: float | None = None
    acts: tuple[tuple[float, str], ...] = ()
    pauses: tuple[float, ...] = (0.0,)
    patience_s: float = 1000.0
    remakes: int = 0
    letters: int = 0

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody cancels it."""
        return any(act == "cancel" for _, act in self.acts)

    @property
    def is_compared(self) -> bool:
        """Whether it ends as in a run in which nothing goes wrong: time and cancellation do not decide how it ends."""
        return self.deadline_s is None and not self.is_cancelled

    def input(self, generation: int) -> dict[str, Any]:
        """What its function is given."""
        return {"generation": generation, "program": self.program, "ending": self.ending}


@dataclass(frozen=True, slots=True)
class LifePlan:
    """What goes wrong in the life of one process. Durations in seconds.

    Attributes:
        crash_at: At which of its writes it dies.
        dies_at: At which of its writes of one kind it dies otherwise, on which side: seldom ones get their share so.
        dies_after_s: When it dies otherwise, whatever it does.
        faults: What goes wrong with its writes of these numbers.
        write_s: How long each write takes.
        clock_moves: By how much the wall clock is set, each time after a pause.
        leaves_after_s: When it leaves its block in order.
        drains: Whether it comes to rest before that.
        errands: What is asked of the supervisor meanwhile, each after a pause: `list`, `stats`, `faulted` or `reindex`.
        loses_catalog: Whether the catalog is gone when it starts, where there is a file of it.
    """

    crash_at: CrashPoint | None = None
    dies_at: tuple[str, int, When] | None = None
    dies_after_s: float | None = None
    faults: Mapping[int, Fault] = field(default_factory=dict[int, Fault])
    write_s: float = 0.0
    clock_moves: tuple[tuple[float, float], ...] = ()
    leaves_after_s: float | None = None
    drains: bool = False
    errands: tuple[tuple[float, str], ...] = ()
    loses_catalog: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulation.

    Attributes:
        schedule_seed: Of Trio's scheduler; each life has another that follows from it.
        workflows: The workflows, and their clients.
        lives: The processes that come before the one in which nothing goes wrong.
        options: What is given to every supervisor.
        limits: How many workflows of a type may be at work at once, by type.
        is_atomic: Whether the disk takes batches as a whole, or in pieces between which a process can die.
        ticks_s: The period of a schedule that starts workflows by the clock, or `None` for none.
    """

    schedule_seed: int
    workflows: tuple[WorkflowPlan, ...]
    lives: tuple[LifePlan, ...]
    options: Mapping[str, Any]
    limits: Mapping[str, int]
    is_atomic: bool = True
    ticks_s: float | None = None


def make_plan(random: Random, *, deaths_max: int = 8) -> Plan:
    """Draw a plan.

    Args:
        random: The source.
        deaths_max: How many processes die at most: fewer than the ten activations without progress that end a crash loop.
    """
    workflows = tuple(_workflow(random, number) for number in range(random.randint(2, 7)))
    return Plan(
        schedule_seed=random.randint(0, 2**31),
        workflows=workflows,
        lives=tuple(_life(random) for _ in range(random.randint(min(2, deaths_max), deaths_max))),
        options={
            "max_live": random.choice([1, 2, 3, 100]),
            "idle_timeout": random.choice([0.0, 0.5, 60.0]),
            "grace": random.choice([0.0, 1.0, 10.0]),
        },
        limits={kind: random.choice([1, 2]) for kind in PLAY_KINDS if random.randint(0, 5) == 0},
        is_atomic=random.randint(0, 4) > 0,
        ticks_s=random.choice([None, None, None, 0.3, 40.0]),
    )


def _life(random: Random) -> LifePlan:
    how = random.choice(["write", "write", "kind", "kind", "kind", "time", "leaves"])
    faults: dict[int, Fault] = {}
    if random.randint(0, 2) == 0:
        faults = {random.randint(0, 60): random.choice(_FAULTS) for _ in range(random.randint(1, 4))}
    crash_at = None
    if how == "write":
        crash_at = CrashPoint(random.randint(0, random.choice([4, 12, 30, 80])), random.choice(["before", "after"]))
    dies_at: tuple[str, int, When] | None = None
    if how == "kind":
        dies_at = (random.choice(_KINDS), random.choice([0, 0, 1, 3, 8]), random.choice(["before", "after"]))
    return LifePlan(
        crash_at=crash_at,
        dies_at=dies_at,
        dies_after_s=random.choice([0.0, 0.3, 2.0, 30.0]) if how == "time" else None,
        faults=faults,
        write_s=random.choice([0.0, 0.0, 0.003, 0.05]),
        clock_moves=tuple(
            (random.choice([0.1, 1.0, 20.0]), random.choice([-3600.0, -1.0, 0.5, 60.0, 90_000.0]))
            for _ in range(random.choice([0, 0, 1, 3]))
        ),
        leaves_after_s=random.choice([0.0, 0.7, 5.0]) if how == "leaves" else None,
        drains=random.randint(0, 1) == 1,
        errands=tuple(
            (random.choice([0.0, 0.3, 10.0]), random.choice(["list", "stats", "faulted", "reindex"]))
            for _ in range(random.choice([0, 0, 2, 5]))
        ),
        loses_catalog=random.randint(0, 3) == 0,
    )


def _workflow(random: Random, number: int) -> WorkflowPlan:
    ending = random.choice(["returns", "returns", "returns", "fails", "repaired"])
    acts = tuple(
        (random.choice([0.0, 0.2, 1.0, 15.0]), random.choice(["wake", "evict", "evict", "look", "backlog"]))
        for _ in range(random.randint(0, 4))
    )
    if random.randint(0, 9) == 0:
        acts += ((random.choice([0.0, 0.5, 3.0, 20.0]), "cancel"),)
    deadline_s = random.choice([0.5, 5.0, 100.0]) if random.randint(0, 9) == 0 else None
    return WorkflowPlan(
        workflow_id=f"w{number}",
        kind=random.choice(PLAY_KINDS),
        program=[_part(random, depth=2, where="main"), *_program(random, depth=2, length_max=5, where="main")],
        ending="returns" if deadline_s is not None else ending,
        start_s=random.choice([0.0, 0.0, 0.0, 1.0, 30.0]),
        deadline_s=deadline_s,
        acts=acts,
        pauses=tuple(random.choice([0.0, 0.0, 0.1, 4.0]) for _ in range(random.randint(1, 3))),
        patience_s=random.choice([0.02, 1.0, 1000.0, 1000.0]),
        remakes=random.choice([0, 0, 0, 1, 2]),
        letters=random.choice([0, 0, 1, 4]),
    )


_ALONE: Final = ("step", "step", "step", "sleep", "once", "value", "send", "attributes")
_IN_RACE: Final = (*_ALONE, "read", "batch", "timed")
_LEAVES: Final[Mapping[str, Sequence[str]]] = {
    "main": (*_IN_RACE, "stream", "answer", "shared"),
    "race": _IN_RACE,  # what a branch has read goes back once it has lost, and has no order any more
    "child": _ALONE,  # nobody sends to it
}
_COMPOSITES: Final = ("join", "race", "loop", "block", "call")

SHARED: Final[Sequence[Program]] = (
    [{"do": "sleep", "seconds": 2}],
    [{"do": "step", "seconds": 0.5, "ending": "fails once", "is_ephemeral": False, "is_plain": False}, {"do": "send"}],
)
"""What the children do that any number of workflows call under one id, by its number."""


def _program(random: Random, *, depth: int, length_max: int, where: str = "main") -> Program:
    return [_part(random, depth=depth, where=where) for _ in range(random.randint(0, length_max))]


def _part(random: Random, *, depth: int, where: str) -> Part:
    if depth and random.randint(0, 2) == 0:
        return _composite(random, random.choice(_COMPOSITES), depth=depth - 1, where=where)
    what = random.choice(_LEAVES[where])
    match what:
        case "step":
            return {
                "do": "step",
                "seconds": random.choice([0, 0, 0, 0.5, 3]),
                "ending": random.choice(["works", "works", "works", "fails once", "critical", "exhausted", "tried"]),
                "is_ephemeral": random.randint(0, 5) == 0,
                "is_plain": random.randint(0, 3) == 0,
            }
        case "sleep":
            return {"do": "sleep", "seconds": random.choice([0, 0.2, 5, 3600, 90_000])}
        case "read":
            return {"do": "read", "is_completable": random.randint(0, 1) == 1}
        case "batch":
            return {"do": "batch", "count": random.randint(1, 3)}
        case "timed":
            return {"do": "timed", "seconds": random.choice([0, 1, 40]), "is_sent": random.randint(0, 1) == 1}
        case "shared":
            return {"do": "shared", "number": random.randint(0, len(SHARED) - 1)}
        case "stream" | "answer":
            return {"do": what, "count": random.randint(1, 3), "nap": random.choice([0, 0, 0.3, 50])}
        case _:
            return {"do": what}


def _composite(random: Random, what: str, *, depth: int, where: str) -> Part:
    def inner(where: str = where) -> Program:
        return _program(random, depth=depth, length_max=2, where=where)

    match what:
        case "join":
            return {"do": "join", "branches": [inner() for _ in range(random.randint(1, 3))]}
        case "race":
            branches = [inner("child" if where == "child" else "race") for _ in range(random.randint(1, 3))]
            return {"do": "race", "branches": branches, "is_tied": random.randint(0, 2) == 0}
        case "loop":
            return {"do": "loop", "body": inner(), "count": random.randint(1, 4), "keeps": random.randint(0, 2)}
        case "block":
            return {"do": "block", "body": inner()}
        case _:
            return {
                "do": "call",
                "program": inner("child"),
                "fails": random.randint(0, 3) == 0,
                "on_parent_end": random.choice(["cancel", "leave"]),
            }


def _inside(part: Part, here: str) -> Iterator[tuple[Program, str]]:
    """The programs within a part that are run for certain, and their places."""
    match part["do"]:
        case "loop":
            for iteration in range(part["count"]):
                yield part["body"], f"{here}.{iteration}"
        case "block":
            yield part["body"], here
        case "join":
            for number, body in enumerate(part["branches"]):
                yield body, f"{here}.b{number}"
        case "race" if part["is_tied"]:
            for number in range(len(part["branches"])):
                yield part["branches"][0], f"{here}.b{number}"
        case "race":
            yield part["branches"][0], f"{here}.b0"
        case _:
            pass


def _parts(program: Program, place: str = "") -> Iterator[tuple[Part, str]]:
    for number, part in enumerate(program):
        here = f"{place}.{number}" if place else str(number)
        yield part, here
        for body, inner in _inside(part, here):
            yield from _parts(body, inner)


def mail_of(program: Program) -> list[tuple[str, int]]:
    """The name of every message that the program waits for by itself, and how many of it. Not what children wait for."""
    mail: list[tuple[str, int]] = []
    for part, place in _parts(program):
        match part["do"]:
            case "read":
                mail.append((f"mail {place}", 1))
            case "batch":
                mail.append((f"mail {place}", part["count"]))
            case "timed" if part["is_sent"]:
                mail.append((f"mail {place}", 1))
            case _:
                pass
    return mail


def streams_of(program: Program) -> list[tuple[str, int]]:
    """The name of every stream that it reads, and how many messages each sender sends to it."""
    return [(f"stream {place}", part["count"]) for part, place in _parts(program) if part["do"] == "stream"]


def asks_of(program: Program) -> list[tuple[str, int]]:
    """The name of every run of requests that it answers, and how many they are."""
    return [(f"ask {place}", part["count"]) for part, place in _parts(program) if part["do"] == "answer"]
