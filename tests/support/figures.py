"""A pytest plugin: what the suite explored beside the processes that it killed (`incarnations.py` counts those).

1. Whatever explores says so here, once for each thing explored: a schedule is a seed under which Trio had to choose between
   tasks, a power cut is a disk as one left it, a fuzzed input is one that a decoder was given.
2. Under pytest-xdist workers send what they counted, and the controller writes it, into the file of `--figures-file`.

Rejected: to count tests. One of them may explore a thousand schedules, or none since a fixture changed.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import MutableSequence
from typing import Any, Final, Literal, TypeAlias, cast

import pytest

__all__ = ["FIGURES", "Figure", "count", "counted"]

Figure: TypeAlias = Literal["schedules", "choices of the scheduler", "power cuts", "fuzzed inputs", "fuzzed decoders"]

FIGURES: Final[tuple[Figure, ...]] = (
    "schedules",
    "choices of the scheduler",
    "power cuts",
    "fuzzed inputs",
    "fuzzed decoders",
)
"""In the order in which they are shown."""

_OUTPUT_KEY: Final = "figures"

counted: Final[Counter[str]] = Counter()
"""What this process explored so far."""


def count(figure: Figure, by: int = 1) -> None:
    """So many more were explored."""
    counted[figure] += by


def _watch_schedules() -> None:
    """The kit's schedules are counted where Trio asks for an order; it does not know of us."""
    from perdure.testing import scheduling

    scheduler: Any = getattr(scheduling, "_Scheduler")  # noqa: B009 - it is private
    sources: Any = getattr(scheduling, "_sources")  # noqa: B009
    shuffle = scheduler.shuffle
    seen: list[object] = [None]

    def counting(self: Any, batch: MutableSequence[Any]) -> None:
        if sources.stack and len(batch) > 1:
            count("choices of the scheduler")
            if sources.stack[-1] is not seen[0]:
                seen[0] = sources.stack[-1]
                count("schedules")
        shuffle(self, batch)

    scheduler.shuffle = counting


class _Session:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @property
    def _output(self) -> dict[str, Any] | None:
        """Where an xdist worker leaves what the controller is to have; `None` in any other process."""
        return cast("dict[str, Any] | None", getattr(self._config, "workeroutput", None))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a finished xdist worker counted."""
        counted.update(getattr(node, "workeroutput", {}).get(_OUTPUT_KEY, {}))

    def pytest_sessionfinish(self) -> None:
        """Send what was counted, or write it."""
        if self._output is not None:
            self._output[_OUTPUT_KEY] = dict(counted)
        elif self._config.option.figures_file is not None:
            path = self._config.invocation_params.dir / self._config.option.figures_file
            path.parent.mkdir(parents=True, exist_ok=True)
            table = {"python": platform.python_version(), "figures": {name: counted[name] for name in FIGURES}}
            path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the plugin's option."""
    group = parser.getgroup("figures")
    group.addoption("--figures-file", metavar="PATH", help="write how much was explored, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Start a session of the plugin."""
    _watch_schedules()
    config.pluginmanager.register(_Session(config), "figures session")
