"""The scenario table: it sees every test's cell, and a gap, a skip or an expected failure makes a run red."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLAN = """
current = 2
modes = ["yield", "live"]
drivers = ["memory", "sqlite"]
[scenario]
S1 = { needs = "mode x driver", since = 2, title = "one" }
S2 = { needs = "driver", since = 2, title = "two" }
S3 = { needs = "once", since = 2, title = "three" }
S4 = { needs = "mode", since = 3, title = "four" }
"""

COMPLETE = '''
import pytest

@pytest.fixture(params=["memory", "sqlite"])
def driver_kind(request):
    return request.param

@pytest.mark.parametrize("mode", ["yield", "live"])
def test_one(mode, driver_kind):
    """S1, and S3 by the way."""

class DriverSuite:
    def test_two(self):
        assert self.driver_kind

class TestMemory(DriverSuite):
    """S2."""
    driver_kind = "memory"

class TestSqlite(DriverSuite):
    """S2."""
    driver_kind = "sqlite"
'''

SKIPS = """
import pytest

@pytest.mark.skip
def test_a(): ...

@pytest.mark.skipif(False, reason="no")
def test_b(): ...

@pytest.mark.xfail
def test_c(): ...

@pytest.mark.parametrize("x", [])
def test_d(x): ...

def test_e():
    pytest.skip("no")

def test_f():
    pytest.xfail("no")
"""

SKIP_PROBLEMS = [
    "test_sample.py::test_a is marked skip",
    "test_sample.py::test_b is marked skipif",
    "test_sample.py::test_c is an expected failure",
    "test_sample.py::test_c is marked xfail",
    "test_sample.py::test_d* is marked skip",
    "test_sample.py::test_e was skipped",
    "test_sample.py::test_f is an expected failure",
    "test_whole.py is skipped as a whole",
]

# Under pytest-xdist the tests are in other processes than the verdict; both ways must see the same.
WORKERS = [pytest.param([], id="one-process"), pytest.param(["-n", "1"], id="xdist")]

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest on a test module with the plan above; in this process where that can be, for speed."""
    spec = importlib.util.find_spec("scenario_table")
    assert spec is not None
    assert spec.origin is not None
    monkeypatch.setenv("PYTHONPATH", str(Path(spec.origin).parent))
    pytester.mkdir("tests").joinpath("scenarios.toml").write_text(PLAN, encoding="utf-8")

    def run_pytest(source: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(test_sample=source)
        start = pytester.runpytest_subprocess if "-n" in args else pytester.runpytest_inprocess
        return start("-p", "scenario_table", "-p", "no:cacheprovider", *args)

    return run_pytest


@pytest.mark.parametrize("workers", WORKERS)
def test_complete_table_is_green_and_written(run: Run, pytester: pytest.Pytester, workers: list[str]) -> None:
    result = run(COMPLETE, "--scenario-check", "--scenario-table=out/table.md", *workers)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["3 scenarios due, 0 with gaps, 0 other problems"])
    rows = (pytester.path / "out" / "table.md").read_text(encoding="utf-8").splitlines()
    assert "| S1 | one | 2 | mode x driver | 1 | 1 |  | 1 | 1 |  |  |  |  |" in rows
    assert "| S2 | two | 2 | driver |  |  |  |  |  |  | 1 | 1 |  |" in rows
    assert "| S3 | three | 2 | once | 1 | 1 |  | 1 | 1 |  |  |  | 4 |" in rows
    assert "| S4 | four | 3 | mode |  |  | later |  |  | later |  |  |  |" in rows
    assert "| S1 | `test_sample.py` (4) |" in rows
    assert "| S2 | `test_sample.py` (2) |" in rows
    assert "| S4 |  |" in rows


@pytest.mark.parametrize("workers", WORKERS)
def test_missing_cell_is_red_and_named(run: Run, workers: list[str]) -> None:
    result = run(COMPLETE.replace('"yield", "live"', '"yield"'), "--scenario-check", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["S1 (one) has no test: live/memory, live/sqlite"])


def test_collecting_alone_finds_gaps(run: Run) -> None:
    result = run("def test_nothing(): ...", "--collect-only", "-qq", "--scenario-check")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["S2 (two) has no test: memory, sqlite", "S3 (three) has no test: any"])
    assert "S4" not in result.stdout.str()


def test_gaps_do_not_matter_unless_asked_for(run: Run) -> None:
    assert run("def test_nothing(): ...", "--forbid-skips").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("option", ["--scenario-check", "--forbid-skips"])
def test_every_kind_of_skip_is_red(run: Run, pytester: pytest.Pytester, option: str, workers: list[str]) -> None:
    # Of the cells nothing is missing, so that only the skips can be what makes it red.
    pytester.makepyfile(test_complete=COMPLETE)
    pytester.makepyfile(test_whole="import pytest\npytest.skip('no', allow_module_level=True)")
    result = run(SKIPS, option, *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(SKIP_PROBLEMS)


@pytest.mark.parametrize(
    "source",
    [
        "def test_e(): pytest.skip('no')",
        "def test_f(): pytest.xfail('no')",
        "pytest.skip('no', allow_module_level=True)",
    ],
)
def test_one_skip_at_run_time_is_enough(run: Run, source: str) -> None:
    assert run(f"import pytest\n{source}", "--forbid-skips").ret == pytest.ExitCode.TESTS_FAILED


def test_unknown_scenario_is_red(run: Run) -> None:
    result = run(f'{COMPLETE}\ndef test_x():\n    """S77."""', "--scenario-check")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*::test_x cites S77, which is not in the list of scenarios"])


def test_marker_claims_several_cells(run: Run, pytester: pytest.Pytester) -> None:
    source = '''
import pytest

@pytest.mark.scenario_cell(mode=("yield", "live"), driver_kind="sqlite")
def test_both():
    """S1."""
'''
    run(source, "--strict-markers", "--scenario-table=table.md")
    table = (pytester.path / "table.md").read_text(encoding="utf-8")
    assert "| S1 | one | 2 | mode x driver | **gap** | 1 |  | **gap** | 1 |" in table


def test_parameter_that_is_not_a_name_is_known_by_its_id(run: Run, pytester: pytest.Pytester) -> None:
    source = '''
import pytest

@pytest.mark.parametrize("driver_kind", [pytest.param(dict, id="memory"), pytest.param(list, id="sqlite")])
def test_two(driver_kind):
    """S2."""
'''
    run(source, "--scenario-table=table.md")
    table = (pytester.path / "table.md").read_text(encoding="utf-8")
    assert "| S2 | two | 2 | driver |  |  |  |  |  |  | 1 | 1 |  |" in table


def test_our_own_list_is_whole(request: pytest.FixtureRequest) -> None:
    path = request.config.rootpath / "tests" / "scenarios.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert list(table["scenario"]) == [f"S{number}" for number in range(1, 53)]
    assert all(2 <= row["since"] <= 5 and row["title"] for row in table["scenario"].values())


def test_every_scenario_of_parts_a_to_c_is_played_with_a_death_at_every_write(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root, table = request.config.rootpath, tmp_path / "table.md"
    files = sorted(str(path) for path in (root / "tests" / "conformance").glob("test_restarts_*.py"))
    collect = ["--collect-only", "-qq", "-p", "no:cacheprovider", f"--scenario-table={table}"]
    subprocess.run([sys.executable, "-m", "pytest", *collect, *files], cwd=root, check=True, capture_output=True)
    rows = [line.strip("| ").split(" | ") for line in table.read_text(encoding="utf-8").splitlines()]
    played = {
        row[0]: [row[column] for column in (4, 5, 7, 8)] for row in rows if len(row) > 8 and row[3] == "mode x driver"
    }
    for number in (*range(1, 38), 39):
        assert all(cell.isdigit() for cell in played[f"S{number}"]), f"S{number}: {played[f'S{number}']}"
