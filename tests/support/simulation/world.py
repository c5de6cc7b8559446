"""What is outside of the simulated processes and outlives them: effects, what clients know, and who is to blame.

1. The code of workflows and the clients tell it what they do and see; it knows no store, no history
   and no supervisor.
2. What an operation returned to the code is durable, so it is the same on every later run (`observe`), and what was done for
   it is not done again (`begin`).
3. An oracle that fails is blamed by name, and the simulation ends there; it does not raise into a workflow, which might
   handle it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

__all__ = ["Key", "Violation", "World", "current_world", "determined"]

Key: TypeAlias = "tuple[str, int]"
"""A workflow: its id, and how often that was used before."""

LINES_MAX: Final = 4000
"""How many lines of what happened are kept; the last ones count."""


class Violation(AssertionError):
    """An oracle failed.

    Attributes:
        oracle: Which.
    """

    def __init__(self, oracle: str, what: str) -> None:
        super().__init__(f"{oracle}: {what}")
        self.oracle = oracle


@dataclass
class World:
    """The outside of one simulation.

    Attributes:
        is_offline: Whether what is run now is a replay aside, of which nothing is to be noted.
        effects: How often the function of a step was begun, by workflow and place.
        uncertain: Effects that may never happen, as a process died when they were about to.
        seen: What the operations returned, by workflow and place.
        done: Where nothing may be done any more.
        keys: The idempotency key of each step.
        undone: Places whose steps were compensated, in order, by workflow.
        arrived: The messages that the code was given, in order, by workflow and name; each once.
        acknowledged: The messages that clients were told are durable: their ids, by workflow.
        sent: What workflows have sent to the sink, in order, by sender.
        replies: What workflows have replied, by request.
        told: What clients were told of the end of a workflow.
        winners: Which branch has won each race.
        lost: Places of branches that have lost a race.
        evicted: Workflows that stay away until somebody asks for them.
        repaired: Workflows whose last step does not fail any more.
        recovering: Workflows that were asked to recover, of which history may be forgotten.
        log: What happened, for whoever has to find out why.
    """

    now: Callable[[], float] = lambda: 0.0
    is_offline: bool = False
    effects: Counter[tuple[Key, str]] = field(default_factory=Counter[tuple[Key, str]])
    uncertain: set[tuple[Key, str]] = field(default_factory=set[tuple[Key, str]])
    seen: dict[tuple[Key, str], str] = field(default_factory=dict[tuple[Key, str], str])
    done: set[tuple[Key, str]] = field(default_factory=set[tuple[Key, str]])
    keys: dict[str, tuple[Key, str]] = field(default_factory=dict[str, tuple[Key, str]])
    undone: dict[Key, list[str]] = field(default_factory=dict[Key, list[str]])
    arrived: dict[tuple[Key, str], list[str]] = field(default_factory=dict[tuple[Key, str], list[str]])
    acknowledged: dict[Key, set[str]] = field(default_factory=dict[Key, set[str]])
    sent: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    replies: dict[str, str] = field(default_factory=dict[str, str])
    told: dict[Key, tuple[str, str]] = field(default_factory=dict[Key, tuple[str, str]])
    winners: dict[tuple[Key, str], str] = field(default_factory=dict[tuple[Key, str], str])
    lost: set[tuple[Key, str]] = field(default_factory=set[tuple[Key, str]])
    evicted: set[str] = field(default_factory=set[str])
    repaired: set[str] = field(default_factory=set[str])
    recovering: set[str] = field(default_factory=set[str])
    log: deque[str] = field(default_factory=partial(deque[str], maxlen=LINES_MAX))
    running: Counter[str] = field(default_factory=Counter[str])
    violation: Violation | None = None
    on_blame: Callable[[], None] | None = None
    life: int = 0

    def note(self, what: str) -> None:
        """Remember what happened."""
        if not self.is_offline:
            self.log.append(f"life {self.life} {self.now():10.3f} s  {what}")

    def blame(self, oracle: str, what: str) -> None:
        """An oracle failed: the simulation ends."""
        self.note(f"!! {oracle}: {what}")
        if self.violation is None:
            self.violation = Violation(oracle, what)
        if self.on_blame is not None:
            self.on_blame()

    def check(self) -> None:
        """Raise what was blamed.

        Raises:
            Violation: An oracle failed.
        """
        if self.violation is not None:
            raise self.violation

    def boot(self) -> None:
        """The next process begins; those before are gone."""
        self.life += 1
        self.running.clear()
        self.evicted.clear()

    # Told by the code of workflows.

    def enter(self, workflow_id: str) -> None:
        """The function of a workflow is called."""
        if self.is_offline:
            return
        self.running[workflow_id] += 1
        if self.running[workflow_id] > 1:
            self.blame("one live activation", f"{workflow_id} runs {self.running[workflow_id]} times at once")

    def leave(self, workflow_id: str) -> None:
        """The function of a workflow was left."""
        if not self.is_offline:
            self.running[workflow_id] -= 1

    def begin(self, key: Key, place: str, idempotency_key: str, *, at_most_once: bool = False) -> None:
        """The function of a step is called: an effect."""
        if self.is_offline:
            return
        where = key, place
        self.effects[where] += 1
        self.note(f"{key[0]} does {place}" + (f" again ({self.effects[where]})" if self.effects[where] > 1 else ""))
        if where in self.done or self._is_below_done(key, place):
            self.blame("no effect twice", f"{key} did {place} again, though its outcome was recorded")
        if at_most_once:
            self.uncertain.add(where)
        if at_most_once and self.effects[where] > 1:
            self.blame("no effect twice", f"{key} did {place}, which is to be done at most once, again")
        if self.keys.setdefault(idempotency_key, where) != where:
            self.blame("no effect twice", f"{where} and {self.keys[idempotency_key]} have one idempotency key")

    def _is_below_done(self, key: Key, place: str) -> bool:
        parts = place.split(".")
        return any((key, ".".join(parts[:count])) in self.done for count in range(1, len(parts)))

    def undo(self, key: Key, place: str) -> None:
        """The rollback handler of a step is called."""
        if self.is_offline:
            return
        self.note(f"{key[0]} undoes {place}")
        undone = self.undone.setdefault(key, [])
        if place in undone[:-1]:
            self.blame("no effect twice", f"{key} undid {place} again, after the next handler had begun")
        elif place not in undone:
            undone.append(place)

    def observe(self, key: Key, place: str, value: object, *, is_done: bool = True) -> None:
        """An operation returned to the code, or raised; from here on it always does so."""
        text = repr(value)
        before = self.seen.get((key, place))
        if before is None:
            if self.is_offline:
                return  # it was durable, and nobody had been told
            self.seen[key, place] = text
            self.note(f"{key[0]} has {place} = {text:.100}")
        elif before != text:
            self.blame("replay identical", f"{key} had {before} at {place}, and then {text}")
        if is_done and not self.is_offline:
            self.done.add((key, place))

    def note_winner(self, key: Key, place: str, winner: str, branches: int) -> None:
        """A race returned."""
        before = self.winners.setdefault((key, place), winner)
        if before != winner:
            self.blame("winner stable", f"the race of {key} at {place} was won by {before}, and then by {winner}")
        if not self.is_offline:
            self.lost.update((key, f"{place}.b{n}") for n in range(branches) if f"b{n}" != winner)

    def arrive(self, key: Key, name: str, message_id: str) -> None:
        """A message was given to the code."""
        if not self.is_offline:
            arrived = self.arrived.setdefault((key, name), [])
            if message_id not in arrived:
                arrived.append(message_id)

    def forget_failures(self, key: Key) -> None:
        """The workflow recovers: what failed, and what was undone, is done again."""
        undone = set(self.undone.pop(key, ()))
        for where, text in list(self.seen.items()):
            if where[0] == key and (text[1:8] == "raised " or where[1] in undone):
                del self.seen[where]
                self.done.discard(where)
        self.recovering.add(key[0])


current_world: ContextVar[World] = ContextVar("simulated_world")


def determined(value: Any) -> Any:
    """A value without what may come out in more than one way: `["~", whatever]`."""
    if isinstance(value, list):
        if value and value[0] == "~":
            return "~"
        return [determined(item) for item in value]
    if isinstance(value, dict):
        return {name: determined(item) for name, item in value.items()}
    return value
