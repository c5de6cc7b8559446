"""The README's example runs as printed, is as short as it claims, and does nothing twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
LINES_MAX = 25


def examples() -> list[str]:
    """The Python blocks, as they are printed."""
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_example(directory: Path, number: int = 0) -> list[str]:
    program = directory / "example.py"
    program.write_text(examples()[number], encoding="utf-8")
    command = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_example_is_as_short_as_its_heading_says() -> None:
    assert len(examples()[0].splitlines()) <= LINES_MAX
    assert "## Twenty-five lines" in README.read_text(encoding="utf-8")


def test_the_example_runs_as_printed_and_charges_once(tmp_path: Path) -> None:
    first = run_example(tmp_path)
    assert re.fullmatch(r"charging 1999 under key [0-9a-f-]{36}", first[0])
    assert first[1:] == ["pay-1, shipped as TRACK-456"]
    assert run_example(tmp_path) == ["pay-1, shipped as TRACK-456"]


def test_the_block_that_looks_into_a_workflow_runs_alone(tmp_path: Path) -> None:
    run_example(tmp_path)
    shown = run_example(tmp_path, 1)
    assert shown[0] == "WorkflowState.COMPLETED 1999 pay-1, shipped as TRACK-456"
    assert len(shown) > 1


def test_what_it_is_for_takes_five_lines() -> None:
    paragraphs = README.read_text(encoding="utf-8").split("\n\n")
    assert paragraphs[0] == "# Perdure"
    assert len(paragraphs[1].splitlines()) <= 5
