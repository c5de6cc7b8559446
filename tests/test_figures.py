"""The figures of docs/explanation/how-we-test.md are those of a command, in its form, and name what there is."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import figures as counting
import pytest
from mutants import HUNG, MUTANTS

ROOT = Path(__file__).resolve().parents[1]


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures_tool", ROOT / "tools" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool: Any = _tool()


def sample(**changes: Any) -> dict[str, Any]:
    control = {"passed": 6000, "failed": "", "whole_suite": True, "seconds": 1.0}
    caught = {
        "status": "caught",
        "caught_by": "tests/workflow/test_race.py::test_a_b[memory]",
        "error": "",
        "place": "scenarios",
        "seconds": 1.0,
    }
    mutants = [{"name": each.name, "bug": each.bug, "breaks": each.breaks, **caught} for each in MUTANTS]
    return {
        "incarnations": {
            "python": "3.11.7",
            "incarnations": 12345,
            "killed_before_new_history": 1,
            "killed_between_writes": 2,
            "write_points": 678,
            "histogram": {
                "step": {"before": 1, "after": 2, "again": 3},
                "join|race": {"before": 9, "after": 9, "again": 9},
            },
        },
        "explored": {"python": "3.11.7", "figures": dict.fromkeys(counting.FIGURES, 7)},
        "mutants": {"known": len(mutants), "control": control, "mutants": mutants} | changes,
    }


def shown() -> str:
    """What stands between the marks of the page."""
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page.count(tool.BEGIN) == page.count(tool.END) == 1
    return page.partition(tool.BEGIN)[2].partition(tool.END)[0]


def form(text: str) -> list[str]:
    """The lines without their figures, and without the rows whose number is not known beforehand."""
    lines = [re.sub(r"\d[\d,.]*", "N", line) for line in text.strip().splitlines()]
    return [line for line in lines if not re.match(r"\| [a-z_|\\ ]+ (\| N ){3}\|", line)]


def test_the_page_has_the_form_that_the_command_writes() -> None:
    def without_tests(text: str) -> list[str]:
        text = re.sub(r"\| (`[^`]*`: [^|]*|nothing yet) \|$", "| T |", text, flags=re.MULTILINE)
        return form(re.sub(r"(?s)caught;.*?\. The", "caught; C. The", text))

    page = shown()
    present = {kind: figures for kind, figures in sample().items() if tool.NOTHING[kind][0] not in page}
    assert "mutants" in present
    assert without_tests(page) == without_tests(tool.render(present))


def test_every_mutant_of_the_page_was_caught_by_a_test_that_there_is() -> None:
    rows = re.findall(
        r"^\| `([a-z-]+)` \| .* \| (?:`(\S+)`: (.*?)(?: \(did not end\))?|nothing yet) \|$", shown(), re.MULTILINE
    )
    assert [name for name, _, _ in rows] == [mutant.name for mutant in MUTANTS]
    missing = [
        name
        for name, file, words in rows
        if file and f"def test_{words.replace(' ', '_')}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_figures_replace_those_that_were_there_and_nothing_else() -> None:
    page = f"before\n{tool.BEGIN}\nof a former run\n{tool.END}\nafter\n"
    once = tool.replaced(page, tool.render(sample()))
    assert once.startswith(f"before\n{tool.BEGIN}\n")
    assert once.endswith(f"{tool.END}\nafter\n")
    assert "of a former run" not in once
    assert tool.replaced(once, tool.render(sample())) == once
    with pytest.raises(tool.MissingFiguresError, match="has no marks"):
        tool.replaced("a page", "")


def test_a_figure_shows_as_it_was_counted() -> None:
    text = tool.render(sample())
    assert "| simulated processes killed at a write, after they had made new history | 12,345 |" in text
    assert "| step | 1 | 2 | 3 |" in text
    assert "| join\\|race | 9 | 9 | 9 |" in text
    assert f"{len(MUTANTS)} of {len(MUTANTS)} mutants were caught; without one, 6,000 tests passed." in text


def test_the_page_says_how_many_were_not_looked_for_as_the_command_does_it() -> None:
    figures = sample()
    assert "a person named" not in tool.render(figures)
    for mutant in figures["mutants"]["mutants"][:3]:
        mutant["place"] = "given"
    assert "; 3 were looked for only in tests that a person named (`--tests`)." in tool.render(figures)


def test_a_mutant_that_made_a_test_hang_is_told_from_one_that_made_it_fail() -> None:
    figures = sample()
    hung, failed = figures["mutants"]["mutants"][:2]
    hung["error"] = HUNG
    rows = {line.split("`")[1]: line for line in tool.render(figures).splitlines() if line.startswith("| `")}
    assert rows[hung["name"]].endswith("| `workflow/test_race.py`: a b (did not end) |")
    assert rows[failed["name"]].endswith("| `workflow/test_race.py`: a b |")


def test_figures_that_are_missing_or_of_a_part_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(tool.MissingFiguresError, match=r"build/incarnations\.json is not there; run `make test`"):
        tool.read(tmp_path)
    part = sample(control=None)
    for kind, (name, _) in tool.SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(part[kind]), encoding="utf-8")
    with pytest.raises(tool.MissingFiguresError, match="of a part"):
        tool.read(tmp_path)
    assert tool.UNCONTROLLED in tool.render(tool.read(tmp_path, partial=True))


def test_part_of_the_figures_says_what_is_missing(tmp_path: Path) -> None:
    text = tool.render(tool.read(tmp_path, partial=True))
    assert text.splitlines()[::2] == [tool.NOTHING[kind][0] for kind in tool.SOURCES]


def test_what_tests_explored_is_counted_over_all_processes(tmp_path: Path) -> None:
    """S39: a schedule counts once, however many choices it takes, and only where there was one."""
    (tmp_path / "test_some.py").write_text(
        "import figures, pytest, trio\n"
        "from perdure.testing import seeded_scheduling\n"
        "async def tasks():\n"
        "    async with trio.open_nursery() as nursery:\n"
        "        for _ in range(3):\n"
        "            nursery.start_soon(trio.sleep, 0)\n"
        "@pytest.mark.parametrize('number', range(4))\n"
        "def test_one(number):\n"
        "    figures.count('power cuts', number)\n"
        "    with seeded_scheduling(number):\n"
        "        trio.run(tasks)\n"
        "    with seeded_scheduling(number):\n"
        "        pass\n",
        encoding="utf-8",
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests' / 'support'}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-p", "figures"]
    done = subprocess.run(
        [*command, "--figures-file=out/figures.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "figures.json").read_text(encoding="utf-8"))["figures"]
    assert list(found) == list(counting.FIGURES)
    assert (found["schedules"], found["power cuts"], found["fuzzed inputs"]) == (4, 6, 0)
    assert found["choices of the scheduler"] >= 4
