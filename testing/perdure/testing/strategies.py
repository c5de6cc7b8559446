"""What Hypothesis draws: inputs, orders of messages, schedules, and how processes die.

1. Everything shrinks towards what is least: no crash, then an early one, then one before its write; no fault; the first
   schedule; the order in which senders were given.
2. What is drawn prints as the code that makes it, so that a failing example can be typed in again.
3. Only what a workflow can be given is drawn: the input fits the annotation, and can be stored.

Rejected: to draw crash points out of the writes that a run is known to make. Each example would have to be run without a crash
first; a point behind the last write costs nothing, as nothing dies there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from inspect import Parameter, signature
from types import NoneType
from typing import Any, Final, TypeVar, get_args

from perdure.storage import VALUE_BYTES_MAX, EncodeError, OversizedValueError
from perdure.testing.extras import missing_extra
from perdure.testing.faults import CrashPoint, Fault, When, check_crash, check_effect_number, check_faults
from perdure.workflow import Context, InvalidArgumentError, Workflow, definition_of
from perdure.workflow.annotations import function_of, parameter_annotation, raw_annotations
from perdure.workflow.typed import encode_input

try:
    from hypothesis import strategies as st
except ImportError as _error:
    raise missing_extra("drawing examples", "hypothesis") from _error

__all__ = [
    "ProcessPlan",
    "crash_plans",
    "fault_plans",
    "message_orders",
    "process_plans",
    "schedule_seeds",
    "workflow_inputs",
]

T = TypeVar("T")

WRITES_MAX: Final = 30
"""At which write a drawn crash comes, at most, unless it is said: that of a supervisor with a few small workflows."""

_FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
_WHEN: Final[tuple[When, ...]] = ("before", "before", "after")
_STAYS_S: Final = (0, 1, 2, 5, 10, 60, 3600, 86_400)
_CLOCK_MOVES_S: Final = (*[0] * 8, 1, -1, 60, -60, 3600, -3600, 86_400, -86_400)


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """How one simulated process lives and dies. It prints only what is not as usual.

    Attributes:
        crash_at: At which of its writes it dies; `None`: at none.
        seed: In which order its tasks run.
        clock_moves_s: By how many seconds the wall clock was set before it began; back, if negative.
        stays_s: How many seconds it lives on once what it was to do is done.
        faults: What goes wrong with its writes of these numbers.
        crash_after_effect: After which of its effects in an `EffectLedger`, from 0, it dies, before that is recorded; `None`:
            after none.

    Raises:
        InvalidArgumentError: `crash_at`, `faults` or `crash_after_effect` is something else.
    """

    crash_at: CrashPoint | None = None
    seed: int = 0
    clock_moves_s: float = 0.0
    stays_s: float = 0.0
    faults: Mapping[int, Fault] = field(default_factory=dict[int, Fault])
    crash_after_effect: int | None = None

    def __post_init__(self) -> None:
        check_crash(self.crash_at)
        check_faults(self.faults)
        check_effect_number(self.crash_after_effect)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # as Hypothesis prints it

    def __repr__(self) -> str:
        unusual = (
            f"{each.name}={value!r}"
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default and value != {}
        )
        return f"ProcessPlan({', '.join(unusual)})"


def schedule_seeds() -> st.SearchStrategy[int]:
    """Seeds for `run_virtual`, `Simulation.run` and `seeded_scheduling`: each another order of Trio's tasks.

    Without one Hypothesis explores the same order in every example.
    """
    return st.integers(0, 2**32 - 1)


def crash_plans(*, processes_max: int = 3, writes_max: int = WRITES_MAX) -> st.SearchStrategy[tuple[CrashPoint, ...]]:
    """Where each of several processes in a row dies; for `Simulation.run_to_end(process, crashes=...)`.

    Args:
        processes_max: How many die, at most, at least 1.
        writes_max: The crash is at one of the process's first so many writes, at least 1.
    """
    _check_count(processes_max, "processes_max")
    _check_count(writes_max, "writes_max")
    return st.lists(_crash_points(writes_max), max_size=processes_max).map(tuple)


def fault_plans(*, faults_max: int = 2, writes_max: int = WRITES_MAX) -> st.SearchStrategy[dict[int, Fault]]:
    """What goes wrong with which writes of a process, by number; for `faults=`.

    Args:
        faults_max: How many writes, at most, at least 1.
        writes_max: Out of the first so many, at least 1.
    """
    _check_count(faults_max, "faults_max")
    _check_count(writes_max, "writes_max")
    return st.dictionaries(st.integers(0, writes_max - 1), st.sampled_from(_FAULTS), max_size=faults_max)


def process_plans(
    *, crashes: bool = True, clock_moves: bool = True, faults: bool = False, writes_max: int = WRITES_MAX
) -> st.SearchStrategy[ProcessPlan]:
    """How a process lives and dies.

    Args:
        crashes: Whether it may die: at a write, or after an effect in an `EffectLedger` and before that is recorded.
        clock_moves: Whether the wall clock may have been set before it began, by up to a day in either direction.
        faults: Whether writes may fail. What it does then sees `StorageError`s, as it would of a real disk.
        writes_max: A crash or a fault comes at one of its first so many writes, at least 1.
    """
    _check_count(writes_max, "writes_max")
    no_faults: st.SearchStrategy[dict[int, Fault]] = st.builds(dict[int, Fault])
    no_crash: st.SearchStrategy[tuple[CrashPoint | None, int | None]] = st.just((None, None))
    at_writes = _crash_points(writes_max).map(lambda point: (point, None))
    after_effects = st.sampled_from((0, 0, 0, 0, 1, 2)).map(lambda number: (None, number))
    parts = st.tuples(  # not `builds`, which prints every part of it
        no_crash | after_effects | at_writes if crashes else no_crash,
        schedule_seeds(),
        st.sampled_from(_CLOCK_MOVES_S) if clock_moves else st.just(0),
        st.sampled_from(_STAYS_S),
        fault_plans(writes_max=writes_max) if faults else no_faults,
    )

    def plan(
        death: tuple[CrashPoint | None, int | None], seed: int, moves_s: float, stays_s: float, faults: dict[int, Fault]
    ) -> ProcessPlan:
        return ProcessPlan(death[0], seed, moves_s, stays_s, faults, death[1])

    return parts.map(lambda drawn: plan(*drawn))


def _crash_points(writes_max: int) -> st.SearchStrategy[CrashPoint]:
    """More often where it matters more: of what a process with one workflow writes the first two make its namespace and
    the next seven are what it does, few processes write much, and only before a write can something outside have happened
    that is not recorded.
    """
    writes = [
        write
        for write in range(writes_max)
        for _ in range(2 if write < 2 else 8 if write < 9 else 3 if write < 16 else 1)
    ]
    when = st.sampled_from(_WHEN)
    return st.tuples(st.sampled_from(writes), when).map(lambda drawn: CrashPoint(*drawn))


def message_orders(
    messages: Mapping[str, Sequence[T]], *, repeated: bool = False
) -> st.SearchStrategy[list[tuple[str, T]]]:
    """Orders in which messages of several senders may arrive: each sender's in its own order, as Perdure keeps it.

    Args:
        messages: What each sender sends, in order.
        repeated: Whether a sender may send its last message again, as one does that was told nothing of it. Send with `id=`.

    Returns:
        Lists of sender and message. The least is all of the first sender's, then all of the second's.

    Raises:
        InvalidArgumentError: It is no mapping of senders to lists.
    """
    if not isinstance(messages, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError(
            f"messages are by sender, not {messages!r:.80}; write {{'alice': ['a', 'b'], 'bob': ['c']}}"
        )
    for sender, sent in messages.items():
        if not isinstance(sent, Sequence) or isinstance(sent, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"what {sender!r} sends is a list, not {sent!r:.80}; write {{{sender!r}: [{sent!r:.80}]}}"
            )
    turns = [sender for sender, sent in messages.items() for _ in sent]

    def deliver(turns: Sequence[str], again: Sequence[bool]) -> list[tuple[str, T]]:
        left = {sender: iter(sent) for sender, sent in messages.items()}
        order: list[tuple[str, T]] = []
        for sender, is_repeated in zip(turns, again, strict=True):
            message = next(left[sender])
            order += [(sender, message)] * (1 + is_repeated)
        return order

    again = st.lists(st.booleans() if repeated else st.just(False), min_size=len(turns), max_size=len(turns))
    return st.tuples(st.permutations(turns), again).map(lambda drawn: deliver(*drawn))


def workflow_inputs(
    workflow: Workflow[Any, Any] | Callable[[Context, Any], Awaitable[Any]], **parts: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """Inputs for a workflow, by the annotation of its second parameter; plain data of any kind where it says nothing.

        @given(input=workflow_inputs(order, cents=st.integers(1, 10_000)))

    Args:
        workflow: The workflow.
        parts: How to make the parameters by these names of the annotated class, where their types say too little.

    Raises:
        InvalidArgumentError: Nothing can be made by the annotation.
    """
    definition = definition_of(workflow)
    annotation = parameter_annotation(definition.function, 1)
    if parts:
        if not isinstance(annotation, type):
            raise InvalidArgumentError(
                f"workflow {definition.name!r} does not say of which class its input is, so it has no part "
                f"{next(iter(parts))!r}; annotate it: async def {definition.name}(ctx: Context, input: Order)"
            )
        known = _parameters_of(annotation)
        if known is not None and (unknown := [name for name in parts if name not in known]):
            raise InvalidArgumentError(
                f"the input of workflow {definition.name!r}, {annotation.__name__}, has no part {unknown[0]!r}"
                + (f"; it has {', '.join(known)}" if known else "")
            )
        drawn: st.SearchStrategy[Any] = st.builds(annotation, **parts)
    elif annotation is None:
        drawn = st.none() if _is_none(definition.function) else _plain_data()
    elif annotation is datetime:
        drawn = st.datetimes(timezones=st.just(UTC))
    else:
        drawn = st.from_type(annotation)
    try:
        drawn.validate()
    except Exception as misfit:
        raise InvalidArgumentError(
            f"no inputs can be drawn for workflow {definition.name!r}: {misfit}. Say how its parts are made: "
            "workflow_inputs(order, items=st.lists(st.text()))"
        ) from misfit
    return drawn.filter(lambda value: _is_storable(definition, value))


def _parameters_of(annotation: type) -> Collection[str] | None:
    """What a class is made of, by name; `None` if it does not say, or takes any."""
    try:
        parameters = signature(annotation).parameters
    except (TypeError, ValueError):  # of C
        return () if annotation in (int, float, str, bytes, bool) else None
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return tuple(parameters)


def _is_none(function: Callable[..., Any]) -> bool:
    told = function_of(function)
    annotations = {} if told is None or isinstance(told, type) else raw_annotations(told)
    return any(annotation in (None, NoneType, "None") for name, annotation in annotations.items() if name != "return")


def _is_storable(definition: Workflow[Any, Any], value: object) -> bool:
    try:
        encode_input(definition.function, value, bytes_max=VALUE_BYTES_MAX)
    except (InvalidArgumentError, OversizedValueError):
        return False
    except EncodeError as error:
        raise InvalidArgumentError(
            f"an input that was drawn for workflow {definition.name!r} cannot be stored: {error}. Say how its parts are made: "
            "workflow_inputs(order, at=st.datetimes(timezones=st.just(timezone.utc)))"
        ) from error
    return True


def _plain_data() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=8
    )


def _check_count(value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError(f"{name} must be an integer of at least 1, not {value!r}; write {name}=3")
