"""Beside both run modes, the plays are also run under a supervisor (support/hosted.py)."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(params=["yield", "live", "hosted"])
def mode(request: pytest.FixtureRequest) -> Any:
    """How a play is run."""
    return request.param
