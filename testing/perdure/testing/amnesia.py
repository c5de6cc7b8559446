"""What a process forgets when it dies: the globals of the modules that a workflow lives in.

1. Simulated processes share one interpreter. So that state which is kept in a global is lost with its process, as it is in
   production, the globals of the workflows' modules are put back before each process to what they were first.
2. Only plain data is: numbers, text, and lists, dictionaries, sets and the like, in place, as others hold them too; and what
   functions cache (`functools.cache`). Everything else, such as an `EffectLedger`, stays as it is.
3. What a container held first it holds again: the very same objects, and no copies of them, as code may ask who they are
   (`is MISSING`), and other tests go on with them.

Rejected: a fresh interpreter for each process. Its start alone takes longer than a whole simulated life.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, Final

__all__ = ["Amnesia"]

_SCALARS: Final = (int, float, complex, str, bytes, type(None))
_CONTAINERS: Final = (list, dict, set, bytearray, deque, defaultdict, Counter, OrderedDict)


class Amnesia:
    """The globals of some modules, as they were when this was made.

    Args:
        functions: Functions, whose modules are meant.
        modules: Further modules.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]], modules: Iterable[ModuleType] = ()) -> None:
        spaces = [space for function in functions if (space := _globals_of(function)) is not None]
        spaces += [vars(module) for module in modules]
        self._spaces = [
            space for number, space in enumerate(spaces) if all(space is not each for each in spaces[:number])
        ]
        self._scalars: list[dict[str, Any]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._caches: list[Callable[[], object]] = []
        for space in self._spaces:
            self._scalars.append({name: value for name, value in space.items() if _is_plain(name, value)})
            for name, value in space.items():
                if not name.startswith("__"):
                    self._remember(value, space)

    def _remember(self, value: Any, space: dict[str, Any]) -> None:
        if type(value) in _CONTAINERS or type(value) is tuple:
            self._remember_content(value)
        elif getattr(value, "__module__", None) == space.get("__name__") and callable(
            clear := getattr(value, "cache_clear", None)
        ):
            self._caches.append(clear)

    def _remember_content(self, value: Any) -> None:
        """What a container holds, and the containers in it."""
        todo = [value]
        while todo:
            each = todo.pop()
            if type(each) in _CONTAINERS and id(each) not in self._containers:
                self._containers[id(each)] = (each, copy.copy(each))
            elif type(each) is not tuple:
                continue
            if not isinstance(each, bytearray):
                todo += each.values() if isinstance(each, dict) else each

    def forget(self) -> None:
        """A new process begins: everything is as it was first."""
        for space, scalars in zip(self._spaces, self._scalars, strict=True):
            for name in [name for name, value in space.items() if _is_plain(name, value) and name not in scalars]:
                del space[name]
            space.update(scalars)
        for value, first in self._containers.values():
            _put_back(value, first)
        for clear in self._caches:
            clear()


def _globals_of(function: Any) -> dict[str, Any] | None:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):
        function = getattr(function, "__call__", None)  # noqa: B004 - of an object whose call is a coroutine function
    return getattr(function, "__globals__", None)


def _is_plain(name: str, value: Any) -> bool:
    return not name.startswith("__") and isinstance(value, _SCALARS)


def _put_back(value: Any, first: Any) -> None:
    """Let a container hold again what it held first, in the same order."""
    if isinstance(value, bytearray):
        value[:] = first
    elif not _holds_the_same(value, first):
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(first)  # pyright: ignore[reportUnknownMemberType]


def _holds_the_same(value: Any, first: Any) -> bool:
    if len(value) != len(first):
        return False
    held: Any = value
    if isinstance(value, dict):
        pairs = zip(held.items(), first.items(), strict=True)
        return all(key is known and each is it for (key, each), (known, it) in pairs)
    if isinstance(value, set):
        return {id(each) for each in held} == {id(each) for each in first}
    return all(each is it for each, it in zip(held, first, strict=True))
