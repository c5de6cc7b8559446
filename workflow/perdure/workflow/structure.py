"""From plain data to annotated types, with cattrs. Imported when the first annotation that needs it is met.

1. Nothing is coerced: text is no number, a list no set. Three exceptions lose nothing: an `int` fits `float` where a float
   can hold it, a float that only JavaScript writes for an integer fits `int`, and a tuple comes as the list it is stored as.
2. What does not fit is told by the path to it, in the caller's own terms: `result.items[2].price`.
3. A value is checked strictly before it is recorded: a field that the annotation does not know (of a subclass, say) would
   be lost. A recorded one is read leniently, so that a field can be removed from a class.
4. An annotation that cannot be used is refused when its reader is made, before a step's function runs.
5. In a union the kind of the plain value decides, then the first member that it fits in an order of our own (literals,
   enums, scalars, classes, containers): Python holds unions equal whatever their order, and so do caches. Classes are told
   apart by the fields that only one of them has, or by their `Literal` fields.
"""

from __future__ import annotations

import dataclasses
import threading
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from types import NoneType, UnionType
from typing import Any, Final, ForwardRef, Literal, NamedTuple, NoReturn, TypeAlias, Union, cast, get_args, get_origin
from uuid import UUID

from cattrs import (
    BaseValidationError,
    ClassValidationError,
    Converter,
    ForbiddenExtraKeysError,
    IterableValidationError,
)
from cattrs.disambiguators import create_default_dis_func
from cattrs.gen import make_dict_structure_fn, override, typeddicts

from perdure.storage import encode_value
from perdure.storage.values import ErrorValue, TaggedValue
from perdure.workflow.plain import is_pydantic_model, to_plain

__all__ = ["Misfit", "Reader", "make_reader", "type_text"]

Reader: TypeAlias = Callable[[Any], Any]
"""Gives the typed value for a plain one. Raises `Misfit`."""

_Hook: TypeAlias = Callable[[Any, Any], Any]

_SCALARS: Final = (str, bytes, bool, Decimal, UUID, datetime, date, Fraction, NoneType)
"""Types that are stored as themselves; an exact match is required of them. `int` and `float` have rules of their own."""

_SEQUENCES: Final = (abc.Iterable, abc.Collection, abc.Sequence, abc.MutableSequence)
_SETS: Final = (abc.Set, abc.MutableSet)


class Misfit(Exception):
    """A plain value does not fit an annotation: where, what should be there, what is, and why that does not fit."""

    def __init__(self, expected: str, found: str, reason: str | None = None, path: str = "") -> None:
        self.expected = expected
        self.found = found
        self.reason = reason or f"should be {expected}, but is {found}"
        self.path = path
        super().__init__(self.reason)


def type_text(annotation: Any) -> str:
    """An annotation as people write it."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__qualname__.replace("<locals>.", "")
    return str(annotation).replace("typing.", "")


def make_reader(annotation: Any, *, strict: bool) -> Reader:
    """What reads plain data as the annotation says.

    Args:
        annotation: Any type; what cattrs does not know must be an instance of it.
        strict: Whether fields that the annotation does not know are refused, instead of passed over.

    Raises:
        Exception: Whatever cattrs says of an annotation that it cannot use.
    """
    with _making:
        hook = _converter(strict=strict).get_structure_hook(annotation)

    def read(value: Any) -> Any:
        try:
            return hook(value, annotation)
        except Misfit:
            raise
        except Exception as error:
            raise _misfit(error, annotation, value) from error

    return read


def _misfit(error: Exception, annotation: Any, value: Any) -> Misfit:
    """The first misfit in what cattrs raised, with the path to it."""
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
        return Misfit(error.expected, error.found, error.reason, path + error.path)
    if isinstance(error, ForbiddenExtraKeysError):
        field = min(error.extra_fields, key=str)
        owner = type_text(error.cl)
        return Misfit(owner, str(field), f"is no field of {owner}, and would be lost", f"{path}.{field}")
    text = f"{type(error).__name__}: {error}"
    return Misfit(type_text(annotation), type(value).__name__, f"was refused by {type_text(annotation)} ({text})", path)


def _refuse(annotation: Any, value: Any) -> NoReturn:
    raise Misfit(type_text(annotation), type(value).__name__)


_converters: Final[dict[bool, Converter]] = {}
_making: Final = threading.RLock()
"""Held while a reader is made: what is passed on to cattrs then (`_Guarded`) is one thread's."""


def _converter(*, strict: bool) -> Converter:
    converter = _converters.get(strict)
    if converter is None:
        converter = _converters[strict] = _make_converter(strict=strict)
    return converter


def forget() -> None:
    """Let go of all classes that were met."""
    _converters.clear()
    _enums.clear()


def _make_converter(*, strict: bool) -> Converter:
    converter = Converter(forbid_extra_keys=strict, structure_fallback_factory=_instance_hook)
    for kind, hook in _HOOKS.items():
        converter.register_structure_hook(kind, hook)
    guarded = _Guarded()
    factories: list[tuple[Callable[[Any], bool], Callable[[Any, Converter], _Hook]]] = [
        # The last that was registered is asked first.
        (_is_class, _class_hook),
        (lambda kind: isinstance(kind, type) and issubclass(kind, Enum), _enum_hook),
        (_is_named_tuple, _NamedTuples().hook),
        (is_pydantic_model, _pydantic_hook),
        (lambda kind: get_origin(kind) is Literal, _literal_hook),
        (lambda kind: get_origin(kind) in (Union, UnionType), _union_hook),
        (_is_typed_dict, _typed_dict_hook),
        (guarded.is_due, guarded.hook),
    ]
    for applies, factory in factories:
        converter.register_structure_hook_factory(applies, factory)
    return converter


# Scalars.


def _exact(value: Any, kind: Any) -> Any:
    if type(value) is kind:
        return value
    return _refuse(kind, value) if kind in _HOOKS else _read_subclass(value, kind)


def _int(value: Any, kind: Any) -> Any:
    if kind is not int:
        return _read_subclass(value, kind)
    if type(value) is int:
        return value
    # JavaScript has one type of numbers, and the reference engine writes integers beyond 32 bits as floats.
    if type(value) is float and value.is_integer() and not -(2**31) <= value < 2**32:
        return int(value)
    return _refuse(kind, value)


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
    return _refuse(kind, value)


def _bytearray(value: Any, kind: Any) -> Any:
    return bytearray(_exact(value, bytes))


_HOOKS: Final[dict[Any, _Hook]] = {
    **dict.fromkeys((*_SCALARS, ErrorValue, TaggedValue), _exact),
    int: _int,
    float: _float,
    bytearray: _bytearray,
}


_enums: Final[dict[Any, _Hook]] = {}


def _read_subclass(value: Any, kind: Any) -> Any:
    """For a subclass of a scalar, an `IntEnum` say: cattrs asks the scalar's hook for it, which is stored in its place."""
    if issubclass(kind, Enum):
        if kind not in _enums:
            _enums[kind] = _enum_hook(kind)
        return _enums[kind](value, kind)
    base = next(base for base in kind.__mro__ if base in _HOOKS)
    return kind(_HOOKS[base](value, base))


def _instance_hook(kind: Any) -> _Hook:
    """For what cattrs does not know: an instance of it, where that can be asked, and anything where it cannot."""

    def read(value: Any, _: Any) -> Any:
        if not isinstance(value, kind):
            _refuse(kind, value)
        return value

    if isinstance(kind, str | ForwardRef):
        raise NameError(f"the name {kind!r} is not resolved")  # noqa: TRY004 - which is what Python says of it
    try:
        isinstance(None, kind)
    except TypeError:  # `Any`, a type variable, a protocol
        return lambda value, _: value
    return read


# Enums and literals.


def _enum_hook(kind: type[Enum], _: Converter | None = None) -> _Hook:
    if issubclass(kind, Flag):

        def read_flag(value: Any, _: Any) -> Any:
            if type(value) is not int:
                _refuse(kind, value)
            return kind(value)

        return read_flag
    return _choice(kind, {encode_value(member, to_plain=to_plain): member for member in kind})


def _literal_hook(annotation: Any, _: Converter) -> _Hook:
    choices = {encode_value(choice, to_plain=to_plain): choice for choice in get_args(annotation)}
    return _choice(annotation, choices)


def _choice(annotation: Any, choices: Mapping[bytes, Any]) -> _Hook:
    # By their encoding: that tells 1 from True, and finds a tuple by the list that it came back as.
    def read(value: Any, _: Any) -> Any:
        chosen = choices.get(encode_value(value), choices)
        if chosen is choices:
            shown = repr(value) if isinstance(value, str | int | float) else type(value).__name__
            raise Misfit(type_text(annotation), f"{shown:.60}")
        return chosen

    return read


# Classes.


def _is_class(kind: Any) -> bool:
    owner: Any = get_origin(kind) or kind
    return (hasattr(owner, "__attrs_attrs__") or dataclasses.is_dataclass(owner)) and isinstance(owner, type)


def _is_typed_dict(kind: Any) -> bool:
    owner: Any = get_origin(kind) or kind
    return hasattr(owner, "__total__") and isinstance(owner, type) and issubclass(owner, dict)


def _class_hook(kind: Any, converter: Converter) -> _Hook:
    parameters = getattr(kind, "__parameters__", ())
    if parameters and isinstance(kind, type):
        kind = cast("Any", kind)[(Any,) * len(parameters)]
    hook = make_dict_structure_fn(
        kind,
        converter,
        _cattrs_forbid_extra_keys="from_converter",
        _cattrs_include_init_false=True,
        **_quoted_fields(get_origin(kind) or kind, converter),
    )
    return _for_mappings(kind, hook)


def _quoted_fields(owner: type, converter: Converter) -> dict[str, Any]:
    """How to read the fields whose annotation quotes a name within a type, `list["Tree"]`: cattrs takes that as it is."""
    fields: Any = getattr(owner, "__attrs_attrs__", None) or dataclasses.fields(cast("Any", owner))
    quoted = [field.name for field in fields if not isinstance(field.type, str) and _quotes(field.type)]
    hints = typing.get_type_hints(owner, include_extras=True) if quoted else {}
    return {name: override(struct_hook=_later(converter, hints[name])) for name in quoted}


def _quotes(annotation: Any) -> bool:
    return isinstance(annotation, str | ForwardRef) or (
        get_origin(annotation) is not Literal and any(map(_quotes, get_args(annotation)))
    )


def _later(converter: Converter, annotation: Any) -> _Hook:
    # Its hook may be the one that is being made.
    return lambda value, _: converter.structure(value, annotation)


def _typed_dict_hook(kind: Any, converter: Converter) -> _Hook:
    # A TypedDict says what is there, not what is not: other keys stay.
    hook: Any = cast("Any", typeddicts).make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=False)
    return _for_mappings(kind, hook)


def _for_mappings(kind: Any, hook: _Hook) -> _Hook:
    def read(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            _refuse(kind, value)
        return hook(value, kind)

    return read


def _pydantic_hook(kind: Any, _: Converter) -> _Hook:
    def read(value: Any, _: Any) -> Any:
        try:
            return kind.model_validate(value, by_alias=True, by_name=True)
        except ValueError as error:  # pydantic's own is one
            problems = getattr(error, "errors", None)
            if problems is None:
                raise
            problem = problems(include_url=False)[0]
            path = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in problem["loc"])
            found = type(problem["input"]).__name__
            reason = f"was refused by {type_text(kind)} ({problem['msg']}; it is {found})"
            raise Misfit(type_text(kind), found, reason, path) from error

    return read


# Containers.


def _is_named_tuple(kind: Any) -> bool:
    owner: Any = get_origin(kind) or kind
    return hasattr(owner, "_fields") and isinstance(owner, type) and issubclass(owner, tuple)


class _NamedTuples:
    """Named tuples, field by field: cattrs does not find what their annotations mean when they are text."""

    def __init__(self) -> None:
        self._hooks: dict[Any, _Hook] = {}
        self._being_made: set[Any] = set()

    def hook(self, kind: Any, converter: Converter) -> _Hook:
        if kind in self._being_made:  # it holds itself
            return lambda value, _: self._hooks[kind](value, kind)
        owner: Any = get_origin(kind) or kind
        hints = typing.get_type_hints(owner, include_extras=True)
        self._being_made.add(kind)
        try:
            fields = [
                (name, hints.get(name, Any), converter.get_structure_hook(hints.get(name, Any)))
                for name in owner._fields
            ]
        finally:
            self._being_made.discard(kind)
        required = len(fields) - len(owner._field_defaults)

        def read(value: Any, _: Any) -> Any:
            if not isinstance(value, list | tuple):
                _refuse(kind, value)
            items = cast("Sequence[Any]", value)
            if not required <= len(items) <= len(fields):
                raise Misfit(type_text(kind), f"{len(items)} items")
            return owner(*(_read_field(*field, item) for field, item in zip(fields, items, strict=False)))

        self._hooks[kind] = read
        return read


def _read_field(name: str, annotation: Any, hook: _Hook, value: Any) -> Any:
    try:
        return hook(value, annotation)
    except Exception as error:
        misfit = _misfit(error, annotation, value)
        raise Misfit(misfit.expected, misfit.found, misfit.reason, f".{name}{misfit.path}") from error


class _Guarded:
    """Containers as cattrs reads them, but only from the kind of container that is stored for them.

    cattrs reads a list from anything that can be iterated, text included. Its hook is asked for again from within ours; that
    question, and no other, is passed on.
    """

    def __init__(self) -> None:
        self._passed_on: list[Any] = []

    def is_due(self, kind: Any) -> bool:
        if self._passed_on and self._passed_on[-1] is kind:
            self._passed_on.pop()
            return False
        return _stored_kinds(kind) is not None

    def hook(self, kind: Any, converter: Converter) -> _Hook:
        accepted = _stored_kinds(kind)
        assert accepted is not None, "it is due"
        concrete = _concrete(kind)
        self._passed_on.append(concrete)
        inner = converter.get_structure_hook(concrete, cache_result=False)
        length = None
        if (get_origin(kind) or kind) is tuple and (args := get_args(kind)) and args[-1] is not Ellipsis:
            length = len(args) if args != ((),) else 0

        def read(value: Any, _: Any) -> Any:
            if not isinstance(value, accepted):
                _refuse(kind, value)
            items = cast("Sized", value)
            if length is not None and len(items) != length:
                raise Misfit(type_text(kind), f"{len(items)} items")
            return inner(value, concrete)

        return read


def _stored_kinds(kind: Any) -> tuple[type, ...] | None:
    """What a container is stored as; `None` for what is no container."""
    origin = get_origin(kind) or kind
    if origin in (abc.Mapping, abc.MutableMapping):
        return (Mapping,)
    if origin in _SEQUENCES:
        return (list, tuple)
    if origin in _SETS:
        return (set, frozenset)
    if not isinstance(origin, type) or _is_typed_dict(kind) or _is_named_tuple(kind):
        return None
    if issubclass(origin, list) or issubclass(origin, tuple):
        return (list, tuple)
    if issubclass(origin, set | frozenset):
        return (set, frozenset)
    return (Mapping,) if issubclass(origin, dict) else None


def _concrete(kind: Any) -> Any:
    origin = get_origin(kind) or kind
    concrete: Any = list if origin in _SEQUENCES else set if origin in _SETS else None
    if concrete is None:
        return kind
    args = get_args(kind)
    return concrete[args] if args else concrete


# Unions.


_LOOSE: Final = 6
"""Rank of a number that another type of numbers takes."""


class _Member(NamedTuple):
    """One way to read a value of a union."""

    rank: int
    text: str
    accepts: Callable[[Any], bool]
    hook: _Hook
    annotation: Any


def _union_hook(annotation: Any, converter: Converter) -> _Hook:
    classes = [
        member for member in get_args(annotation) if _is_class(member) and member not in (ErrorValue, TaggedValue)
    ]
    members: list[_Member] = []
    for member in get_args(annotation):
        if len(classes) < 2 or member not in classes:
            members.extend(_members(member, converter))
    if len(classes) > 1:
        members.append(_Member(3, "", _is_mapping, _classes_hook(classes, converter), annotation))
    members.sort(key=lambda member: (member.rank, member.text))

    def read(value: Any, _: Any) -> Any:
        fitting = [member for member in members if member.accepts(value)]
        if len(fitting) == 1 and fitting[0].rank != _LOOSE:
            return fitting[0].hook(value, fitting[0].annotation)
        for member in fitting:
            try:
                return member.hook(value, member.annotation)
            except Exception:  # whatever its classes raise: it may fit another
                continue
        return _refuse(annotation, value)

    return read


def _members(annotation: Any, converter: Converter) -> list[_Member]:
    """The ways to read one member of a union: two for numbers, exactly and by what `int` and `float` take of each other."""
    hook = converter.get_structure_hook(annotation)
    text = type_text(annotation)
    stored = _stored_kinds(annotation)
    if get_origin(annotation) is Literal:
        return [_Member(0, text, _is_anything, hook, annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [_Member(1, text, _is_anything, hook, annotation)]
    if annotation in (*_SCALARS, int, float):
        exact = _Member(2, text, _is_exactly(annotation), hook, annotation)
        loose = _Member(_LOOSE, text, _is_a((int, float)), hook, annotation)
        return [exact, loose] if annotation in (int, float) else [exact]
    if _is_named_tuple(annotation):
        return [_Member(4, text, _is_a((list, tuple)), hook, annotation)]
    if _is_class(annotation) or _is_typed_dict(annotation):
        return [_Member(4, text, _is_mapping, hook, annotation)]
    if stored is not None:
        return [_Member(5, text, _is_a(stored), hook, annotation)]
    return [_Member(7, text, _is_anything, hook, annotation)]


def _is_anything(value: Any) -> bool:
    return True


def _is_exactly(kind: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _is_a(kinds: tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _classes_hook(classes: list[Any], converter: Converter) -> _Hook:
    pick = cast("Callable[[Any], Any]", create_default_dis_func(converter, *classes))
    hooks = {kind: converter.get_structure_hook(kind) for kind in classes}

    def read(value: Any, annotation: Any) -> Any:
        try:
            kind = pick(value)
        except Exception:
            return _refuse(annotation, value)
        return hooks[kind](value, kind)

    return read
