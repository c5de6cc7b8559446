"""A run as a story: what each process recorded and did outside, where it died, what the next one did.

1. Told is what a user knows of: entries by name, results, messages, effects. Bookkeeping is left out, but where the process died.
2. A long life is told from its last moments before the death, and from the first and last ones after it.
3. At the end: what it may come from, where that can be told, and the line that repeats this run alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from perdure.testing.faults import WritePoint
from perdure.testing.ledger import Effect, EffectLedger
from perdure.testing.outline import shown, shown_path
from perdure.testing.scenario import FinishedRun
from perdure.testing.wording import Wording

__all__ = ["hints_for", "story_of"]

_BEFORE_MAX: Final = 12
_AFTER_MAX: Final = 12
_INDENT: Final = "    "


def story_of(run: FinishedRun) -> str:
    """The whole story, in lines."""
    wording = Wording(tells_workflow=bool(run.others))
    lines: list[str] = []
    for process in range(len(run.deaths) + 1):
        lines.append(f"  process {process + 1}")
        told = list(_life(run, process, wording))
        lines += [f"{_INDENT}{line}" for line in _cut(told, dies=process < len(run.deaths))]
    return "\n".join(lines)


def _cut(told: Sequence[str], *, dies: bool) -> Sequence[str]:
    if dies and len(told) > _BEFORE_MAX + 1:
        return (f"... {len(told) - _BEFORE_MAX} more before that", *told[-_BEFORE_MAX:])
    if not dies and len(told) > _AFTER_MAX + 2:
        return (*told[:_AFTER_MAX], f"... {len(told) - _AFTER_MAX - 1} more after that", told[-1])
    return told


def _life(run: FinishedRun, process: int, wording: Wording) -> Iterator[str]:
    writes = run.writes_of(process)
    effects = sorted(_effects(run, process), key=lambda each: each[1].writes)
    crash = run.crashes[process] if process < len(run.deaths) else None
    for number in range(len(writes) + 1):
        while effects and effects[0][1].writes <= number:
            ledger, effect, is_again = effects.pop(0)
            yield _effect(ledger, effect, is_again=is_again)
        if number < len(writes):
            last = crash is not None and crash.when == "after" and number == len(writes) - 1
            yield from _recorded(writes[number], wording, is_last=last)
    if crash is not None:
        yield _death(run.deaths[process], crash.when, wording)
    else:
        yield f"end        {run.ending}"


def _recorded(point: WritePoint, wording: Wording, *, is_last: bool) -> Iterator[str]:
    phrases = wording.of(point)
    if not phrases and is_last:
        phrases = [wording.named(point)]
    for phrase in phrases:
        yield f"{f'write {point.number}':<10} {phrase}"


def _death(point: WritePoint, when: str, wording: Wording) -> str:
    if when == "after":
        return f"CRASH      right after write {point.number}"
    return f"CRASH      before write {point.number}: {wording.unmade(point)}"


def _effects(run: FinishedRun, process: int) -> Iterator[tuple[EffectLedger, Effect, bool]]:
    for ledger in run.ledgers:
        seen: set[tuple[str, str]] = set()
        for effect in run.effects[ledger.name]:
            what = (effect.name, repr(effect.content))
            if effect.process == process:
                yield ledger, effect, what in seen
            if effect.process < process or effect.process == process:
                seen.add(what)


def _effect(ledger: EffectLedger, effect: Effect, *, is_again: bool) -> str:
    what = effect.name if effect.content is None else f"{effect.name} {shown(effect.content)}"
    where = f"in step {shown_path(effect.path)!r}" if effect.is_in_step else "outside of any step's function"
    key = "no key" if effect.key is None else "with a key"
    return f"{'effect':<10} {ledger.name}: {what}{' AGAIN' if is_again else ''} ({where}, {key})"


def hints_for(run: FinishedRun, whole: FinishedRun) -> Sequence[str]:
    """What the differences may come from, where that can be told."""
    hints: list[str] = []
    if run.ending.fault is not None:
        hints.append(
            "The code did not do again what it had done before: outside of steps it has to be deterministic, and must not "
            "depend on what only the dead process knew."
        )
    for ledger in run.ledgers:
        before = [(effect.name, repr(effect.content)) for effect in whole.effects.get(ledger.name, ())]
        for effect in run.effects[ledger.name]:
            what = (effect.name, repr(effect.content))
            if what in before:
                before.remove(what)
            elif not ledger.may_repeat(effect.name):
                hint = _hint(ledger, effect)
                if hint is not None and hint not in hints:
                    hints.append(hint)
    return hints


def _hint(ledger: EffectLedger, effect: Effect) -> str | None:
    if effect.key is not None:
        return (
            f"{ledger.name}: {effect.name!r} came with another key than before. A key has to be the same on every attempt: "
            "current_step().idempotency_key is."
        )
    if not effect.is_in_step:
        return (
            f"{ledger.name}: {effect.name!r} happens outside of any step's function, and so again whenever the workflow is run "
            "again. Do it in a step (or, in a rollback handler, with ctx.idempotency_key)."
        )
    return (
        f"Step {shown_path(effect.path)!r} had its effect and the process died before that was recorded, so it ran again. Hand "
        "the service current_step().idempotency_key, or, if it may happen again, say so on the ledger: repeats="
        f"[{effect.name!r}]."
    )
