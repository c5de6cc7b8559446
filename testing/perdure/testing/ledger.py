"""A stand-in for the outside world: it counts effects, knows idempotency keys, and fails as real services do.

1. An effect with a key that was seen happens no more: the first result is returned. So do payment services and many others.
2. State is kept by disk: what happens in a simulated process, or in those that follow it on its disk, happens in a world of
   its own, which outlives processes. Each run of an exploration has a fresh one. Outside of a simulation there is one world.
   (`strays.py` says what becomes of threads that know of no simulation.)
3. A dead process has no effects: `finally` blocks that still unwind in it get `SimulatedCrash`.
4. What is to fail is said for all worlds, by number or by name, and each world counts for itself.

Rejected: effects that are ordinary lists of the test. A run would find those of the run before it, and a process that is dead
would go on adding to them.
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast, get_args
from weakref import WeakKeyDictionary, WeakSet

import trio

from perdure.testing.disk import SimulatedDisk, current_disk
from perdure.testing.errors import EffectKeyError, EffectRefusedError, EffectTimeoutError
from perdure.testing.faults import WriteGate, current_gate
from perdure.testing.outline import Alike, is_same, shown, unlike_any
from perdure.testing.strays import check_thread
from perdure.workflow import InvalidArgumentError, MisuseError, current_step
from perdure.workflow.checks import check_duration
from perdure.workflow.rollback import handler_in_progress

__all__ = [
    "Effect",
    "EffectFault",
    "EffectLedger",
    "forget_effects",
    "ledgers_of",
]

EffectFault: TypeAlias = Literal["refused", "lost", "applied"]
"""`refused`: nothing happens, and the caller is told so. `lost`, `applied`: no answer comes in time, and it did not happen, or
did."""

FaultKey: TypeAlias = int | str | tuple[str, int]
"""By which a fault is said: the number of the attempt on the ledger; the name, of which it is the first; the name and number."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that happened outside.

    Attributes:
        name: What happened.
        content: To what, or how much; whatever was given.
        key: Its idempotency key, or `None`.
        workflow_id: The workflow in whose step, or in the rollback of whose step, it happened; `None` outside of both.
        path: The step's path; empty outside of a step's function and its rollback handler.
        process: In which process of its disk it happened, from 0; 0 outside of a simulation.
        writes: How many writes that process had made by then.
        attempt: Which attempt of its step, or of the handler, this was, from 1; 0 outside of both.
        is_rollback: Whether it happened in the step's rollback handler.
    """

    name: str
    content: Any
    key: str | None
    workflow_id: str | None
    path: tuple[str | int, ...]
    process: int
    writes: int
    attempt: int
    is_rollback: bool = False

    @property
    def is_in_step(self) -> bool:
        """Whether it happened in a step's function."""
        return self.workflow_id is not None and not self.is_rollback


@dataclass
class _World:
    """What happened on one disk."""

    effects: list[Effect] = field(default_factory=list[Effect])
    results: list[Any] = field(default_factory=list[Any])
    by_key: dict[str, int] = field(default_factory=dict[str, int])
    attempts: int = 0
    attempts_of: dict[str, int] = field(default_factory=dict[str, int])


_ledgers: Final[WeakSet[EffectLedger]] = WeakSet()
_touched: Final[WeakKeyDictionary[SimulatedDisk, list[EffectLedger]]] = WeakKeyDictionary()


def ledgers_of(disk: SimulatedDisk) -> Sequence[EffectLedger]:
    """The ledgers that the processes of a disk have used, in order."""
    return tuple(_touched.get(disk, ()))


def turn_ledgers_to(disk: SimulatedDisk) -> None:
    """Outside of a simulation, ledgers report of this disk, where nothing may have happened yet, and not of an earlier one."""
    for ledger in tuple(_ledgers):
        ledger.turn_to(disk)


def forget_effects() -> None:
    """All ledgers are as if nothing had happened. The pytest plugin does it before each test."""
    for ledger in tuple(_ledgers):
        ledger.clear()


class EffectLedger:
    """The outside world, as far as a workflow has effects on it.

        bank = EffectLedger("bank")

        def charge(cents: int) -> str:
            return bank.record("charge", cents, key=current_step().idempotency_key, returns="pay-1")

    It may be a global of the module: each simulated disk has a world of its own, see the module's text.

    Args:
        name: What reports call it.
        repeats: Which effects may happen again after a crash without harm: names, or `True` for all. `explore_crashes` asks of
            these only that they happened.
        faults: What is to fail: by the number of the attempt, from 0, among all attempts on this ledger; by name, its first
            attempt; or by name and number, that attempt of it: `{3: "refused", "charge": "applied", ("refund", 1): "lost"}`.

    Attributes:
        name: What reports call it.
        repeats: As given.
        faults: As given; may be changed between runs, and is checked then, too.
    """

    def __init__(
        self,
        name: str = "outside",
        *,
        repeats: bool | Collection[str] = False,
        faults: Mapping[FaultKey, EffectFault] | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(f"a ledger's name is a text, not {name!r}; write EffectLedger('bank')")
        if not isinstance(faults, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"faults are by name or number of the attempt, not {faults!r:.80}; write faults={{'charge': 'applied'}}"
            )
        self.name = name
        self.repeats: bool | Collection[str] = _check_repeats(repeats)
        self._faults = _Faults({} if faults is None else faults)
        self._lock = threading.Lock()
        self._own = _World()
        self._latest = self._own
        self._worlds: WeakKeyDictionary[SimulatedDisk, _World] = WeakKeyDictionary()
        _ledgers.add(self)

    @property
    def faults(self) -> MutableMapping[FaultKey, EffectFault]:
        """What is to fail."""
        return self._faults

    @faults.setter
    def faults(self, faults: Mapping[FaultKey, EffectFault]) -> None:
        self._faults = _Faults(faults)

    def __repr__(self) -> str:
        return f"<EffectLedger {self.name!r}, {len(self.effects)} effects>"

    def record(self, name: str, content: Any = None, *, key: object = None, returns: Any = None) -> Any:
        """An effect happens, at once, unless its key was seen. Not a checkpoint; call it in plain and in async functions.

        Args:
            name: What happens, such as `"charge"`.
            content: To what, or how much; compared with `==` (where that cannot tell, as of a NaN or an array, by how it looks
                and what it holds), and shown in reports.
            key: An idempotency key, such as `current_step().idempotency_key`; its text counts. `None`: every call is an effect.
            returns: What the service answers.

        Returns:
            `returns` of the first call with this key.

        Raises:
            EffectKeyError: The key was used for another effect.
            EffectRefusedError, EffectTimeoutError: As `faults` says.
            EffectThreadError: A simulation is open, and the caller's thread does not know of it; see `strays.py`.
            SimulatedCrash: The process is dead; nothing happened.
        """
        gate = current_gate.get()
        if gate is not None:
            gate.check()
        elif current_disk.get() is None:
            check_thread(self.name, name)
        with self._lock:
            return self._record(self._here(), gate, name, content, None if key is None else str(key), returns)

    async def perform(
        self, name: str, content: Any = None, *, key: object = None, returns: Any = None, seconds: float = 0.0
    ) -> Any:
        """The same by a service that takes a while: it acts after half of `seconds`, and answers after the rest.

        Cancelled before it acts, nothing happens; after that, it has.

        Args:
            name, content, key, returns: As for `record`.
            seconds: How long the answer takes, 0 or more.

        Raises:
            InvalidArgumentError: `seconds` is no such number.
        """
        seconds = check_duration(seconds, "seconds", "perform('charge', seconds=2.0)")
        await trio.sleep(seconds / 2)
        result = self.record(name, content, key=key, returns=returns)
        await trio.sleep(seconds / 2)
        return result

    @property
    def effects(self) -> tuple[Effect, ...]:
        """What happened, in order: on the disk of the caller; outside of a simulation, where it was last used."""
        return tuple(self._shown().effects)

    @property
    def attempts(self) -> int:
        """How often anything was asked for, repetitions of a key and faults included."""
        return self._shown().attempts

    def count(self, name: str | None = None) -> int:
        """How many effects there were; of this name, if one is given."""
        return sum(name is None or effect.name == name for effect in self.effects)

    def attempts_of(self, name: str) -> int:
        """How often this was asked for."""
        return self._shown().attempts_of.get(name, 0)

    @property
    def repeated(self) -> tuple[Effect, ...]:
        """Effects that had happened before, by an earlier attempt at the same place: what a crash has done twice."""
        seen: dict[tuple[object, ...], tuple[int, int]] = {}
        found: list[Effect] = []
        for effect in self.effects:
            place = (effect.workflow_id, effect.path, effect.is_rollback, effect.name, Alike(effect.content))
            when = (effect.process, effect.attempt)
            if seen.setdefault(place, when) != when:
                found.append(effect)
        return tuple(found)

    def may_repeat(self, name: str) -> bool:
        """Whether this effect may happen again after a crash."""
        return self.repeats if isinstance(self.repeats, bool) else name in self.repeats

    def asked_on(self, disk: SimulatedDisk) -> frozenset[str]:
        """The names that the processes of a disk asked for, faults included."""
        world = self._worlds.get(disk)
        return frozenset() if world is None else frozenset(world.attempts_of)

    def effects_on(self, disk: SimulatedDisk) -> tuple[Effect, ...]:
        """What the processes of a disk did."""
        world = self._worlds.get(disk)
        return () if world is None else tuple(world.effects)

    def show(self, disk: SimulatedDisk) -> None:
        """Outside of a simulation, the reports are those of this disk from here on, until it is used again."""
        with self._lock:
            self._latest = self._worlds.setdefault(disk, _World())

    def turn_to(self, disk: SimulatedDisk) -> None:
        """The same, if the reports are those of another disk."""
        if self._latest is not self._own:
            self.show(disk)

    def clear(self) -> None:
        """Nothing has happened; in a simulation, on its disk."""
        with self._lock:
            disk = current_disk.get()
            if disk is None:
                self._own = self._latest = _World()
            else:
                self._latest = self._worlds[disk] = _World()

    def _here(self) -> _World:
        """The world of the caller, to act in. The lock is held."""
        disk = current_disk.get()
        if disk is None:
            world = self._own
        else:
            world = self._worlds.setdefault(disk, _World())
            touched = _touched.setdefault(disk, [])
            if self not in touched:
                touched.append(self)
        self._latest = world
        return world

    def _shown(self) -> _World:
        disk = current_disk.get()
        return self._latest if disk is None else self._worlds.get(disk, _World())

    def _record(
        self, world: _World, gate: WriteGate | None, name: str, content: Any, key: str | None, returns: Any
    ) -> Any:
        of_name = world.attempts_of.get(name, 0)
        fault = self._fault(world.attempts, name, of_name)
        world.attempts += 1
        world.attempts_of[name] = of_name + 1
        if fault == "refused":
            raise EffectRefusedError(f"{self.name} refused {name}, as it was told to", ledger=self.name, effect=name)
        late = EffectTimeoutError(f"{self.name} did not answer {name} in time", ledger=self.name, effect=name)
        if fault == "lost":
            raise late
        if key is not None and (number := world.by_key.get(key)) is not None:
            effect = world.effects[number]
            if effect.name != name or not is_same(effect.content, content):
                advice = (
                    unlike_any(content, [effect.content]) or f"use one key for one effect, such as f'{{key}}-{name}'"
                )
                raise EffectKeyError(
                    f"{self.name} was asked for {name} {shown(content)} with the key of {effect.name} "
                    f"{shown(effect.content)}; {advice}",
                    ledger=self.name,
                    effect=name,
                    key=key,
                )
        else:
            number = len(world.effects)
            effect = _effect(gate, name, content, key)
            world.effects.append(effect)
            if gate is not None:
                gate.note_effect(effect.workflow_id)
            world.results.append(returns)
            if key is not None:
                world.by_key[key] = number
        if fault == "applied":
            raise late
        return world.results[number]

    def _fault(self, number: int, name: str, of_name: int) -> EffectFault | None:
        if not self._faults:
            return None
        of_this = self._faults.get((name, of_name)) or (self._faults.get(name) if of_name == 0 else None)
        return self._faults.get(number) or of_this


class _Faults(UserDict[FaultKey, EffectFault]):
    """Faults by number or name; what is none is refused as it is put there."""

    def __setitem__(self, key: FaultKey, fault: EffectFault) -> None:
        if not _is_fault_key(key):
            raise InvalidArgumentError(
                f"a fault is by the number of an attempt, from 0, by a name, or by both, not by {key!r:.80}; write "
                "faults={3: 'refused', 'charge': 'applied', ('refund', 1): 'lost'}"
            )
        if fault not in get_args(EffectFault):
            raise InvalidArgumentError(
                f"a fault of an effect is 'refused', 'lost' or 'applied', not {fault!r:.80}; write "
                "faults={'charge': 'applied'}"
            )
        super().__setitem__(key, fault)


def _is_fault_key(key: object) -> bool:
    match key:
        case bool():
            return False
        case int():
            return key >= 0
        case str(name) | (str(name), 0):
            return bool(name)
        case (str(name), int(number)) if not isinstance(number, bool):
            return bool(name) and number > 0
        case _:
            return False


def _check_repeats(repeats: object) -> bool | Collection[str]:
    if isinstance(repeats, bool):
        return repeats
    several = cast("Collection[object]", repeats) if isinstance(repeats, Collection) else ()
    names = [each for each in several if isinstance(each, str)]
    if isinstance(repeats, str) or not isinstance(repeats, Collection) or len(names) < len(several):
        example = repr(repeats) if isinstance(repeats, str) else "'progress'"
        raise InvalidArgumentError(f"repeats is True or several names, not {repeats!r:.80}; write repeats=[{example}]")
    return names


def _effect(gate: WriteGate | None, name: str, content: Any, key: str | None) -> Effect:
    process, writes = (0, 0) if gate is None else (gate.life, len(gate.writes))
    undoing = handler_in_progress.get()
    if undoing is not None:
        of_step = (undoing.workflow_id, undoing.path, process, writes, undoing.attempt)
        return Effect(name, content, key, *of_step, is_rollback=True)
    try:
        step = current_step()
    except MisuseError:
        return Effect(name, content, key, None, (), process, writes, 0)
    return Effect(name, content, key, step.workflow_id, step.path, process, writes, step.attempt)
