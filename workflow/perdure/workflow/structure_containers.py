"""Reading lists, tuples, sets and dicts, and the abstract types of these."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping, Sized
from typing import Any, Final, cast, get_args, get_origin

from cattrs import Converter

from perdure.workflow.misfit import Misfit, refuse, type_text
from perdure.workflow.structure_classes import is_named_tuple, is_typed_dict
from perdure.workflow.structure_scalars import Hook

__all__ = ["Guarded", "stored_kinds"]

_SEQUENCES: Final = (abc.Iterable, abc.Collection, abc.Sequence, abc.MutableSequence)
_SETS: Final = (abc.Set, abc.MutableSet)


class Guarded:
    """Containers as cattrs reads them, but only from the kind of container that is stored for them.

    cattrs reads a list from anything that can be iterated, text included. Its hook is asked for again from within ours; that
    question, and no other, is passed on.
    """

    def __init__(self) -> None:
        self._passed_on: list[Any] = []

    def is_due(self, kind: Any) -> bool:
        """Whether it is a container, and not the question that is passed on."""
        if self._passed_on and self._passed_on[-1] is kind:
            self._passed_on.pop()
            return False
        return stored_kinds(kind) is not None

    def hook(self, kind: Any, converter: Converter) -> Hook:
        """What reads one kind of container."""
        accepted = stored_kinds(kind)
        assert accepted is not None, "it is due"
        concrete = _concrete(kind)
        outer = len(self._passed_on)
        self._passed_on.append(concrete)
        try:
            inner = converter.get_structure_hook(concrete, cache_result=False)
        finally:
            del self._passed_on[outer:]
        length = None
        if (get_origin(kind) or kind) is tuple and (args := get_args(kind)) and args[-1] is not Ellipsis:
            length = len(args) if args != ((),) else 0

        def read(value: Any, _: Any) -> Any:
            if not isinstance(value, accepted):
                refuse(kind, value)
            items = cast("Sized", value)
            if length is not None and len(items) != length:
                raise Misfit(type_text(kind), f"{len(items)} items")
            return inner(value, concrete)

        return read


def stored_kinds(kind: Any) -> tuple[type, ...] | None:
    """What a container is stored as; `None` for what is no container."""
    origin = get_origin(kind) or kind
    if origin in (abc.Mapping, abc.MutableMapping):
        return (Mapping,)
    if origin in _SEQUENCES:
        return (list, tuple)
    if origin in _SETS:
        return (set, frozenset)
    if not isinstance(origin, type) or is_typed_dict(kind) or is_named_tuple(kind):
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
