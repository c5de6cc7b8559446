"""Reading classes: dataclasses, attrs and pydantic classes, named tuples, typed dicts.

1. Fields that a class does not know are refused by a strict converter (`forbid_extra_keys`), else passed over.
2. Fields that the constructor does not take are set afterwards, so that an instance comes back with all that it held.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ForwardRef, Literal, cast, get_args, get_origin

from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, override, typeddicts

from perdure.workflow.misfit import Misfit, lost_field, misfit_of, refuse, type_text
from perdure.workflow.plain import to_plain
from perdure.workflow.structure_scalars import Hook

__all__ = [
    "NamedTuples",
    "class_hook",
    "is_class",
    "is_named_tuple",
    "is_typed_dict",
    "pydantic_hook",
    "typed_dict_hook",
]


def is_class(kind: Any) -> bool:
    """Whether it is a dataclass or an attrs class, with its type arguments or without."""
    owner: Any = get_origin(kind) or kind
    return (hasattr(owner, "__attrs_attrs__") or dataclasses.is_dataclass(owner)) and isinstance(owner, type)


def is_typed_dict(kind: Any) -> bool:
    """Whether it is a typed dict, with its type arguments or without."""
    owner: Any = get_origin(kind) or kind
    return hasattr(owner, "__total__") and isinstance(owner, type) and issubclass(owner, dict)


def class_hook(kind: Any, converter: Converter) -> Hook:
    """What reads a dataclass or an attrs class: a dict of its fields."""
    parameters = getattr(kind, "__parameters__", ())
    if parameters and isinstance(kind, type):
        kind = cast("Any", kind)[(Any,) * len(parameters)]
    hook = make_dict_structure_fn(
        kind,
        converter,
        _cattrs_forbid_extra_keys="from_converter",
        _cattrs_include_init_false=True,
        _cattrs_use_linecache=False,
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


def _later(converter: Converter, annotation: Any) -> Hook:
    # Its hook may be the one that is being made.
    return lambda value, _: converter.structure(value, annotation)


def typed_dict_hook(kind: Any, converter: Converter) -> Hook:
    """What reads a typed dict."""
    # A TypedDict says what is there, not what is not: other keys stay.
    hook: Any = cast("Any", typeddicts).make_dict_structure_fn(
        kind, converter, _cattrs_forbid_extra_keys=False, _cattrs_use_linecache=False
    )
    return _for_mappings(kind, hook)


def _for_mappings(kind: Any, hook: Hook) -> Hook:
    def read(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            refuse(kind, value)
        return hook(value, kind)

    return read


def pydantic_hook(kind: Any, converter: Converter) -> Hook:
    """What reads a pydantic model: the model itself."""
    if "by_name" not in inspect.signature(kind.model_validate).parameters:
        raise TypeError("this pydantic is too old for it; install pydantic 2.11 or newer")
    known = _keys_of(kind) if converter.forbid_extra_keys else None

    def read(value: Any, _: Any) -> Any:
        try:
            model = kind.model_validate(value, by_alias=True, by_name=True)
        except ValueError as error:  # pydantic's own is one
            problems = getattr(error, "errors", None)
            if problems is None:
                raise
            raise _pydantic_misfit(kind, problems(include_url=False)[0]) from error
        if known is not None and isinstance(value, Mapping):
            lost = set(cast("Iterable[Any]", value)) - known - cast("Any", to_plain(model)).keys()
            if lost:
                raise lost_field(type_text(kind), str(min(lost, key=str)))
        return model

    return read


def _keys_of(kind: Any) -> set[str] | None:
    """What a model takes its fields from; `None` if that is no set of names."""
    aliases = {alias for field in kind.model_fields.values() for alias in (field.alias, field.validation_alias)} - {
        None
    }
    return aliases if all(isinstance(alias, str) for alias in aliases) and not kind.__pydantic_root_model__ else None


def _pydantic_misfit(kind: Any, problem: dict[str, Any]) -> Misfit:
    path = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in problem["loc"])
    found = type(problem["input"]).__name__
    return Misfit(type_text(kind), found, f"was refused by {type_text(kind)} ({problem['msg']}; it is {found})", path)


def is_named_tuple(kind: Any) -> bool:
    """Whether it is a named tuple, with its type arguments or without."""
    owner: Any = get_origin(kind) or kind
    return hasattr(owner, "_fields") and isinstance(owner, type) and issubclass(owner, tuple)


class NamedTuples:
    """Named tuples, field by field: cattrs does not find what their annotations mean when they are text."""

    def __init__(self) -> None:
        self._hooks: dict[Any, Hook] = {}
        self._being_made: set[Any] = set()

    def hook(self, kind: Any, converter: Converter) -> Hook:
        """What reads one kind: a list of its fields' values."""
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
                refuse(kind, value)
            items = cast("Sequence[Any]", value)
            if not required <= len(items) <= len(fields):
                raise Misfit(type_text(kind), f"{len(items)} items")
            return owner(*(_read_field(*field, item) for field, item in zip(fields, items, strict=False)))

        self._hooks[kind] = read
        return read


def _read_field(name: str, annotation: Any, hook: Hook, value: Any) -> Any:
    try:
        return hook(value, annotation)
    except Exception as error:
        misfit = misfit_of(error, annotation, value)
        raise Misfit(misfit.expected, misfit.found, misfit.reason, f".{name}{misfit.path}") from error
