"""Where and why a plain value does not fit an annotation, found in what cattrs raises.

1. The path is in the caller's own terms, fields and keys as they are: `.items[2].price`.
2. One misfit is told, the first: the others often follow from it.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, cast, get_args, get_origin

from cattrs import BaseValidationError, ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

__all__ = ["Misfit", "lost_field", "misfit_of", "refuse", "type_text"]


class Misfit(Exception):
    """A plain value does not fit an annotation: where, what should be there, what is, and why that does not fit."""

    def __init__(self, expected: str, found: str, reason: str | None = None, path: str = "") -> None:
        self.expected = expected
        self.found = found
        self.reason: str = reason or f"should be {expected}, but is {found}"
        self.path = path
        super().__init__(self.reason)

    def below(self, path: str) -> Misfit:
        """The same misfit, of a value that is at a path in another."""
        moved = Misfit(self.expected, self.found, self.reason, path + self.path)
        moved.__cause__ = self.__cause__
        return moved


def type_text(annotation: Any) -> str:
    """An annotation as people write it, without modules."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "None"
    if annotation is Ellipsis:
        return "..."
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, args))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is not None and args:
        return f"{type_text(origin)}[{', '.join(map(type_text, args))}]"
    if isinstance(annotation, type):
        return annotation.__qualname__.rpartition("<locals>.")[2]
    return str(annotation).replace("typing.", "")


def refuse(annotation: Any, value: Any) -> NoReturn:
    """The value is not what the annotation says."""
    raise Misfit(type_text(annotation), type_text(type(value)))


def misfit_of(error: Exception, annotation: Any, value: Any) -> Misfit:
    """The first misfit in what a hook raised, with the path to it; chained from the exception of a class that refused it."""
    path = ""
    while isinstance(error, BaseValidationError):
        noted: list[tuple[Exception, Any]] = []
        rest: list[Exception] = list(error.exceptions)
        if isinstance(error, ClassValidationError | IterableValidationError):
            noted, rest = cast("tuple[list[tuple[Exception, Any]], list[Exception]]", error.group_exceptions())
        if not noted:
            annotation, error = error.cl, rest[0]
            continue
        is_field = isinstance(error, ClassValidationError)
        error, note = noted[0]
        annotation = note.type
        key = note.name if is_field else note.index
        path += f".{key}" if is_field else f"[{key!r}]"
        if is_field and isinstance(error, KeyError) and error.args == (key,):
            return Misfit(type_text(annotation), "nothing", "is missing", path)
    if isinstance(error, Misfit):
        return error.below(path)
    if isinstance(error, ForbiddenExtraKeysError):
        field = str(min(error.extra_fields, key=str))
        return lost_field(type_text(error.cl), field).below(path)
    misfit = Misfit(
        type_text(annotation),
        type(value).__name__ if not path else type(error).__name__,
        f"was refused by {type_text(annotation)} ({type(error).__name__}: {error})",
        path,
    )
    misfit.__cause__ = error
    return misfit


def lost_field(owner: str, field: str) -> Misfit:
    """A class does not know a field of the value."""
    return Misfit(owner, field, f"is no field of {owner}, and would be lost", f".{field}")
