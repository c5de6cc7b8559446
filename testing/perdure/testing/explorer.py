"""Runs what `explore_crashes` was asked for, death by death, and says where a run ended otherwise.

1. First without a crash, twice: where these two differ, nothing can be said of crashes, and that is told.
2. Then once for every write and each side of it; only then with a second death during each recovery, so that what a single death
   brings out is told with one. Explored equals counted: each death comes at the write that it was planned for, and no write is
   left out.
3. A run that ends as another order of tasks does without a crash is as good as one that ends as its own (schedules.py).
4. A run that ends otherwise is repeated before it is told, and so is the one without a crash: code that throws dice is told
   that it cannot be repeated, and not that it does not survive a crash.
5. The first run that ends otherwise is told as a story, with the call that repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Final

from perdure.testing.amnesia import current_traces
from perdure.testing.asked import Asked
from perdure.testing.bridge import Link
from perdure.testing.differences import differences_of, was_interrupted
from perdure.testing.errors import EndlessRunError, NotRepeatableError, RecoveryDiffersError, UnexpectedEndingError
from perdure.testing.faults import CrashPoint
from perdure.testing.hints import hints_for
from perdure.testing.ledger import EffectLedger
from perdure.testing.outline import shown
from perdure.testing.repeating import how_to_repeat
from perdure.testing.scenario import FinishedRun, Scenario
from perdure.testing.schedules import Schedules
from perdure.testing.story import story_of
from perdure.testing.strays import watching
from perdure.workflow import InvalidArgumentError

__all__ = ["Exploration", "Explorer"]

_WIDTH: Final = 110
_REPEATS: Final = 3
"""How often each side of a difference is repeated before it is told; only once, as the first one told ends the exploration."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was explored, and found to end alike.

    Attributes:
        write_points: How many writes there were, over all seeds; the process died before and after each.
        runs: How often the workflow was run from its start to its end.
        crashes: How many processes died.
        interrupted: In how many runs an at-most-once step was interrupted.
        reordered: How many runs with a crash ended as another order of tasks does without one, and not as their own.
        seeds: The seeds of the scheduler.
        first: The run without a crash, of the first seed.
    """

    write_points: int
    runs: int
    crashes: int
    interrupted: int
    reordered: int
    seeds: tuple[int, ...]
    first: FinishedRun = field(repr=False)

    def __str__(self) -> str:
        seeds = "one schedule" if len(self.seeds) == 1 else f"{len(self.seeds)} schedules"
        alike = f", {self.reordered} of them as another schedule" if self.reordered else ""
        return f"{self.write_points} writes, {self.runs} runs, {self.crashes} crashes, {seeds}: all end alike{alike}"


class Explorer:
    """Explores what was asked for.

    Args:
        asked: That.
        link: Who waits for it.
    """

    def __init__(self, asked: Asked, link: Link) -> None:
        self.asked = asked
        self.scenario: Scenario = asked.scenario(link)
        self.runs: int = 0
        self.crashes: int = 0
        self.interrupted: int = 0
        self.reordered: int = 0
        self._asked_for: dict[EffectLedger, frozenset[str]] = {}
        self.schedules: Schedules = Schedules(self._run_well, self._is_alike, asked.seeds)

    def explore(self) -> Exploration:
        """All of it. Blocks. The globals of the workflows' modules are in the end what they were."""
        if self.asked.amnesia is None:
            with watching():
                return self._explore()
        traces = current_traces.set(None)  # all is put back here already
        try:
            with watching():
                return self._explore()
        finally:
            current_traces.reset(traces)
            self.asked.amnesia.forget()

    def _explore(self) -> Exploration:
        if self.asked.only is not None:
            crashes, seed = self.asked.only
            whole = self._whole(seed)
            if crashes:
                self._check_only(crashes[0], whole)
                self._explored(crashes, whole)
            self._check_ignored()
            return self._result((seed,), [whole])
        wholes: list[FinishedRun] = []
        for seed in self.asked.seeds:
            whole = self._whole(seed)
            wholes.append(whole)
            self._explore_seed(whole)
        self._check_ignored()
        self._check_effect_faults()
        return self._result(self.asked.seeds, wholes)

    def _result(self, seeds: tuple[int, ...], wholes: Sequence[FinishedRun]) -> Exploration:
        for ledger in wholes[0].ledgers:
            ledger.show(wholes[0].disk)
        points = sum(len(whole.writes) for whole in wholes) if self.asked.only is None else len(self.asked.only[0])
        return Exploration(points, self.runs, self.crashes, self.interrupted, self.reordered, tuple(seeds), wholes[0])

    def _explore_seed(self, whole: FinishedRun) -> None:
        recoveries: list[tuple[CrashPoint, int]] = []
        explored: set[tuple[int, str]] = set()
        for number in range(len(whole.writes)):
            for when in ("before", "after"):
                crash = CrashPoint(number, when)
                run = self._explored((crash,), whole)
                recoveries.append((crash, len(run.writes_of(1))))
                explored.add(_died(run))
        counted = {(point.number, when) for point in whole.writes for when in ("before", "after")}
        assert explored == counted, f"explored is not counted: {sorted(explored ^ counted)}"
        for crash, writes in recoveries:
            for again in self._again(crash, writes):
                self._explored((crash, again), whole)

    def _again(self, crash: CrashPoint, writes: int) -> Iterator[CrashPoint]:
        """Where the process after this crash dies, which makes that many writes if it does not.

        One death more for each write is after a crash before it, as what was done and not recorded is done again then.
        """
        number = crash.write
        match self.asked.recovery_crashes:
            case "all":
                yield from (CrashPoint(each, when) for each in range(writes) for when in ("before", "after"))
            case "one" if writes and crash.when == "before":
                yield CrashPoint(number % writes, "before" if (number // writes + number) % 2 == 0 else "after")
            case _:
                return

    # Runs.

    def _run(self, crashes: tuple[CrashPoint, ...], seed: int) -> FinishedRun:
        run = self.scenario.run(crashes, seed)
        self.runs += 1
        self.crashes += len(run.crashes)
        self.interrupted += was_interrupted(run)
        for ledger in run.ledgers:
            self._asked_for[ledger] = self._asked_for.get(ledger, frozenset()) | ledger.asked_on(run.disk)
        return run

    def _whole(self, seed: int) -> FinishedRun:
        """The run without a crash; that it can be repeated is seen."""
        whole = self._run((), seed)
        self._check_end(whole)
        self._check(whole)
        again = self._run((), seed)
        differences = [
            *differences_of(again, whole, compare=self.asked.compare, allows_interruptions=False),
            *_other_writes(again, whole, len(whole.writes)),
        ]
        if differences:
            raise self._not_repeatable(differences, again)
        return whole

    def _explored(self, crashes: tuple[CrashPoint, ...], whole: FinishedRun) -> FinishedRun:
        run = self._run(crashes, whole.seed)
        first = crashes[0]
        differences = list(_other_writes(run, whole, first.write))
        if len(run.crashes) < len(crashes):
            planned = crashes[len(run.crashes)]
            if self.asked.only is not None and not differences:
                raise self._stale(run, planned)
            differences.append(f"process {len(run.crashes) + 1} made no write {planned.write}, at which it was to die")
        if differences:
            raise self._not_repeatable(differences, run)
        found = self._ends_otherwise(run, whole)
        cause: AssertionError | None = None
        if not found:
            try:
                self._check(run)
            except AssertionError as error:
                for other in self.schedules.all(whole):
                    self._check(other)  # what fails without a crash, too, is told of that run
                found.append(f"check: {error or 'an assertion failed'}")
                cause = error
        if found:
            self._check_repeatable(run, crashes, whole)
            raise self._differs(found, run, whole) from cause
        return run

    def _check_repeatable(self, run: FinishedRun, crashes: tuple[CrashPoint, ...], whole: FinishedRun) -> None:
        """See that what differs does so each time.

        Raises:
            NotRepeatableError: A run with these crashes, or one without a crash, does not end as it did before.
        """
        for _ in range(_REPEATS):
            for before, deaths in ((run, crashes), (whole, ())):
                again = self._run(deaths, run.seed)
                found = differences_of(
                    again, before, compare=self.asked.compare, allows_interruptions=False, when="the first time"
                )
                if found:
                    raise self._not_repeatable(found, again, at_its_end=True)

    def _check(self, run: FinishedRun) -> None:
        """Ask `check=`; what it raises says of which run, unless that becomes a story."""
        if self.asked.check is None:
            return
        try:
            self.asked.check(run)
        except Exception as error:
            if not run.crashes or not isinstance(error, AssertionError):
                error.add_note(f"check= raised this of one run.\n{how_to_repeat(self.asked, run.only)}")
            raise

    def _ends_otherwise(self, run: FinishedRun, whole: FinishedRun) -> list[str]:
        """How this run differs from the one without a crash; not at all if another order of tasks ends like it."""
        allows = self.asked.allows_interruptions
        found = list(differences_of(run, whole, compare=self.asked.compare, allows_interruptions=allows))
        if found and self.schedules.have(run, whole):
            self.reordered += 1
            return []
        return found

    def _is_alike(self, run: FinishedRun, other: FinishedRun) -> bool:
        allows = self.asked.allows_interruptions
        return not differences_of(run, other, compare=self.asked.compare, allows_interruptions=allows)

    def _run_well(self, seed: int) -> FinishedRun | None:
        """Without a crash, in another order of tasks; `None` if it does not end as it was to."""
        try:
            run = self._run((), seed)
            self._check_end(run)
        except (EndlessRunError, UnexpectedEndingError):
            return None  # no measure for others, and to be found with `seeds=`
        return run

    def _check_end(self, whole: FinishedRun) -> None:
        ending = whole.ending
        if ending.fault is not None or ending.state not in self.asked.ends_as:
            wanted = " or ".join(state.value for state in self.asked.ends_as)
            advice = "" if ending.fault else f" If that is how it ends, write ends_as={ending.state.value!r}"
            if "open_supervisor(..., workflows=" in (ending.fault or ""):
                advice = f" In an exploration it is named so: explore_crashes({self.asked.name}, ..., workflows=[...])."
            raise UnexpectedEndingError(
                f"{self.asked.name} ended as {ending}; already without a crash, and it was to be {wanted}.{advice}"
                + (f"\n\n{ending.stack}" if ending.stack else ""),
                only=whole.only,
                state=ending.state,
            )

    def _check_only(self, crash: CrashPoint, whole: FinishedRun) -> None:
        if crash.write >= len(whole.writes):
            raise InvalidArgumentError(
                f"there is no write {crash.write} to die at: without a crash, the process makes writes 0 to "
                f"{len(whole.writes) - 1}; write only='{len(whole.writes) - 1}/after@seed{whole.seed}'"
            )

    def _stale(self, run: FinishedRun, planned: CrashPoint) -> InvalidArgumentError:
        """Of a run that was named when the code was another one."""
        number = len(run.crashes)
        return InvalidArgumentError(
            f"process {number + 1} makes {len(run.writes_of(number))} writes now, and only= lets it die at its write "
            f"{planned.write}, from 0; leave only= out, which explores all of them"
        )

    def _check_ignored(self) -> None:
        unmet = [name for name in self.asked.ignore if name not in self.scenario.ignored]
        if unmet:
            histories = "any history that there was" if self.asked.only is None else "the histories of this run"
            raise InvalidArgumentError(
                f"ignore={unmet!r} names no entry of {histories}; write the name of a step, such as "
                "ignore=['measure'], or leave it out"
            )

    def _check_effect_faults(self) -> None:
        for ledger, names in self._asked_for.items():
            keys = [key for key in ledger.faults if not isinstance(key, int)]
            unmet = [key for key in keys if (key if isinstance(key, str) else key[0]) not in names]
            if unmet:
                raise InvalidArgumentError(
                    f"faults of the ledger {ledger.name!r} name {', '.join(map(repr, unmet))}, which was never asked for in any "
                    f"run: {', '.join(sorted(map(repr, names)))} was. Write one of these, or say what is to fail in the test "
                    "that it is for: ledger.faults['charge'] = 'applied'"
                )

    # Errors.

    def _not_repeatable(
        self, differences: Sequence[str], run: FinishedRun, *, at_its_end: bool = False
    ) -> NotRepeatableError:
        what = "a run up to its crash" if run.deaths else "a second one"
        where = f"{what} differs before any crash has mattered"
        if at_its_end:
            where = f"the second ends otherwise{' after the same crash' if run.deaths else ''}"
        listed = "\n".join(f"  {difference}" for difference in differences)
        return NotRepeatableError(
            f"{self.asked.name} does not do the same twice: of two runs with the same seed, {where}:\n\n{listed}\n\n"
            "Take the time from ctx.now(), ids from ctx.uuid() and chance from ctx.random(); keep nothing in globals of other "
            "modules (modules=[...] names those to reset), and wait for nothing real. What may differ is left out by "
            "ignore=[names of entries] or compare=[...].\n\n"
            f"{how_to_repeat(self.asked, run.only)}\n",
            only=run.only,
            differences=tuple(differences),
        )

    def _differs(self, found: Sequence[str], run: FinishedRun, whole: FinishedRun) -> RecoveryDiffersError:
        story = story_of(run, whole)
        hints = hints_for(run, whole, allows_interruptions=self.asked.allows_interruptions)
        parts = [
            f"{self.asked.name} does not survive {_deaths(run.crashes)}.",
            "\n".join(f"  {difference}" for difference in found),
            story,
            *(fill(hint, _WIDTH) for hint in hints),
            how_to_repeat(self.asked, run.only),
        ]
        return RecoveryDiffersError("\n\n".join(parts) + "\n", only=run.only, differences=tuple(found), story=story)


def _died(run: FinishedRun) -> tuple[int, str]:
    """Where the first process died: at which of its writes, and whether that is on the disk; as the disk has it, not the plan."""
    death = run.deaths[0]
    return death.number, "after" if death in run.writes else "before"


def _deaths(crashes: Sequence[CrashPoint]) -> str:
    if len(crashes) == 1:
        return f"a crash {crashes[0]}"
    died = [f"process {number} died {crash}" for number, crash in enumerate(crashes, 1)]
    return f"{len(crashes)} crashes: {', '.join(died)}"


def _other_writes(run: FinishedRun, whole: FinishedRun, count: int) -> Iterator[str]:
    """Where the first process wrote something else, in its first so many writes."""
    here = [(point.kind, point.workflow_id) for point in run.writes_of(0)[:count]]
    there = [(point.kind, point.workflow_id) for point in whole.writes[:count]]
    for number in range(count):
        one = here[number] if number < len(here) else None
        if one != there[number]:
            yield f"write {number} was {shown(one)}; in the first run, {shown(there[number])}"
            return
    if not run.deaths and len(run.writes) != len(whole.writes):
        yield f"it made {len(run.writes)} writes; in the first run, {len(whole.writes)}"
