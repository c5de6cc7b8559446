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

    They are `exhaustive`, and so are plays in live mode on files: under the newest Python plays are run in both modes in memory,
    and in the one that reads more on files; the supervisor's own tests are run as well.
    """

    def cell(item: pytest.Item) -> tuple[str | None, str | None]:
        params = getattr(getattr(item, "callspec", None), "params", {})
        return params.get("mode"), params.get("driver_kind")

    def is_double(item: pytest.Item) -> bool:
        return cell(item) == ("hosted", "sqlite")

    for item in items:  # of the whole session
        is_ours = item.path.parent == Path(__file__).parent
        if is_ours and (cell(item)[0] == "hosted" or cell(item) == ("live", "sqlite")):
            item.add_marker(pytest.mark.exhaustive)

    double = [item for item in items if is_double(item)]
    if double:
        config.hook.pytest_deselected(items=double)
        items[:] = [item for item in items if not is_double(item)]
