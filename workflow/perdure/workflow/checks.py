"""Checks of arguments: at once, typed, and saying what to write instead."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from types import FunctionType
from typing import Final, cast

from perdure.storage import Driver
from perdure.workflow.errors import InvalidArgumentError

__all__ = [
    "NAME_BYTES_MAX",
    "check_branch_name",
    "check_count",
    "check_driver",
    "check_duration",
    "check_flag",
    "check_function",
    "check_mailbox_limit",
    "check_message_id",
    "check_message_name",
    "check_message_names",
    "check_methods",
    "check_name",
    "check_schedule_name",
    "check_time_ms",
    "check_when_ms",
    "check_workflow_id",
    "check_workflow_name",
    "is_coroutine_function",
    "ms_ceil",
]

NAME_BYTES_MAX: Final = 512
"""Longest name of an entry or a message, in bytes of UTF-8."""

_LABEL_CHARACTERS_MAX: Final = 16 * 1024
_DRIVER_MEMBERS: Final = tuple(name for name in vars(Driver) if not name.startswith("_"))
_U64_MAX: Final = 2**64 - 1
_U32_MAX: Final = 2**32 - 1


def _check_text(text: object, what: str, example: str, bytes_max: int | None) -> str:
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{what} must be text, not {type(text).__name__}; write for example {example}")
    if not text:
        raise InvalidArgumentError(f"{what} must not be empty; write for example {example}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"{what} {text[:80]!a} holds a lone surrogate and cannot be stored; decode the bytes that it came from properly"
        ) from None
    if bytes_max is not None and size > bytes_max:
        raise InvalidArgumentError(
            f"{what} {text[:40]!r}... takes {size} bytes of UTF-8, more than the {bytes_max} allowed; shorten it"
        )
    return text


def check_name(name: object, operation: str) -> str:
    """An entry's name: non-empty text of at most 512 bytes."""
    if type(name) is str and name.isascii() and 0 < len(name) <= NAME_BYTES_MAX:
        return name  # the usual case
    return _check_text(name, f"the name given to {operation}", f'ctx.{operation}("charge-card", ...)', NAME_BYTES_MAX)


def check_branch_name(name: object, operation: str) -> str:
    """A branch's name: non-empty text of at most 512 bytes."""
    return _check_text(
        name,
        f"the name of a branch of {operation}",
        f'ctx.{operation}("fetch", {{"user": fetch_user}})',
        NAME_BYTES_MAX,
    )


def check_message_name(name: object) -> str:
    """A message's name: non-empty text of at most 512 bytes."""
    return _check_text(name, "a message's name", 'message("shipment-confirmed", body)', NAME_BYTES_MAX)


def check_message_id(message_id: object) -> str:
    """A sender's message id: non-empty text of at most 512 bytes."""
    return _check_text(message_id, "a message's id", 'id="evt-1" (or leave it out)', NAME_BYTES_MAX)


def check_workflow_id(workflow_id: object) -> str:
    """A workflow's id: any non-empty text."""
    return _check_text(workflow_id, "a workflow's id", '"order-123"', None)


def check_workflow_name(name: object) -> str:
    """What a workflow is found by after a restart: non-empty text of at most 512 bytes."""
    if name == "<lambda>":
        raise InvalidArgumentError(
            'a lambda has no name of its own to be found by after a restart; write for example @workflow(name="order")'
        )
    return _check_text(name, "a workflow's name", '@workflow(name="order")', NAME_BYTES_MAX)


def check_schedule_name(name: object) -> str:
    """A schedule's name: non-empty text of at most 512 bytes."""
    return _check_text(name, "a schedule's name", 'supervisor.schedule("nightly-report", ...)', NAME_BYTES_MAX)


def check_message_names(names: object) -> tuple[str, ...] | None:
    """The names a queue read waits for, without repetition, in order; `None` is any."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidArgumentError(f'names= takes a list of message names, not {names!r}; write names=["{names}"]')
    checked = tuple(dict.fromkeys(check_message_name(name) for name in cast("Iterable[object]", names)))
    if sum(len(name) for name in checked) > _LABEL_CHARACTERS_MAX:
        raise InvalidArgumentError(
            f"names= holds over {_LABEL_CHARACTERS_MAX} characters; leave it out to take any message"
        )
    if not checked:
        raise InvalidArgumentError("names= is empty; name at least one message, or leave it out to take any")
    return checked


def ms_ceil(seconds: float) -> int:
    """Whole milliseconds, rounded up, so that no wait is shorter than asked for."""
    # Rounding to a microsecond first keeps 0.1 s at 100 ms: 0.1 * 1000 is a little more than 100 for some floats.
    return math.ceil(round(seconds * 1000, 3))


def check_duration(seconds: object, what: str, example: str) -> float:
    """A finite duration of at least 0 seconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidArgumentError(f"{what} must be a number of seconds, not {type(seconds).__name__}; write {example}")
    # Compared before it becomes a float: integers may be larger than any; and nothing compares with NaN.
    if not 0 <= seconds <= _U64_MAX / 2000:
        raise InvalidArgumentError(
            f"{what} must be a finite number of seconds, 0 or more, not {_shown(seconds)}; write {example}"
        )
    return float(seconds)


def _shown(number: float) -> str:
    # Python refuses to print integers of some thousand digits.
    return repr(number) if isinstance(number, float) or abs(number) < 10**100 else "an integer of more than 100 digits"


def check_flag(flag: object, what: str) -> bool:
    """True or False, and no other value that happens to count as one."""
    if not isinstance(flag, bool):
        raise InvalidArgumentError(f"{what} must be True or False, not {flag!r}; write {what}=True")
    return flag


def check_count(count: object, what: str, *, least: int, example: str) -> int:
    """A whole number from `least` to 2**32 - 1."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise InvalidArgumentError(f"{what} must be a whole number, not {count!r}; write {example}")
    if not least <= count <= _U32_MAX:
        raise InvalidArgumentError(f"{what} must be from {least} to {_U32_MAX}, not {_shown(count)}; write {example}")
    return count


def check_mailbox_limit(limit: object) -> int:
    """How many messages a mailbox may hold: a whole number from 1 on."""
    return check_count(limit, "mailbox_limit", least=1, example="mailbox_limit=1000")


def check_when_ms(when: object, operation: str, example: str | None = None) -> int:
    """A time as milliseconds since the epoch, from seconds since the epoch or an aware `datetime`."""
    example = example or f'ctx.{operation}("deadline", datetime(2030, 1, 1, tzinfo=timezone.utc))'
    if isinstance(when, datetime):
        if when.utcoffset() is None:
            raise InvalidArgumentError(f"{when!r} has no timezone, so it names no moment; write {example}")
        seconds: object = when.timestamp()
    else:
        seconds = when
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidArgumentError(
            f"the time must be seconds since the epoch or an aware datetime, not {type(when).__name__}; write {example}"
        )
    if not 0 <= seconds <= _U64_MAX / 2000:
        shown = repr(when) if isinstance(when, datetime) else _shown(seconds)
        raise InvalidArgumentError(f"the time must be finite and not before 1970, not {shown}; write {example}")
    return ms_ceil(float(seconds)) if isinstance(seconds, float) else seconds * 1000


_SECONDS_MAX: Final = 10**9


def check_time_ms(when: object, what: str, now_ms: int) -> int:
    """A time as milliseconds since the epoch, from seconds from now or an aware `datetime`, which may be past."""
    if isinstance(when, datetime):
        return check_when_ms(when, what, f"{what}=datetime(2030, 1, 1, tzinfo=timezone.utc)")
    example = f"{what}=3600.0 (seconds from now) or {what}=datetime(2030, 1, 1, tzinfo=timezone.utc)"
    seconds = check_duration(when, what, example)
    if seconds >= _SECONDS_MAX:
        raise InvalidArgumentError(
            f"{what}={_shown(cast('float', when))} is more than 31 years from now; a number is seconds from now, not since the "
            f"epoch, so write {example}"
        )
    return now_ms + ms_ceil(seconds)


def check_driver(driver: object) -> None:
    """Refuse what is no driver. One that delegates with `__getattr__` is one."""
    # Not isinstance: from Python 3.12 on, a protocol's check does not see what __getattr__ gives.
    if isinstance(driver, type) or not all(hasattr(driver, member) for member in _DRIVER_MEMBERS):
        raise InvalidArgumentError(
            f"a driver is needed, not {type(driver).__name__}; write for example `await SqliteDriver.open(path, create=True)`"
        )


def check_methods(thing: object, methods: tuple[str, ...], what: str, example: str) -> None:
    """Refuse what lacks one of the methods."""
    if isinstance(thing, type) or not all(callable(getattr(thing, method, None)) for method in methods):
        raise InvalidArgumentError(
            f"{what} must be an object with {' and '.join(methods)}, not {thing!r}; write for example {example}"
        )


def check_function(fn: object, what: str, example: str) -> Callable[..., object]:
    """Something callable; a coroutine object gets its own explanation."""
    if type(fn) is FunctionType:
        return fn  # the usual case
    if hasattr(fn, "__await__"):
        close = getattr(fn, "close", None)
        if close is not None:
            close()  # so that Python does not also warn that it was never awaited
        raise InvalidArgumentError(
            f"{what} was called already: pass the function and its arguments, without the call; write {example}"
        )
    if not callable(fn):
        hint = " (was it called already?)" if fn is None else ""
        raise InvalidArgumentError(f"{what} must be a function, not {type(fn).__name__}{hint}; write {example}")
    return fn


def is_coroutine_function(fn: Callable[..., object]) -> bool:
    """Whether calling it gives a coroutine, also behind `functools.partial` or as an object with `__call__`."""
    if type(fn) is FunctionType and fn.__code__.co_flags & inspect.CO_COROUTINE:
        return True  # the usual case, which costs little here
    target = fn
    while isinstance(target, partial):
        target = cast("Callable[..., object]", target.func)
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004
