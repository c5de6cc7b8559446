"""Fixtures of every test: a clock that jumps, the run mode, and a namespace on each driver."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import pytest
from harness import DriverKind, Namespace
from hypothesis import settings

from perdure.storage.sqlite_connection import Durability
from perdure.workflow import RunMode

MakeNamespace: TypeAlias = Callable[[], Namespace]

_MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A directory that is never on a disk, where the system has one; else the usual one for temporary files."""

# A shell starts what is to run in the background with Ctrl-C ignored, and programs that we start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two workers share two cores: a deadline would measure the neighbour.
settings.register_profile("perdure", deadline=None)
settings.load_profile("perdure")


_EXPLORING = {"crash", "property", "simulation"}
"""Folders of tests that explore what our code does, in great numbers."""
_SPARED = {("live", "sqlite"), ("yield", "memory")}
"""The other two cells have both modes and both drivers in them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the newest Python need not run again: explorations, and of both modes on both drivers two of the four cells."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        cell, folder = (params.get("mode"), params.get("driver_kind")), item.path.parent.name
        is_spared = cell in _SPARED and folder != "conformance"  # which has a rule of its own
        if is_spared or folder in _EXPLORING:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(params=["yield", "live"])
def mode(request: pytest.FixtureRequest) -> RunMode:
    """The run mode; a test that takes it runs in both."""
    return request.param


@pytest.fixture(params=["memory", "sqlite"])
def driver_kind(request: pytest.FixtureRequest) -> DriverKind:
    """The driver; a test that takes it runs on both."""
    return request.param


@asynccontextmanager
async def _namespaces(kind: DriverKind, directory: Path, durability: Durability) -> AsyncGenerator[MakeNamespace]:
    made: list[Namespace] = []

    def make() -> Namespace:
        made.append(Namespace(kind, directory, durability=durability))
        return made[-1]

    yield make
    for namespace in made:
        await namespace.close()


@pytest.fixture
async def make_namespace(driver_kind: DriverKind, tmp_path: Path) -> AsyncIterator[MakeNamespace]:
    """Makes empty namespaces on the driver under test; they are closed after the test."""
    async with _namespaces(driver_kind, tmp_path, "full") as make:
        yield make


@pytest.fixture
async def make_quick_namespace(driver_kind: DriverKind) -> AsyncIterator[MakeNamespace]:
    """The same, but they do not wait for the disk: for hundreds of runs that end by the death of the process at worst."""
    with TemporaryDirectory(dir=_MEMORY_DISK) as directory:
        async with _namespaces(driver_kind, Path(directory), "normal") as make:
            yield make


@pytest.fixture
async def namespace(make_namespace: MakeNamespace) -> Namespace:
    """An empty namespace on the driver under test."""
    return make_namespace()
