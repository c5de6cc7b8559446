"""Reading scalars, enums and literals: what is stored as one plain value.

Nothing is coerced. Two exceptions lose nothing: an `int` fits `float` where a float can hold it exactly, as type checkers
have it, and a float that only JavaScript writes for an integer fits `int`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from types import NoneType
from typing import Any, Final, ForwardRef, TypeAlias, TypeVar, get_args, get_origin
from uuid import UUID

from perdure.storage import encode_value
from perdure.storage.values import ErrorValue, TaggedValue
from perdure.workflow.misfit import Misfit, refuse, type_text
from perdure.workflow.plain import to_plain

__all__ = ["SCALARS", "SCALAR_HOOKS", "Hook", "enum_hook", "forget_enums", "instance_hook", "literal_hook"]

Hook: TypeAlias = Callable[[Any, Any], Any]
"""Gives the typed value for a plain one and its annotation."""

SCALARS: Final = (str, bytes, bool, Decimal, UUID, datetime, date, Fraction, NoneType)
"""Types that are stored as themselves; an exact match is required of them. `int` and `float` have rules of their own."""


def _exact(value: Any, kind: Any) -> Any:
    if type(value) is kind:
        return value
    return refuse(kind, value) if kind in SCALAR_HOOKS else _read_subclass(value, kind)


def _int(value: Any, kind: Any) -> Any:
    if kind is not int:
        return _read_subclass(value, kind)
    if type(value) is int:
        return value
    # JavaScript has one type of numbers, and the reference engine writes integers beyond 32 bits as floats.
    if type(value) is float and value.is_integer() and not -(2**31) <= value < 2**32:
        return int(value)
    return refuse(kind, value)


def _float(value: Any, kind: Any) -> Any:
    if kind is not float:
        return _read_subclass(value, kind)
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            converted = float(value)
        except OverflowError:
            converted = 0.0
        if converted == value:
            return converted
        raise Misfit("float", "int", "is an integer that no float can hold exactly")
    return refuse(kind, value)


def _bytearray(value: Any, kind: Any) -> Any:
    return bytearray(_exact(value, bytes))


SCALAR_HOOKS: Final[dict[Any, Hook]] = {
    **dict.fromkeys((*SCALARS, ErrorValue, TaggedValue), _exact),
    int: _int,
    float: _float,
    bytearray: _bytearray,
}
"""What reads the types that are stored as one plain value. cattrs asks it for subclasses of these as well."""


_enums: Final[dict[Any, Hook]] = {}


def forget_enums() -> None:
    """Let go of the enums that were met."""
    _enums.clear()


def _read_subclass(value: Any, kind: Any) -> Any:
    """For a subclass of a scalar, an `IntEnum` say: cattrs asks the scalar's hook for it, which is stored in its place."""
    if issubclass(kind, Enum):
        if kind not in _enums:
            _enums[kind] = enum_hook(kind)
        return _enums[kind](value, kind)
    base = next(base for base in kind.__mro__ if base in SCALAR_HOOKS)
    return kind(SCALAR_HOOKS[base](value, base))


def instance_hook(kind: Any) -> Hook:
    """For what cattrs does not know: an instance of it. Anything will do for `Any` and for type variables.

    Raises:
        TypeError: Whether something is an instance of it cannot be told: a protocol, say.
    """

    def read(value: Any, _: Any) -> Any:
        if not isinstance(value, asked):
            refuse(kind, value)
        return value

    if isinstance(kind, str | ForwardRef):
        raise NameError(f"the name {kind!r} is not resolved")  # noqa: TRY004 - which is what Python says of it
    if kind is Any or isinstance(kind, TypeVar):
        return lambda value, _: value
    asked = get_origin(kind) or kind
    isinstance(None, asked)  # a TypeError: nothing can be told of it
    return read


def enum_hook(kind: type[Enum], _: object = None) -> Hook:
    """What reads an enum: a member's value."""
    if issubclass(kind, Flag):

        def read_flag(value: Any, _: Any) -> Any:
            if type(value) is not int:
                refuse(kind, value)
            return kind(value)

        return read_flag
    return _choice(kind, {encode_value(member, to_plain=to_plain): member for member in kind})


def literal_hook(annotation: Any, _: object) -> Hook:
    """What reads a `Literal`: one of its values, of exactly that type."""
    choices = {encode_value(choice, to_plain=to_plain): choice for choice in get_args(annotation)}
    return _choice(annotation, choices)


def _choice(annotation: Any, choices: Mapping[bytes, Any]) -> Hook:
    # By their encoding: that tells 1 from True, and finds a tuple by the list that it came back as.
    def read(value: Any, _: Any) -> Any:
        chosen = choices.get(encode_value(value), choices)
        if chosen is choices:
            shown = repr(value) if isinstance(value, str | int | float) else type(value).__name__
            raise Misfit(type_text(annotation), f"{shown:.60}")
        return chosen

    return read
