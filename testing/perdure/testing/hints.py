"""What may have made a run with crashes end otherwise, in sentences.

1. Told only where the run shows it: what happened at which place, with which content and key, in this run and in the one without
   a crash. A guess that sends its reader the wrong way is worse than no word.
2. Each is told once, however many effects have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perdure.testing.differences import was_interrupted
from perdure.testing.ledger import Effect, EffectLedger
from perdure.testing.outline import Alike, shown, shown_path
from perdure.testing.scenario import FinishedRun

__all__ = ["hints_for"]


def hints_for(run: FinishedRun, whole: FinishedRun, *, allows_interruptions: bool) -> Sequence[str]:
    """What the differences may come from, where that can be told.

    Args:
        run: The run with crashes.
        whole: The one without.
        allows_interruptions: Whether `allow_interruptions=True` was given.
    """
    hints: list[str] = []
    if run.ending.fault is not None:
        hints.append(
            "The code did not do again what it had done before: outside of steps it has to be deterministic, and must not "
            "depend on what only the dead process knew."
        )
    hints += _of_effects(run, whole)
    hints += _of_races(run, whole)
    if was_interrupted(run):
        hints.append(
            "An at-most-once step was interrupted: the workflow may take another way then, but no effect may happen more often "
            "than without a crash, as nobody knows whether the interrupted step had its own."
            if allows_interruptions
            else "An at-most-once step was interrupted, which is what at_most_once=True means: it is not run again. If the "
            "workflow may end otherwise then, write allow_interruptions=True, and say in check= what holds all the same."
        )
    return tuple(dict.fromkeys(hints))


def _of_effects(run: FinishedRun, whole: FinishedRun) -> Iterator[str]:
    for ledger in run.ledgers:
        effects, usual = run.effects[ledger.name], whole.effects.get(ledger.name, ())
        places = [(_place(effect), _what(effect)) for effect in usual]
        others: list[int] = []
        for number, effect in enumerate(effects):  # where it was to be expected, first
            if (_place(effect), _what(effect)) in places:
                places.remove((_place(effect), _what(effect)))
            else:
                others.append(number)
        elsewhere = [what for _, what in places]
        for number in others:
            effect = effects[number]
            if _what(effect) in elsewhere:
                elsewhere.remove(_what(effect))
            elif not ledger.may_repeat(effect.name):
                hint = _of_effect(ledger, effect, effects[:number], usual)
                if hint is not None:
                    yield hint


def _of_effect(ledger: EffectLedger, effect: Effect, earlier: Sequence[Effect], usual: Sequence[Effect]) -> str | None:
    """Of an effect that was not to be expected.

    Args:
        ledger: Where it happened.
        effect: That.
        earlier: What had happened there in this run.
        usual: What happens there without a crash.
    """
    name, at_place = f"{ledger.name}: {effect.name!r}", shown_path(effect.path)
    if effect.workflow_id is None:
        return (
            f"{name} happens outside of any step's function, and so again whenever the workflow is run again. Do it in a step "
            "(or, in a rollback handler, with ctx.idempotency_key)."
        )
    where = f"{'in the rollback of step' if effect.is_rollback else 'in step'} {at_place!r}"
    usual_there = [each for each in usual if _place(each) == _place(effect)]
    if usual_there and all(_what(each) != _what(effect) for each in usual_there):
        return (
            f"{name} {where}: its content was {shown(usual_there[0].content)} without a crash, and is {shown(effect.content)} "
            "now. What it is made of has to come from the input, from steps, or from ctx.now(), ctx.uuid() and ctx.random(): a "
            "value that was in memory only died with the process."
        )
    same = [each for each in earlier if _what(each) == _what(effect)]
    same_there = [each for each in same if _place(each) == _place(effect)]
    own_key = "ctx.idempotency_key" if effect.is_rollback else "current_step().idempotency_key"
    if same_there and effect.key is not None:
        return f"{name} came with another key than before. A key has to be the same on every attempt: {own_key} is."
    if same_there:
        what = f"{'The rollback of step' if effect.is_rollback else 'Step'} {at_place!r}"
        return (
            f"{what} had its effect and the process died before that was recorded, so it ran again. Hand the service {own_key}, "
            f"or, if it may happen again, say so on the ledger: repeats=[{effect.name!r}]."
        )
    if same:
        return (
            f"{name} had happened in step {shown_path(same[-1].path)!r} already, and happened once more {where}. A step that was "
            "interrupted may have had its effect: ask the service whether it has, or hand it the same key in both."
        )
    return None


def _what(effect: Effect) -> tuple[str, Alike]:
    return effect.name, Alike(effect.content)


def _place(effect: Effect) -> tuple[object, ...]:
    return effect.workflow_id, effect.path, effect.is_rollback, effect.name


def _of_races(run: FinishedRun, whole: FinishedRun) -> Iterator[str]:
    for workflow_id, lines in run.outlines.items():
        usual = {line.path: line for line in whole.outlines.get(workflow_id, ()) if line.kind == "race"}
        for line in lines:
            before = usual.get(line.path) if line.kind == "race" else None
            if before is not None and line.says["winner"] != before.says["winner"]:
                yield (
                    f"Race {shown_path(line.path)!r} was won by {line.says['winner']!r}, without a crash by "
                    f"{before.says['winner']!r}. After a crash another branch may win: a step that was interrupted takes its "
                    "time again. If either is right, let the branches differ by more in the test (ledger.perform(..., "
                    "seconds=)), or compare less, such as compare=['state'], and say in check= what holds whoever wins."
                )
