"""A run as a story: what each process recorded and did outside, where it died, what the next one did.

1. Told is what a user knows of: entries by name, results, messages, effects. Bookkeeping is left out, but where the process died.
2. A long life is told from its last moments before the death, and from the first and last ones after it.
3. What it may come from is told by `hints.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from perdure.testing.differences import with_content
from perdure.testing.faults import WritePoint
from perdure.testing.ledger import Effect, EffectLedger
from perdure.testing.outline import Alike, shown, shown_path
from perdure.testing.scenario import FinishedRun
from perdure.testing.wording import Wording

__all__ = ["story_of"]

_BEFORE_MAX: Final = 12
_AFTER_MAX: Final = 12
_INDENT: Final = "    "


def story_of(run: FinishedRun, whole: FinishedRun | None = None) -> str:
    """The whole story, in lines.

    Args:
        run: What is told.
        whole: What it is compared with, if with anything: an effect with content there has its content told, even if that is
            `None`.
    """
    wording = Wording(tells_workflow=bool(run.others))
    contents = with_content(run, whole)
    lines: list[str] = []
    for process in range(len(run.deaths) + 1):
        lines.append(f"  process {process + 1}")
        told = list(_life(run, process, wording, contents))
        lines += [f"{_INDENT}{line}" for line in _cut(told, dies=process < len(run.deaths))]
    return "\n".join(lines)


def _cut(told: Sequence[str], *, dies: bool) -> Sequence[str]:
    if dies and len(told) > _BEFORE_MAX + 1:
        return (f"... {len(told) - _BEFORE_MAX} more before that", *told[-_BEFORE_MAX:])
    if not dies and len(told) > _AFTER_MAX + 2:
        return (*told[:_AFTER_MAX], f"... {len(told) - _AFTER_MAX - 1} more after that", told[-1])
    return told


def _life(run: FinishedRun, process: int, wording: Wording, contents: Collection[tuple[str, str]]) -> Iterator[str]:
    writes = run.writes_of(process)
    effects = sorted(_effects(run, process), key=lambda each: each[1].writes)
    crash = run.crashes[process] if process < len(run.deaths) else None
    for number in range(len(writes) + 1):
        while effects and effects[0][1].writes <= number:
            ledger, effect, is_again = effects.pop(0)
            tells = (ledger.name, effect.name) in contents
            yield _effect(ledger, effect, is_again=is_again, tells_content=tells)
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
        seen: set[tuple[str, Alike]] = set()
        for effect in run.effects[ledger.name]:
            what = (effect.name, Alike(effect.content))
            if effect.process == process:
                yield ledger, effect, what in seen
            if effect.process < process or effect.process == process:
                seen.add(what)


def _effect(ledger: EffectLedger, effect: Effect, *, is_again: bool, tells_content: bool) -> str:
    what = f"{effect.name} {shown(effect.content)}" if tells_content else effect.name
    key = "no key" if effect.key is None else "with a key"
    return f"{'effect':<10} {ledger.name}: {what}{' AGAIN' if is_again else ''} ({_place(effect)}, {key})"


def _place(effect: Effect) -> str:
    if effect.is_rollback:
        return f"in the rollback of step {shown_path(effect.path)!r}"
    return f"in step {shown_path(effect.path)!r}" if effect.is_in_step else "outside of any step's function"
