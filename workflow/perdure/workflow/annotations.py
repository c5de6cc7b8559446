"""What a callable's annotations say: the type of what it returns, and of its second parameter.

1. An annotation that says nothing about the value (missing, `Any`, `object`, `None`, a type variable, a protocol) and one
   whose names cannot be found are no annotation: the value stays plain data.
2. Only the annotation asked for is resolved, so that another parameter's, imported for type checkers only, does no harm.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin

from perdure.workflow.types import Break, Continue

__all__ = [
    "break_annotation",
    "function_of",
    "means_the_same_everywhere",
    "parameter_annotation",
    "raw_annotations",
    "return_annotation",
    "state_annotation",
]

_ALIAS: Final[Any] = getattr(typing, "TypeAliasType", ())
_SILENT: Final[tuple[Any, ...]] = (Any, object, types.NoneType, typing.NoReturn, typing.Never, cast("Any", typing).Self)
_WORD: Final = re.compile(r"\w+")


def function_of(fn: Any) -> FunctionType | type | None:
    """The function behind partials, methods and objects with `__call__`; a class is itself."""
    while type(fn) is not FunctionType:
        if isinstance(fn, type):
            return fn
        if isinstance(fn, partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            fn = getattr(cast("object", type(fn)), "__call__", None)  # noqa: B004 - its annotations are wanted, not whether it is there
            if type(fn) is not FunctionType:
                return None
    return fn


def raw_annotations(function: FunctionType) -> dict[str, Any]:
    """A function's annotations as they are: types, or texts."""
    try:
        return function.__annotations__
    except NameError:  # later Pythons make them when they are asked for
        return {}


def means_the_same_everywhere(function: FunctionType, annotation: Any) -> bool:
    """Whether no text in an annotation names something of the enclosing function, which may be another class each time."""
    words = _WORD.findall(annotation if isinstance(annotation, str) else repr(annotation))
    return not set(words).intersection(function.__code__.co_freevars)


def return_annotation(fn: Callable[..., Any]) -> Any:
    """What `fn` returns, once awaited, or `None` if nothing is said of it. For a class, the class."""
    function = function_of(fn)
    if isinstance(function, type):
        return None if function in (object, type) else function
    annotation = _annotation(function, "return")
    if get_origin(annotation) in (Awaitable, Coroutine):
        return _told(get_args(annotation)[-1])
    return annotation


def parameter_annotation(fn: Callable[..., Any], index: int) -> Any:
    """What `fn` takes as its positional argument with this index, or `None` if nothing is said of it."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):
        return None
    if index >= len(parameters) or parameters[index].kind is inspect.Parameter.VAR_POSITIONAL:
        return None
    return _annotation(function_of(fn), parameters[index].name)


def state_annotation(body: Callable[..., Any]) -> Any:
    """What a loop's body takes as its state: by its second parameter, or by the `Continue[...]` that it returns."""
    annotation = parameter_annotation(body, 1)
    return _answer_annotation(body, Continue) if annotation is None else annotation


def break_annotation(body: Callable[..., Any]) -> Any:
    """What a loop's body breaks with, by the `Break[...]` that it returns."""
    return _answer_annotation(body, Break)


def _answer_annotation(body: Callable[..., Any], kind: Any) -> Any:
    annotation = return_annotation(body)
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if kind in members:
        return None  # it does not say with what
    answers = tuple(get_args(member)[0] for member in members if get_origin(member) is kind)
    return _told(Union[answers]) if answers else None  # noqa: UP007 - made of a tuple


def _annotation(function: FunctionType | type | None, name: str) -> Any:
    if not isinstance(function, FunctionType):
        return None
    annotation = raw_annotations(function).get(name)
    return annotation if annotation is None else _told(_resolved(function, annotation))


def _resolved(function: FunctionType, annotation: Any) -> Any:
    origin: Any = inspect.unwrap(function)
    enclosing: dict[str, Any] = {}
    for name, cell in zip(origin.__code__.co_freevars, origin.__closure__ or (), strict=True):
        try:
            enclosing[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, origin.__globals__, enclosing, include_extras=True)["it"]
    except Exception:
        return None  # a name that cannot be found, or text that is no type


def _told(annotation: Any) -> Any:
    """The annotation, or `None` if it says nothing about a value. An alias is what it stands for."""
    while isinstance(annotation, _ALIAS):
        annotation = annotation.__value__
    if isinstance(annotation, TypeVar) or any(annotation is silent for silent in _SILENT):
        return None
    is_protocol = getattr(annotation, "_is_protocol", False) and not getattr(annotation, "_is_runtime_protocol", False)
    return None if is_protocol else annotation
