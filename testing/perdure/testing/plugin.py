"""The pytest plugin, which registers itself: async tests of code that uses Perdure run, and each test finds the world empty.

1. pytest loads this module in every project of its environment. So nothing else of Perdure is imported before a test needs it,
   and tests that do not use Perdure are left alone.
2. An `async def test_...` that nobody claims runs under Trio in virtual time, if its module, or itself, uses Perdure. Whoever
   marks tests (`trio`, `anyio`, `asyncio`), or collects them as items of another class, has claimed them: pytest-trio's
   `trio_mode`, anyio's and pytest-asyncio's automatic modes do.
3. Every ledger is empty as a test begins; what its blocks of `virtual_supervisor` changed in globals is undone as it ends, before
   fixtures are torn down (see `amnesia.py`).
4. An exploration that is never awaited explores nothing, and fails its test.

Rejected: to claim every async test. In a project that uses Perdure in one corner, a test of another corner, which wants asyncio,
would be run under Trio, instead of failing with pytest's own advice.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from perdure.testing.clock import SimulatedClock
    from perdure.testing.disk import SimulatedDisk

__all__ = [
    "pytest_configure",
    "pytest_pyfunc_call",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "simulated_clock",
    "simulated_disk",
]

_CLAIMS: Final = ("trio", "anyio", "asyncio", "asyncio_cooperative", "twisted", "tornado", "gen_test", "curio")
"""Markers with which other plugins claim async tests."""


@pytest.fixture
def simulated_disk() -> SimulatedDisk:
    """An empty disk in memory; see `perdure.testing.SimulatedDisk`."""
    from perdure.testing.disk import SimulatedDisk

    return SimulatedDisk()


@pytest.fixture
def simulated_clock() -> SimulatedClock:
    """A wall clock in virtual time that can be moved; see `perdure.testing.SimulatedClock`."""
    from perdure.testing.clock import SimulatedClock

    return SimulatedClock()


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """Let an exploration that is never awaited be an error."""
    for name in ("explore_crashes", "record_history"):
        config.addinivalue_line("filterwarnings", f"error:coroutine '{name}' was never awaited:RuntimeWarning")
        config.addinivalue_line(
            "filterwarnings",
            f"error:Exception ignored in. <coroutine object {name} :pytest.PytestUnraisableExceptionWarning",
        )


@pytest.hookimpl
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Empty the ledgers, if there can be any."""
    ledger = sys.modules.get("perdure.testing.ledger")
    if ledger is not None:
        ledger.forget_effects()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Undo what simulated processes leave in globals, if there can be any."""
    amnesia = sys.modules.get("perdure.testing.amnesia")
    if amnesia is None:
        return (yield)
    traces = amnesia.Traces()
    token = amnesia.current_traces.set(traces)
    try:
        return (yield)
    finally:
        amnesia.current_traces.reset(token)
        traces.undo()
        amnesia.process_traces.undo()


@pytest.hookimpl
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run an async test that nobody else runs."""
    __tracebackhide__ = True
    function: Any = pyfuncitem.obj
    handle = getattr(function, "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    if inspect.iscoroutinefunction(inner):
        if handle is not None and _is_ours(pyfuncitem, inner):
            handle.inner_test = _in_virtual_time(inner)  # and Hypothesis runs it, once for each example
        return None
    if not inspect.iscoroutinefunction(function) or not _is_ours(pyfuncitem, function):
        return None
    given: Mapping[str, Any] = pyfuncitem.funcargs
    names = pyfuncitem._fixtureinfo.argnames  # pyright: ignore[reportPrivateUsage]
    _in_virtual_time(function)(**{name: given[name] for name in names})
    return True


def _in_virtual_time(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        from perdure.testing.virtual import run_virtual

        run_virtual(partial(function, *args, **kwargs))

    return run


def _is_ours(item: pytest.Function, function: Callable[..., Any]) -> bool:
    if type(item) is not pytest.Function or any(item.get_closest_marker(name) for name in _CLAIMS):
        return False
    function = inspect.unwrap(function)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return (
        any(_is_perdure(name) for name in names)
        or any(name in item.fixturenames for name in ("simulated_disk", "simulated_clock"))
        or any(_is_of_perdure(value) for value in vars(item.module).values())
    )


def _is_of_perdure(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return _is_perdure(value.__name__)
    name = getattr(value, "__module__", None) if callable(value) else type(value).__module__
    return isinstance(name, str) and _is_perdure(name)


def _is_perdure(name: str) -> bool:
    return name == "perdure" or name.startswith("perdure.")
