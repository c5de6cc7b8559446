"""Reading unions.

1. The kind of the plain value decides, then the first member that it fits in an order of our own (literals, enums, scalars,
   classes, containers): Python holds unions equal whatever their order, and so do caches.
2. Dataclasses and attrs classes are told apart by the fields that only one of them has, or by their `Literal` fields. Of
   pydantic models the first is taken that has just the fields of the value, or else the first that takes it.
3. A recorded value is read by the member that it was checked against before it was recorded: strictly first, and only if
   nothing fits so, since the code has changed, leniently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, cast, get_args, get_origin

from cattrs import Converter
from cattrs.disambiguators import create_default_dis_func

from perdure.storage.values import ErrorValue, TaggedValue
from perdure.workflow.misfit import refuse
from perdure.workflow.plain import is_pydantic_model, to_plain
from perdure.workflow.structure_classes import is_class, is_named_tuple, is_typed_dict
from perdure.workflow.structure_containers import stored_kinds
from perdure.workflow.structure_scalars import SCALARS, Hook

__all__ = ["union_hook"]

_LOOSE: Final = 6
"""Rank of a number that another type of numbers takes."""


class _Member(NamedTuple):
    """One way to read a value of a union."""

    rank: int
    text: str
    accepts: Callable[[Any], bool]
    hook: Hook
    annotation: Any


def union_hook(annotation: Any, converter: Converter, strict_hook: Hook | None) -> Hook:
    """What reads a union; the hook of a strict converter for it, where the converter is a lenient one."""
    classes = [
        member for member in get_args(annotation) if is_class(member) and member not in (ErrorValue, TaggedValue)
    ]
    models = [member for member in get_args(annotation) if is_pydantic_model(member)]
    members: list[_Member] = []
    if len(classes) > 1:
        members.append(_Member(3, "classes", _is_mapping, _classes_hook(classes, converter), annotation))
    if len(models) > 1:
        members.append(_Member(3, "models", _is_anything, _models_hook(models, converter), annotation))
    for member in get_args(annotation):
        if not (len(classes) > 1 and member in classes) and not (len(models) > 1 and member in models):
            members.extend(_members(member, converter))
    members.sort(key=lambda member: (member.rank, member.text))

    def read(value: Any, _: Any) -> Any:
        fitting = [member for member in members if member.accepts(value)]
        if len(fitting) == 1 and fitting[0].rank != _LOOSE:
            return fitting[0].hook(value, fitting[0].annotation)
        if strict_hook is not None:
            try:
                return strict_hook(value, annotation)
            except Exception:  # it was not recorded by this code
                pass
        for member in fitting:
            try:
                return member.hook(value, member.annotation)
            except Exception:  # whatever its classes raise: it may fit another
                continue
        return refuse(annotation, value)

    return read


def _members(annotation: Any, converter: Converter) -> list[_Member]:
    """The ways to read one member of a union: two for numbers, exactly and by what `int` and `float` take of each other."""
    hook = converter.get_structure_hook(annotation)
    text = repr(annotation)  # with modules
    stored = stored_kinds(annotation)
    if get_origin(annotation) is Literal:
        return [_Member(0, text, _is_anything, hook, annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [_Member(1, text, _is_anything, hook, annotation)]
    if annotation in (*SCALARS, int, float):
        exact = _Member(2, text, _is_exactly(annotation), hook, annotation)
        loose = _Member(_LOOSE, text, _is_a((int, float)), hook, annotation)
        return [exact, loose] if annotation in (int, float) else [exact]
    if is_named_tuple(annotation):
        return [_Member(4, text, _is_a((list, tuple)), hook, annotation)]
    if is_class(annotation) or is_typed_dict(annotation):
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


def _classes_hook(classes: list[Any], converter: Converter) -> Hook:
    pick = cast("Callable[[Any], Any]", create_default_dis_func(converter, *classes))
    hooks = {kind: converter.get_structure_hook(kind) for kind in classes}

    def read(value: Any, annotation: Any) -> Any:
        try:
            kind = pick(value)
        except Exception:
            return refuse(annotation, value)
        return hooks[kind](value, kind)

    return read


def _models_hook(models: list[Any], converter: Converter) -> Hook:
    hooks = [(kind, converter.get_structure_hook(kind)) for kind in sorted(models, key=repr)]

    def read(value: Any, annotation: Any) -> Any:
        taken: list[Any] = []
        for kind, hook in hooks:
            try:
                model = hook(value, kind)
            except Exception:  # whatever its validators raise: it may fit another
                continue
            plain: Any = to_plain(model)
            if isinstance(value, dict) and isinstance(plain, dict) and value.keys() == plain.keys():
                return model
            taken.append(model)
        return taken[0] if taken else refuse(annotation, value)

    return read
