"""`import perdure.testing` loads nothing that is not used, and nothing of it is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import perdure.testing


def loaded_by(statement: str) -> set[str]:
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", script]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_every_exported_name_is_there() -> None:
    assert [name for name in perdure.testing.__all__ if getattr(perdure.testing, name, None) is None] == []
    assert set(perdure.testing.__all__) <= set(dir(perdure.testing))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        perdure.testing.nothing  # noqa: B018


def test_the_package_alone_loads_no_engine_and_no_tool() -> None:
    """pytest loads the plugin of this package in every project of the environment."""
    loaded = loaded_by("import perdure.testing")
    assert [name for name in loaded if name.startswith(("trio", "perdure.actors", "hypothesis", "_pytest"))] == []


def test_using_it_loads_no_tool() -> None:
    """(`trio.testing` loads pytest where it is installed.)"""
    loaded = loaded_by("from perdure.testing import Simulation, FaultyDriver")
    assert "perdure.actors" in loaded
    assert "hypothesis" not in loaded
