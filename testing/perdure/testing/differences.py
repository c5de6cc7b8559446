"""In what a run with crashes ended otherwise than the one without.

1. Each difference is one sentence, the crashed run first. Effects come first of all, as they say most; history last.
2. Effects are compared as what happened and how often, not by order: two branches may act in either. What a ledger lets repeat
   (`repeats`) has to have happened, and no more is asked of it.
3. A run in which an at-most-once step was interrupted may take another way, where that is allowed: then no effect of the run
   without a crash may have happened more often, and that is all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Literal, TypeAlias, get_args

from perdure.testing.ledger import Effect, EffectLedger
from perdure.testing.outline import Alike, Line, is_same, looks, unlike_any
from perdure.testing.scenario import FinishedRun
from perdure.workflow import InvalidArgumentError

__all__ = ["Aspect", "are_the_same", "check_aspects", "differences_of", "was_interrupted", "with_content"]

Aspect: TypeAlias = Literal["state", "output", "history", "effects"]
"""What is compared: how the workflows ended, what they returned or failed with, their histories, what happened outside."""

ASPECTS: Final[tuple[Aspect, ...]] = get_args(Aspect)

WITHOUT_A_CRASH: Final = "without a crash"

_INTERRUPTED: Final = "StepInterruptedError"
_LINES_MAX: Final = 3


def was_interrupted(run: FinishedRun) -> bool:
    """Whether an at-most-once step was begun and never heard of again."""
    return any(
        str(line.says.get("error") or "").startswith(_INTERRUPTED) for lines in run.outlines.values() for line in lines
    )


def differences_of(
    run: FinishedRun,
    whole: FinishedRun,
    *,
    compare: Collection[Aspect],
    allows_interruptions: bool,
    when: str = WITHOUT_A_CRASH,
) -> tuple[str, ...]:
    """What is not as in the run without a crash, in sentences; nothing if all is.

    Args:
        run: The run with crashes.
        whole: The one without.
        compare: What is compared.
        allows_interruptions: Whether it may take another way where an at-most-once step was interrupted.
        when: When the other run was, as the sentences say it.
    """
    if allows_interruptions and was_interrupted(run):
        return tuple(_more_effects(run, whole, when)) if "effects" in compare else ()
    found: list[str] = []
    if "effects" in compare:
        found += _effects(run, whole, when)
    found += _endings(run, whole, compare, when)
    if "history" in compare:
        found += _histories(run, whole, when)
    return tuple(found)


def with_content(*runs: FinishedRun | None) -> frozenset[tuple[str, str]]:
    """The ledger and the name of all effects that have content anywhere: of these it is told, even if it is `None`."""
    return frozenset(
        (ledger, effect.name)
        for run in runs
        if run is not None
        for ledger, effects in run.effects.items()
        for effect in effects
        if effect.content is not None
    )


def _counted(run: FinishedRun, name: str) -> Counter[tuple[str, Alike]]:
    return Counter((effect.name, Alike(effect.content)) for effect in run.effects.get(name, ()))


def _ledgers(
    run: FinishedRun, whole: FinishedRun
) -> Iterator[tuple[EffectLedger, Counter[tuple[str, Alike]], Counter[tuple[str, Alike]]]]:
    """The ledgers in which not the same happened as often, with what they hold."""
    by_name = {ledger.name: ledger for ledger in (*whole.ledgers, *run.ledgers)}
    for name, ledger in by_name.items():
        if not are_the_same(run.effects.get(name, ()), whole.effects.get(name, ())):
            yield ledger, _counted(run, name), _counted(whole, name)


def are_the_same(here: Sequence[Effect], there: Sequence[Effect]) -> bool:
    """Whether the same happened as often; `False` also where that would take to compare each content with each."""
    if len(here) != len(there):
        return False
    if all(
        one.name == other.name and is_same(one.content, other.content) for one, other in zip(here, there, strict=True)
    ):
        return True
    first: dict[tuple[str, str], Effect] = {}
    counts = [Counter[tuple[str, str]](), Counter[tuple[str, str]]()]
    for effects, count in zip((here, there), counts, strict=True):
        for effect in effects:
            looked = (effect.name, looks(effect.content))
            if not is_same(first.setdefault(looked, effect).content, effect.content):
                return False
            count[looked] += 1
    return counts[0] == counts[1]


def _effects(run: FinishedRun, whole: FinishedRun, when: str) -> Iterator[str]:
    contents = with_content(run, whole)
    for ledger, here, there in _ledgers(run, whole):
        for name, content in [*there, *(each for each in here if each not in there)]:
            now, before = here[name, content], there[name, content]
            is_fine = bool(now) == bool(before) if ledger.may_repeat(name) else now == before
            if not is_fine:
                yield _happened(ledger, name, content, now, before, contents, when, there if now else here)


def _more_effects(run: FinishedRun, whole: FinishedRun, when: str) -> Iterator[str]:
    contents = with_content(run, whole)
    for ledger, here, there in _ledgers(run, whole):
        for (name, content), before in there.items():
            if here[name, content] > before and not ledger.may_repeat(name):
                yield _happened(ledger, name, content, here[name, content], before, contents, when, there)


def _happened(
    ledger: EffectLedger,
    name: str,
    content: Alike,
    now: int,
    before: int,
    contents: Collection[tuple[str, str]],
    when: str,
    others: Iterable[tuple[str, Alike]],
) -> str:
    what = f"{name} {looks(content.value)}" if (ledger.name, name) in contents else name
    unlike = unlike_any(content.value, (each.value for other, each in others if other == name))
    return f"{ledger.name}: {what} happened {_times(now)}; {when}, {_times(before)}{f' ({unlike})' if unlike else ''}"


def _times(count: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _endings(run: FinishedRun, whole: FinishedRun, compare: Collection[Aspect], when: str) -> Iterator[str]:
    pairs = [("it", run.ending, whole.ending)]
    for key in dict.fromkeys((*whole.others, *run.others)):
        here, there = run.others.get(key), whole.others.get(key)
        if here is None or there is None:
            if "state" in compare:
                was, before = ("never made", "") if here is None else ("made", " not")
                yield f"workflow {key!r} was {was}; {when} it was{before}"
        else:
            pairs.append((f"workflow {key!r}", here, there))
    for name, here, there in pairs:
        is_other_state = (here.state, here.fault) != (there.state, there.fault)
        is_other_output = here.error != there.error or not is_same(here.output, there.output)
        if (is_other_state and "state" in compare) or (not is_other_state and is_other_output and "output" in compare):
            yield f"{name} ended as {here}; {when}, as {there}{_seem_alike(here.output, there.output)}"


def _histories(run: FinishedRun, whole: FinishedRun, when: str) -> Iterator[str]:
    for key in whole.outlines:
        lines = list(_lines(run.outlines.get(key, ()), whole.outlines[key], when))
        name = "" if len(whole.outlines) == 1 else f" of {key!r}"
        yield from (f"history{name} {line}" for line in lines[:_LINES_MAX])
        if len(lines) > _LINES_MAX:
            yield f"history{name} differs in {len(lines) - _LINES_MAX} more places"


def _lines(here: Sequence[Line], there: Sequence[Line], when: str) -> Iterator[str]:
    ours = {line.path: line for line in here}
    theirs = {line.path: line for line in there}
    for path in dict.fromkeys((*theirs, *ours)):
        one, other = ours.get(path), theirs.get(path)
        if one is None:
            yield f"lacks {other}"
        elif other is None:
            yield f"holds {one}, which is not there {when}"
        elif one.kind != other.kind or not is_same(one.says, other.says):
            yield f"holds {one}; {when}, {other}{_seem_alike(one.says, other.says)}"


def _seem_alike(one: object, other: object) -> str:
    """What to say besides of two values, where their texts do not show that they are not the same."""
    unlike = unlike_any(one, [other])
    return f" ({unlike})" if unlike else ""


def check_aspects(compare: Collection[str]) -> tuple[Aspect, ...]:
    """What is to be compared, in order.

    Raises:
        InvalidArgumentError: It names something else.
    """
    listed = list(compare) if isinstance(compare, Iterable) and not isinstance(compare, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if listed == []:
        raise InvalidArgumentError("with compare=[] every run is like every other; write compare=['effects', 'state']")
    if listed is None or any(each not in ASPECTS for each in listed):
        raise InvalidArgumentError(
            f"compare takes some of {', '.join(map(repr, ASPECTS))}, not {compare!r}; write compare=['effects', 'state']"
        )
    return tuple(each for each in ASPECTS if each in listed)
