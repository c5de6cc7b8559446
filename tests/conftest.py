"""Fixtures of every test: a clock that jumps, the run mode, and a namespace on each driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from harness import DriverKind, Namespace
from hypothesis import settings

from perdure.workflow import RunMode

# Two workers share two cores: a deadline would measure the neighbour.
settings.register_profile("perdure", deadline=None)
settings.load_profile("perdure")


@pytest.fixture(params=["yield", "live"])
def mode(request: pytest.FixtureRequest) -> RunMode:
    """The run mode; a test that takes it runs in both."""
    return request.param


@pytest.fixture(params=["memory", "sqlite"])
def driver_kind(request: pytest.FixtureRequest) -> DriverKind:
    """The driver; a test that takes it runs on both."""
    return request.param


@pytest.fixture
async def make_namespace(driver_kind: DriverKind, tmp_path: Path) -> AsyncIterator[Callable[[], Namespace]]:
    """Makes empty namespaces on the driver under test; they are closed after the test."""
    made: list[Namespace] = []

    def make() -> Namespace:
        made.append(Namespace(driver_kind, tmp_path))
        return made[-1]

    yield make
    for namespace in made:
        await namespace.close()


@pytest.fixture
async def namespace(make_namespace: Callable[[], Namespace]) -> Namespace:
    """An empty namespace on the driver under test."""
    return make_namespace()
