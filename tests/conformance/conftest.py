"""Beside both run modes, the plays are also run under a supervisor (support/hosted.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["yield", "live", "hosted"])
def mode(request: pytest.FixtureRequest) -> Any:
    """How a play is run."""
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Plays under a supervisor are run on one driver: which it is, the supervisor does not know, and they take long.

    Under the newest Python plays are run in yield mode in memory alone: all others are `exhaustive`.
    """

    def cell(item: pytest.Item) -> tuple[str | None, str | None]:
        params = getattr(getattr(item, "callspec", None), "params", {})
        return params.get("mode"), params.get("driver_kind")

    def is_double(item: pytest.Item) -> bool:
        return cell(item) == ("hosted", "sqlite")

    for item in items:  # of the whole session
        is_ours = item.path.parent == Path(__file__).parent
        if is_ours and "mode" in item.fixturenames and cell(item) != ("yield", "memory"):
            item.add_marker(pytest.mark.exhaustive)

    double = [item for item in items if is_double(item)]
    if double:
        config.hook.pytest_deselected(items=double)
        items[:] = [item for item in items if not is_double(item)]
