"""From plain data to annotated types, with cattrs. Imported when the first annotation that needs it is met.

1. Nothing is coerced: text is no number, a list no set (`structure_scalars`, `structure_containers`).
2. What does not fit is told by the path to it, in the caller's own terms (`misfit`).
3. A value is checked strictly before it is recorded: a field that the annotation does not know (of a subclass, say) would
   be lost. A recorded one is read leniently, so that a field can be removed from a class.
4. An annotation that cannot be used is refused when its reader is made, before a step's function runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from types import UnionType
from typing import Any, Final, Literal, TypeAlias, Union, get_origin

from cattrs import Converter

from perdure.workflow.misfit import Misfit, misfit_of, type_text
from perdure.workflow.plain import is_pydantic_model
from perdure.workflow.structure_classes import (
    NamedTuples,
    class_hook,
    is_class,
    is_named_tuple,
    is_typed_dict,
    pydantic_hook,
    typed_dict_hook,
)
from perdure.workflow.structure_containers import Guarded
from perdure.workflow.structure_scalars import (
    SCALAR_HOOKS,
    Hook,
    enum_hook,
    forget_enums,
    instance_hook,
    literal_hook,
)
from perdure.workflow.structure_unions import union_hook

__all__ = ["Misfit", "Reader", "forget", "make_reader", "type_text"]

Reader: TypeAlias = Callable[[Any], Any]
"""Gives the typed value for a plain one. Raises `Misfit`."""

_converters: Final[dict[bool, Converter]] = {}
_making: Final = threading.RLock()
"""Held while a reader is made: what is passed on to cattrs then (`Guarded`) is one thread's."""


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
        except Exception as error:
            misfit = misfit_of(error, annotation, value)
            raise misfit from misfit.__cause__

    return read


def forget() -> None:
    """Let go of all classes that were met."""
    with _making:
        _converters.clear()
        forget_enums()


def _converter(*, strict: bool) -> Converter:
    converter = _converters.get(strict)
    if converter is None:
        converter = _converters[strict] = _make_converter(strict=strict)
    return converter


def _make_converter(*, strict: bool) -> Converter:
    converter = Converter(forbid_extra_keys=strict, structure_fallback_factory=instance_hook)
    for kind, hook in SCALAR_HOOKS.items():
        converter.register_structure_hook(kind, hook)
    guarded = Guarded()
    factories: list[tuple[Callable[[Any], bool], Callable[[Any, Converter], Hook]]] = [
        # The last that was registered is asked first.
        (is_class, class_hook),
        (lambda kind: isinstance(kind, type) and issubclass(kind, Enum), enum_hook),
        (is_named_tuple, NamedTuples().hook),
        (is_pydantic_model, pydantic_hook),
        (lambda kind: get_origin(kind) is Literal, literal_hook),
        (lambda kind: get_origin(kind) in (Union, UnionType), _union_hook),
        (is_typed_dict, typed_dict_hook),
        (guarded.is_due, guarded.hook),
    ]
    for applies, factory in factories:
        converter.register_structure_hook_factory(applies, factory)
    return converter


def _union_hook(annotation: Any, converter: Converter) -> Hook:
    if converter.forbid_extra_keys:
        return union_hook(annotation, converter, None)
    return union_hook(annotation, converter, _converter(strict=True).get_structure_hook(annotation))
