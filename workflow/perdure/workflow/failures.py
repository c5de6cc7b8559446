"""From exceptions to what is stored of them, and back.

1. What is stored is plain data with stated bounds: name, message and stack of at most `TEXT_BYTES_MAX` bytes each, cut
   between characters and marked, and the exception's own attributes of plain type.
2. The reference engine stores `Name: message`; its failures are read from that text, ours from the detail beside it.
3. An exception group out of a step is critical if any leaf is; a group of one counts as that one.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any, Final, cast

import trio

from perdure.storage import PerdureError
from perdure.workflow.errors import (
    CriticalError,
    ErrorInfo,
    FailureKind,
    JoinError,
    RaceError,
    RollbackError,
    StepCriticalError,
    StepError,
    StepExhaustedError,
    StepInterruptedError,
    StepTimeoutError,
    SuspendSignal,
)

__all__ = [
    "TEXT_BYTES_MAX",
    "causes_of",
    "cut_text",
    "describe",
    "ends_process",
    "failure_kind",
    "info_from_map",
    "info_from_text",
    "info_to_map",
    "kind_from_text",
    "sole_exception",
    "step_error",
]

TEXT_BYTES_MAX: Final = 64 * 1024
"""Most bytes (UTF-8) that are kept of one text of an error."""

_MARK: Final = "… [cut]"
_ATTRIBUTES_MAX: Final = 64
_FRAMES_MAX: Final = 50

_STEP_ERRORS: Final[dict[FailureKind, type[StepError]]] = {
    "exhausted": StepExhaustedError,
    "critical": StepCriticalError,
    "rollback": StepCriticalError,
    "timeout": StepTimeoutError,
    "interrupted": StepInterruptedError,
}


def cut_text(text: str, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """The text as it can be stored: without lone surrogates, at most `bytes_max` bytes of UTF-8, marked when cut."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - len(_MARK.encode())].decode(errors="ignore") + _MARK


def sole_exception(error: BaseException) -> BaseException:
    """The exception itself, or the only leaf of an exception group of one."""
    leaves = list(_leaves(error))
    return leaves[0] if len(leaves) == 1 else error


def ends_process(error: BaseException, *beside: type[BaseException]) -> bool:
    """Whether it, alone or among others, is meant for the program: a KeyboardInterrupt, a SystemExit or the like.

    Args:
        error: What came out of a workflow's code.
        beside: Kinds that do not count.
    """
    harmless = (SuspendSignal, Exception, trio.Cancelled, *beside)
    return any(not isinstance(leaf, harmless) for leaf in _leaves(error))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    stack = [error]
    while stack:
        current = stack.pop()
        if isinstance(current, BaseExceptionGroup):
            stack.extend(cast("BaseExceptionGroup[BaseException]", current).exceptions)
        else:
            yield current


def failure_kind(error: BaseException) -> FailureKind | None:
    """Why this error of a step is not retried, or `None` if it may be."""
    kind: FailureKind | None = None
    for leaf in _leaves(error):
        if isinstance(leaf, RollbackError):
            return "rollback"
        if isinstance(leaf, CriticalError):
            kind = "critical"
    return kind


def describe(error: BaseException) -> ErrorInfo:
    """What is kept of an exception. Never raises, whatever the exception's own methods do."""
    error = sole_exception(error)
    if isinstance(error, StepError) and error.kind in ("critical", "rollback"):
        return error.error  # left uncaught, a critical error ends the workflow under its own name
    return ErrorInfo(cut_text(type(error).__name__, 1024), cut_text(_message(error)), _stack(error), _attributes(error))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<str() of it raised {type(broken).__name__}>"


def _stack(error: BaseException) -> str:
    try:
        summary = traceback.TracebackException.from_exception(error, limit=-_FRAMES_MAX)
        return cut_text("".join(summary.format()))
    except Exception:
        return cut_text("".join(traceback.format_tb(error.__traceback__, limit=-_FRAMES_MAX)))


def _attributes(error: BaseException) -> dict[str, str | int | float | bool | None]:
    hidden = {"message", "_facts", "name", "stack"} if isinstance(error, PerdureError) else {"name", "message", "stack"}
    kept: dict[str, str | int | float | bool | None] = {}
    for key, value in list(vars(error).items()):
        if len(kept) == _ATTRIBUTES_MAX:
            break
        if type(key) is not str or key in hidden or key.startswith("__"):
            continue
        # Exact types only: a str subclass could encode as something else.
        if type(value) is str:
            kept[cut_text(key, 512)] = cut_text(value, 4096)
        elif value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 1 << 64):
            kept[cut_text(key, 512)] = value
    return kept


def info_to_map(info: ErrorInfo) -> dict[str, Any]:
    """The stored form of an error: `name, message, stack?, metadata?`."""
    stored: dict[str, Any] = {"name": info.name, "message": info.message}
    if info.stack is not None:
        stored["stack"] = info.stack
    if info.metadata:
        stored["metadata"] = dict(info.metadata)
    return stored


def info_from_map(stored: Any) -> ErrorInfo:
    """The error from its stored form; tolerates what other writers may have left out."""
    if not isinstance(stored, dict):
        return ErrorInfo("Error", str(stored))
    fields = cast("dict[str, Any]", stored)
    stack = fields.get("stack")
    metadata = fields.get("metadata")
    return ErrorInfo(
        str(fields.get("name", "Error")),
        str(fields.get("message", "")),
        None if stack is None else str(stack),
        cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {},
    )


def info_from_text(text: str) -> ErrorInfo:
    """The error from the reference engine's `Name: message`."""
    name, separator, message = text.partition(": ")
    if not separator or " " in name:
        return ErrorInfo("Error", text)
    return ErrorInfo(name, message)


def kind_from_text(text: str) -> FailureKind:
    """The kind of a failure of which only the reference engine's text is known."""
    name = text.partition(":")[0]
    if name == "CriticalError":
        return "critical"
    if name == "RollbackError":
        return "rollback"
    return "timeout" if name == "StepTimeoutError" else "exhausted"


def step_error(kind: FailureKind, step_name: str, attempts: int, info: ErrorInfo, entry_id: str) -> StepError:
    """The error that a failed step raises, built from stored facts alone: the same on every run."""
    match kind:
        case "exhausted":
            text = f"step {step_name!r} failed {attempts} time{'s' * (attempts != 1)}; the last error was {info}"
        case "critical" | "rollback":
            text = f"step {step_name!r} failed: {info}"
        case "timeout":
            text = f"step {step_name!r} did not finish in time: {info.message}"
        case "interrupted":
            text = f"step {step_name!r} may run at most once, was begun, and its outcome is unknown: {info.message}"
    return _STEP_ERRORS[kind](
        cut_text(text), step_name=step_name, attempts=attempts, error=info, kind=kind, entry_id=entry_id
    )


def causes_of(error: BaseException) -> list[str]:
    """The ids of the entries whose failure led to this error, through `__cause__`, `__context__` and groups."""
    causes: dict[str, None] = {}
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        current = stack.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, StepError):
            causes[current.entry_id] = None
            continue  # what is behind a step's failure is the user's own exception
        if isinstance(current, JoinError | RaceError):
            causes.update(dict.fromkeys(current.causes))
            continue  # it knows what is behind it, also when that was in another process
        stack.extend((current.__cause__, current.__context__))
        if isinstance(current, BaseExceptionGroup):
            stack.extend(cast("BaseExceptionGroup[BaseException]", current).exceptions)
    return list(causes)
