"""What a process forgets when it dies: the globals of the modules that a workflow lives in.

1. Simulated processes share one interpreter. So that state which is kept in a global is lost with its process, as it is in
   production, the globals of the workflows' modules are put back before each process to what they were first.
2. Only plain globals are: names that held or hold numbers, text, lists, dictionaries, sets and the like, and what these hold, in
   place, as others hold them too; and what functions cache (`functools.cache`). Everything else, such as an `EffectLedger` or an
   attribute of a class or of an object, stays as it is.
3. What a container held first it holds again: the very same objects, and no copies of them, as code may ask who they are
   (`is MISSING`), and other tests go on with them.
4. What blocks of `virtual_supervisor` change is undone when their test ends (the pytest plugin's `Traces`), so that an earlier
   test hides nothing from a later one; not before, as the test looks at it. What a process of a `Simulation` changes is undone
   when the next one begins, as the test looks at it in between. What was changed again since, by whoever, such as a monkeypatch
   that was taken back, is left as it is.

Rejected: a fresh interpreter for each process. Its start alone takes longer than a whole simulated life.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, Final

__all__ = ["Amnesia", "Traces", "current_traces", "process_traces"]

_SCALARS: Final = (int, float, complex, str, bytes, type(None))
_MISSING: Final = object()
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
        self._firsts: list[dict[str, Any]] = [dict(space) for space in self._spaces]
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._caches: list[Callable[[], object]] = []
        for space in self._spaces:
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
        for space, name, first, _ in self.changed_names():
            _bind(space, name, first)
        for value, first in self._containers.values():
            _put_back(value, first)
        self.clear_caches()

    def clear_caches(self) -> None:
        """Functions have cached nothing."""
        for clear in self._caches:
            clear()

    def changed_containers(self) -> list[tuple[Any, Any]]:
        """What no longer holds what it held first, each with that."""
        return [(value, first) for value, first in self._containers.values() if not _holds_the_same(value, first)]

    def changed_names(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """What is or was plain data and another object than first, or new, or gone: where, its name, first and now, if any."""
        found: list[tuple[dict[str, Any], str, Any, Any]] = []
        for space, firsts in zip(self._spaces, self._firsts, strict=True):
            for name in firsts.keys() | space.keys():
                first, now = firsts.get(name, _MISSING), space.get(name, _MISSING)
                if now is not first and not name.startswith("__") and (_is_plain(first) or _is_plain(now)):
                    found.append((space, name, first, now))
        return found


class Traces:
    """What blocks of `virtual_supervisor`, or the processes of a `Simulation`, leave in globals, until it is undone."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any, Any]] = {}
        self._names: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}
        self._seen: Amnesia | None = None

    @contextmanager
    def watch(self, functions: Iterable[Callable[..., Any]], modules: Iterable[ModuleType] = ()) -> Generator[None]:
        """Note what changes inside, in the modules of these functions and in these modules."""
        self._seen = before = Amnesia(functions, modules)
        try:
            yield
        finally:
            for value, first in before.changed_containers():
                known = self._containers.get(id(value))
                first = known[1] if known is not None and _holds_the_same(known[2], first) else first
                self._containers[id(value)] = (value, first, copy.copy(value))
            for space, name, first, now in before.changed_names():
                noted = self._names.get((id(space), name))
                first = noted[1] if noted is not None and noted[2] is first else first
                self._names[id(space), name] = (space, first, now)

    def undo(self) -> None:
        """What is still as a block left it is as it was before the block."""
        for value, first, left in self._containers.values():
            if _holds_the_same(value, left):
                _put_back(value, first)
        for (_, name), (space, first, left) in self._names.items():
            if space.get(name, _MISSING) is left:
                _bind(space, name, first)
        self._containers.clear()
        self._names.clear()

    def forget(self) -> None:
        """A new process begins: as `undo`, and functions have cached nothing."""
        self.undo()
        if self._seen is not None:
            self._seen.clear_caches()


process_traces: Final = Traces()
"""What the process left that a `Simulation` ran last: the next one is another process, also if it is on another computer."""

current_traces: ContextVar[Traces | None] = ContextVar("perdure_testing_traces", default=None)
"""The traces of the test that is running; `None`: nobody undoes anything."""


def _globals_of(function: Any) -> dict[str, Any] | None:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__globals__"):
        function = getattr(function, "__call__", None)  # noqa: B004 - of an object whose call is a coroutine function
    return getattr(function, "__globals__", None)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _SCALARS) or type(value) is tuple or type(value) in _CONTAINERS


def _bind(space: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        del space[name]
    else:
        space[name] = value


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
