"""Fixtures of the supervisor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from disks import Disk
from harness import DriverKind


@pytest.fixture
def disk(driver_kind: DriverKind, tmp_path: Path) -> Disk:
    """An empty disk for a `MemoryStore` or for a `FileStore`, in virtual time."""
    return Disk(driver_kind, tmp_path)
