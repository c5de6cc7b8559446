"""A pytest plugin that writes down, for `mutants.py`, which tests failed, and which had begun when pytest was ended.

It says nothing to the tests, and changes nothing about them. Under pytest-xdist the controller writes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


class _Report:
    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, kind: str, nodeid: str, error: str = "") -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "test": nodeid, "error": error}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._write("begun", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test is over, and what it had set up is gone."""
        self._write("ended", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test is over."""
        if report.failed:
            self._write("failed", report.nodeid, _last_line(report))
        elif report.when == "call":
            self._write("passed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was collected, or cannot be."""
        if report.failed:
            self._write("uncollected", report.nodeid, _last_line(report))


def _last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(getattr(crash, "message", report.longrepr))
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:300] if lines else ""


def pytest_configure(config: pytest.Config) -> None:
    """Begin to write, but in the processes that are not told where, or that a controller speaks for."""
    path = os.environ.get("PERDURE_MUTANT_REPORT")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report(Path(path)), "mutant-report")
