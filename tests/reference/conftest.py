"""The reference engine in a node process, for all tests here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import ReferenceEngine, reference_engine


@pytest.fixture(scope="session")
def theirs() -> Iterator[ReferenceEngine]:
    """The reference engine."""
    with reference_engine() as engine:
        yield engine
