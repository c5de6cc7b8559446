"""What `explore_crashes` was asked for, checked.

Whatever is wrong is told before anything is run, with what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from perdure.actors import WorkflowLike
from perdure.testing.amnesia import Amnesia
from perdure.testing.bridge import Link
from perdure.testing.checks import check_modules, check_several
from perdure.testing.differences import Aspect, check_aspects
from perdure.testing.faults import CrashPoint, When
from perdure.testing.scenario import FinishedRun, Mail, Scenario
from perdure.testing.virtual import OPTIONS, RESERVED, check_options
from perdure.workflow import InvalidArgumentError, WorkflowState, definition_of
from perdure.workflow.checks import (
    check_duration,
    check_function,
    check_workflow_id,
    is_coroutine_function,
)

__all__ = ["TIMEOUT_S", "WRITES_MAX", "Asked", "MailLike", "RecoveryCrashes"]

TIMEOUT_S: Final = 10 * 365 * 24 * 3600.0
"""Within how many seconds of virtual time a run has to end, unless said otherwise."""

WRITES_MAX: Final = 2_000
"""How many writes a process may make, unless said otherwise."""

RecoveryCrashes: TypeAlias = Literal["one", "all", "none"]
"""How often a process dies again during a recovery: once, at a write that moves on from run to run; at every write; never."""

MailLike: TypeAlias = "Mail | tuple[str, Any]"
"""What `messages=` takes."""

_OWN: Final = ("clock", "disk")
_ONLY: Final = re.compile(r"(?P<crashes>no crash|\d+/\w+(?:\+\d+/\w+)*)(?:@seed(?P<seed>\d+))?")


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of `explore_crashes`, which says what they mean; made by `of`. `call` is how it was called."""

    name: str
    workflow: WorkflowLike
    workflow_id: str
    input: Any
    mail: tuple[Mail, ...]
    seeds: tuple[int, ...]
    others: tuple[WorkflowLike, ...]
    ends_as: tuple[WorkflowState, ...]
    cancel_at: float | None
    timeout: float
    writes_max: int
    recovery_crashes: RecoveryCrashes
    compare: tuple[Aspect, ...]
    ignore: tuple[str, ...]
    allows_interruptions: bool
    check: Callable[[FinishedRun], object] | None
    amnesia: Amnesia | None
    modules: tuple[ModuleType, ...]
    only: tuple[tuple[CrashPoint, ...], int] | None
    options: Mapping[str, Any]
    call: str = "await explore_crashes"

    @classmethod
    def of(
        cls,
        workflow: WorkflowLike,
        input: Any,
        *,
        messages: Iterable[MailLike],
        seeds: int | Iterable[int],
        workflows: Iterable[WorkflowLike],
        ends_as: WorkflowState | str | None,
        cancel_at: float | None,
        timeout: float,
        writes_max: int,
        recovery_crashes: RecoveryCrashes,
        compare: Collection[Aspect],
        ignore: Collection[str],
        allow_interruptions: bool,
        check: Callable[[FinishedRun], object] | None,
        keep_globals: bool,
        modules: Iterable[ModuleType],
        workflow_id: str | None,
        only: str | None,
        options: Mapping[str, Any],
    ) -> Asked:
        """As given.

        Raises:
            InvalidArgumentError: Something is wrong with it.
        """
        definition = definition_of(workflow)
        others = check_several(workflows, "workflows", "workflows=[parcel]")
        modules = check_modules(modules)
        if recovery_crashes not in get_args(RecoveryCrashes):
            raise InvalidArgumentError(
                f"recovery_crashes is 'one', 'all' or 'none', not {recovery_crashes!r}; write recovery_crashes='all'"
            )
        if not isinstance(ignore, Collection) or isinstance(ignore, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(f"ignore takes several names, not a text; write ignore=[{ignore!r}]")
        check_options(options, *_OWN, unknown=_unknown_option)
        if workflow_id is not None:
            check_workflow_id(workflow_id)
        functions = [definition_of(each).function for each in (workflow, *others)]
        return cls(
            name=definition.name,
            workflow=workflow,
            workflow_id=f"{definition.name}-1" if workflow_id is None else workflow_id,
            input=input,
            mail=tuple(_mail(each) for each in check_several(messages, "messages", "messages=[('paid', 1999)]")),
            seeds=_seeds(seeds),
            others=others,
            ends_as=_ends_as(ends_as, cancel_at),
            cancel_at=None if cancel_at is None else check_duration(cancel_at, "cancel_at", "cancel_at=3600.0"),
            timeout=_timeout(timeout),
            writes_max=_writes_max(writes_max),
            recovery_crashes=recovery_crashes,
            compare=check_aspects(compare),
            ignore=tuple(ignore),
            allows_interruptions=allow_interruptions,
            check=None if check is None else _checking(check),
            amnesia=None if keep_globals else Amnesia(functions, modules),
            modules=modules,
            only=None if only is None else _parse_only(only),
            options=options,
        )

    def scenario(self, link: Link) -> Scenario:
        """What is run again and again."""
        return Scenario(
            self.workflow,
            self.workflow_id,
            self.input,
            mail=self.mail,
            others=self.others,
            cancel_at=self.cancel_at,
            timeout=self.timeout,
            writes_max=self.writes_max,
            ignore=self.ignore,
            amnesia=self.amnesia,
            options=self.options,
            link=link,
        )


def _timeout(given: float) -> float:
    timeout = check_duration(given, "timeout", "timeout=86400.0")
    if not timeout:
        raise InvalidArgumentError(
            "timeout=0 leaves no time to end in; write timeout=86400.0, in seconds of virtual time"
        )
    return timeout


def _checking(check: Callable[[FinishedRun], object]) -> Callable[[FinishedRun], object]:
    """The test's own condition, which cannot fail without being heard."""
    check_function(check, "check", "check=nobody_pays_twice")
    if is_coroutine_function(check):
        raise InvalidArgumentError(f"check is a plain function, not {check!r:.80}; write def check(run): assert ...")

    @wraps(check)
    def checking(run: FinishedRun) -> None:
        answer = check(run)
        if answer is not None:
            raise InvalidArgumentError(
                f"check returned {answer!r:.80}, which nobody looks at: it raises what is wrong, and returns nothing. Write "
                "def check(run): assert ..."
            )

    return checking


def _mail(given: Any) -> Mail:
    match given:
        case Mail():
            check_duration(given.at, "at", "Mail('go', at=3600.0)")
            return given
        case (str(name), body):
            return Mail(name, body)
        case _:
            raise InvalidArgumentError(
                f"a message is (name, body) or Mail(name, body, at=...), not {given!r:.100}; write messages=[('paid', 1999)]"
            )


def _unknown_option(name: str, value: object) -> str:
    """Of an argument that there is not, with the nearest that there is."""
    own = signature(Asked.of).parameters.keys() - {"options"}
    near = get_close_matches(name, sorted(own | (set(OPTIONS) - {*RESERVED, *_OWN})), 1)
    advice = f"write {near[0]}=" if near else f"leave {name}= out"
    return f"neither explore_crashes nor open_supervisor takes {name}={value!r:.100}; {advice}"


def _writes_max(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InvalidArgumentError(f"writes_max is how many, at least 1, not {given!r:.100}; write writes_max=2000")
    return given


def _seeds(given: object) -> tuple[int, ...]:
    numbers = range(given) if isinstance(given, int) and not isinstance(given, bool) else given
    listed = list(cast("Iterable[object]", numbers)) if isinstance(numbers, Iterable) else []
    seeds = tuple(seed for seed in listed if isinstance(seed, int))
    if not seeds or len(seeds) < len(listed) or min(seeds) < 0:
        raise InvalidArgumentError(
            f"seeds is how many, at least 1, or which, from 0; not {given!r:.100}. Write seeds=5"
        )
    return seeds


def _ends_as(given: Any, cancel_at: float | None) -> tuple[WorkflowState, ...]:
    if given is None:
        return (WorkflowState.COMPLETED,) if cancel_at is None else (WorkflowState.COMPLETED, WorkflowState.CANCELLED)
    try:
        state = WorkflowState(given)
    except ValueError:
        state = None
    if state is None or not state.is_terminal:
        raise InvalidArgumentError(
            f"ends_as is 'completed', 'failed' or 'cancelled', not {given!r:.100}; write ends_as='failed'"
        )
    return (state,)


def _parse_only(only: str) -> tuple[tuple[CrashPoint, ...], int]:
    match = _ONLY.fullmatch(only) if isinstance(only, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if match is None:
        raise InvalidArgumentError(
            f"only is a run as an error names it, not {only!r:.100}; write only='3/after+0/before@seed7'"
        )
    crashes: list[CrashPoint] = []
    if match["crashes"] != "no crash":
        for part in match["crashes"].split("+"):
            write, _, when = part.partition("/")
            crashes.append(CrashPoint(int(write), cast("When", when)))
    return tuple(crashes), int(match["seed"] or 0)
