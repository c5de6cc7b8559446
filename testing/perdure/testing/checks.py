"""What arguments of the kit have to be; whatever is wrong is told with what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TypeVar, cast

import trio

from perdure.testing.errors import VirtualTimeError
from perdure.workflow import InvalidArgumentError

__all__ = ["check_modules", "check_outside_of_trio", "check_several"]

T = TypeVar("T")


def check_outside_of_trio(call: str, advice: str) -> None:
    """See that a call that starts Trio is not made within it.

    Args:
        call: What it is.
        advice: What to write instead.

    Raises:
        VirtualTimeError: It is.
    """
    if trio.lowlevel.in_trio_run():
        raise VirtualTimeError(f"{call} starts Trio, and this is within it already; {advice}")


def check_several(given: Iterable[T], what: str, example: str) -> tuple[T, ...]:
    """What takes several of something.

    Raises:
        InvalidArgumentError: It was given one, or a text.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError(f"{what} takes several, not {given!r:.80}; write {example}")
    return tuple(given)


def check_modules(given: object) -> tuple[ModuleType, ...]:
    """Modules that were imported.

    Raises:
        InvalidArgumentError: It is something else.
    """
    listed = tuple(cast("Iterable[object]", given)) if isinstance(given, Iterable) else (given,)
    modules = tuple(each for each in listed if isinstance(each, ModuleType))
    if not isinstance(given, Iterable) or len(modules) < len(listed):
        raise InvalidArgumentError(f"modules takes modules that were imported, not {given!r:.80}; write modules=[shop]")
    return modules
