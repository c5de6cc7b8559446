"""Beside both run modes, the plays are also run under a supervisor (support/hosted.py)."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(params=["yield", "live", "hosted"])
def mode(request: pytest.FixtureRequest) -> Any:
    """How a play is run."""
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Plays under a supervisor are run on one driver: which it is, the supervisor does not know, and they take long.

    They are `exhaustive`: under the newest Python the plays are run without one, and the supervisor's own tests are.
    """

    def is_hosted(item: pytest.Item) -> bool:
        return getattr(getattr(item, "callspec", None), "params", {}).get("mode") == "hosted"

    def is_double(item: pytest.Item) -> bool:
        return is_hosted(item) and item.callspec.params.get("driver_kind") == "sqlite"  # type: ignore[attr-defined]

    for item in items:
        if is_hosted(item):
            item.add_marker(pytest.mark.exhaustive)

    double = [item for item in items if is_double(item)]
    if double:
        config.hook.pytest_deselected(items=double)
        items[:] = [item for item in items if not is_double(item)]
