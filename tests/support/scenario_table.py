"""A pytest plugin: which test holds which scenario, in which run mode and on which driver, and whether one is missing.

`tests/scenarios.toml` lists the scenarios. A test cites those it holds in its docstring, as `S14`; one without a
citation takes those of its class. The cell that it fills comes from its parameters `mode` and `driver_kind`, else from
the marker `scenario_cell(mode=..., driver_kind=...)` (a tuple when one test covers several), else from class attributes
of the same names; a test that has neither fills no cell of a run mode or a driver, only "once".

1. The table is made from collected tests, so it cannot claim a test that does not exist. A hand-kept table did rot.
2. A skip or an expected failure does not hold a scenario: `--forbid-skips` and `--scenario-check` make it red, by its
   mark when tests are collected and by its outcome when they run.
3. Only scenarios with `since` at most `current` must be complete; the others are shown and may be empty.
4. Under pytest-xdist the workers hold the tests and the controller the verdict: workers send plain lists, and only
   the controller judges. A report of a module skipped as a whole stays in its worker, so it is sent along as well.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast, get_args

import pytest

Needs = Literal["mode x driver", "driver", "mode", "once"]
Cell = tuple[str | None, str | None]
"""Run mode and driver kind; `None` where a test does not speak of one."""
Claim = tuple[int, str | None, str | None]
"""Scenario, run mode and driver kind."""
Holding = tuple[int, str]
"""Scenario and the test file that holds it, relative to the root directory."""

CITATION = re.compile(r"\bS(\d{1,2})\b")
FORBIDDEN_MARKS = ("skip", "skipif", "xfail")
OUTPUT_KEY = "scenario_table"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One line of scenarios.toml.

    Attributes:
        number: 14 for S14.
        title: What it is about, in one line.
        needs: Over what it must be tested.
        since: Number of the issue from which on it must hold.
    """

    number: int
    title: str
    needs: Needs
    since: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All of scenarios.toml: what must be held, over which modes and drivers, and how far we are."""

    current: int
    modes: tuple[str, ...]
    drivers: tuple[str, ...]
    scenarios: dict[int, Scenario]

    def required(self, scenario: Scenario) -> list[Cell]:
        """The cells that each need at least one test."""
        modes: Sequence[str | None] = self.modes if "mode" in scenario.needs else (None,)
        drivers: Sequence[str | None] = self.drivers if "driver" in scenario.needs else (None,)
        return list(product(modes, drivers))

    @property
    def columns(self) -> list[Cell]:
        """Every cell that some scenario could need: a mode and a driver, one of them, neither."""
        return list(product((*self.modes, None), (*self.drivers, None)))


@dataclass(slots=True)
class Collected:
    """What a collection found: one entry per test and scenario, which files they are in, and what is wrong with some tests."""

    claims: Counter[Claim] = field(default_factory=Counter[Claim])
    files: Counter[Holding] = field(default_factory=Counter[Holding])
    problems: list[str] = field(default_factory=list[str])

    def pack(self) -> list[Any]:
        """As lists of plain values, which is what pytest-xdist can send."""
        claims = [[*claim, count] for claim, count in self.claims.items()]
        files = [[*holding, count] for holding, count in self.files.items()]
        return [claims, files, self.problems]

    @classmethod
    def unpack(cls, packed: list[Any]) -> Collected:
        """The opposite of `pack`."""
        claims, files, problems = packed
        return cls(
            Counter({tuple(claim): count for *claim, count in claims}),
            Counter({tuple(holding): count for *holding, count in files}),
            list(problems),
        )

    def count(self, scenario: Scenario, cell: Cell) -> int:
        """How many tests of `scenario` fill `cell`. A `None` in the cell is filled by anything."""
        mode, driver = cell
        return sum(
            count
            for (number, claimed_mode, claimed_driver), count in self.claims.items()
            if number == scenario.number and mode in (None, claimed_mode) and driver in (None, claimed_driver)
        )


def read_plan(path: Path) -> Plan:
    """Read scenarios.toml.

    Raises:
        pytest.UsageError: A field is missing or not what it must be.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    scenarios: dict[int, Scenario] = {}
    try:
        for name, row in table["scenario"].items():
            match = CITATION.fullmatch(name)
            if match is None or row["needs"] not in get_args(Needs):
                raise pytest.UsageError(
                    f"{path}: scenario {name!r} must be named like S14 and need one of {get_args(Needs)}"
                )
            number = int(match[1])
            scenarios[number] = Scenario(number, str(row["title"]), row["needs"], int(row["since"]))
        return Plan(int(table["current"]), tuple(table["modes"]), tuple(table["drivers"]), scenarios)
    except KeyError as error:
        raise pytest.UsageError(f"{path}: {error} is missing") from error


def cited(item: pytest.Item) -> list[int]:
    """Numbers of the scenarios that a test says it holds, each once."""
    for owner in (getattr(item, "obj", None), getattr(item, "cls", None)):
        numbers = CITATION.findall(getattr(owner, "__doc__", None) or "")
        if numbers:
            return sorted({int(number) for number in numbers})
    return []


def axis_values(item: pytest.Item, name: str, known: Sequence[str]) -> Sequence[str | None]:
    """What a test says of one axis: its values, or `(None,)`. A value that the plan does not know says nothing."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and name in callspec.params:
        value = callspec.params[name]
        if value in known:
            return (value,)
        # A parameter may be a factory or a class; then the id that the test gave it is the name.
        return tuple(part for part in callspec.id.split("-") if part in known) or (None,)
    for mark in item.iter_markers("scenario_cell"):
        if name in mark.kwargs:
            value = mark.kwargs[name]
            return (value,) if isinstance(value, str) else tuple(value)
    value = getattr(getattr(item, "cls", None), name, None)
    return (value,) if isinstance(value, str) and value in known else (None,)


def collect(items: Iterable[pytest.Item], plan: Plan) -> Collected:
    """Find what each test claims, and what no test may have."""
    collected = Collected()
    for item in items:
        for mark in item.iter_markers():
            if mark.name in FORBIDDEN_MARKS:
                collected.problems.append(f"{item.nodeid} is marked {mark.name}")
        for number in cited(item):
            collected.files[number, item.nodeid.partition("::")[0]] += 1
            if number not in plan.scenarios:
                collected.problems.append(f"{item.nodeid} cites S{number}, which is not in the list of scenarios")
            modes = axis_values(item, "mode", plan.modes)
            drivers = axis_values(item, "driver_kind", plan.drivers)
            for mode, driver in product(modes, drivers):
                collected.claims[number, mode, driver] += 1
    return collected


def cell_name(cell: Cell) -> str:
    """How a cell is called in reports."""
    return "/".join(part for part in cell if part is not None) or "any"


def find_gaps(plan: Plan, collected: Collected) -> list[str]:
    """One line for each scenario that is due and lacks a test in a cell it needs."""
    gaps: list[str] = []
    for scenario in plan.scenarios.values():
        if scenario.since <= plan.current:
            empty = [cell_name(cell) for cell in plan.required(scenario) if not collected.count(scenario, cell)]
            if empty:
                gaps.append(f"S{scenario.number} ({scenario.title}) has no test: {', '.join(empty)}")
    return gaps


def render(plan: Plan, collected: Collected) -> str:
    """The table in Markdown. A needed cell without a test reads "gap" when it is due, "later" when it is not."""

    def show(scenario: Scenario, cell: Cell) -> str:
        count = collected.claims[scenario.number, *cell]
        if cell in plan.required(scenario):
            count = collected.count(scenario, cell)
            if not count:
                return "**gap**" if scenario.since <= plan.current else "later"
        return str(count or "")

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |\n"

    def lines() -> Iterator[str]:
        yield "# Which tests hold which scenario\n\n"
        yield f"Made from the collected tests; scenarios of issues up to {plan.current} are due.\n\n"
        yield line(["scenario", "title", "issue", "needs", *(cell_name(cell) for cell in plan.columns)])
        yield line(["---"] * (4 + len(plan.columns)))
        for scenario in plan.scenarios.values():
            cells = (show(scenario, cell) for cell in plan.columns)
            yield line([f"S{scenario.number}", scenario.title, str(scenario.since), scenario.needs, *cells])
        yield "\n# In which files these tests are\n\n"
        yield line(["scenario", "files, with their number of tests"])
        yield line(["---", "---"])
        for scenario in plan.scenarios.values():
            files = sorted(
                (file, count) for (number, file), count in collected.files.items() if number == scenario.number
            )
            yield line([f"S{scenario.number}", ", ".join(f"`{file}` ({count})" for file, count in files)])

    return "".join(lines())


class ScenarioTable:
    """One session of the plugin; see the module's docstring for who judges under pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.plan = read_plan(config.rootpath / str(config.getini("scenario_file")))
        self.collected: Collected | None = None
        self.problems: set[str] = set()
        self.gaps: list[str] = []

    @property
    def output(self) -> dict[str, Any] | None:
        """Where an xdist worker leaves what the controller is to have; `None` in any other process."""
        return cast("dict[str, Any] | None", getattr(self.config, "workeroutput", None))

    def take(self, collected: Collected) -> None:
        """Keep one collection (all workers collect the same tests) and every problem."""
        if self.collected is None:
            self.collected = collected
        self.problems.update(collected.problems)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module, a class or a file that skips itself."""
        if report.skipped:
            self.problems.add(f"{report.nodeid} is skipped as a whole")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Look at the tests, in the process that has them."""
        self.take(collect(session.items, self.plan))
        if self.output is not None and self.collected is not None:
            self.output[OUTPUT_KEY] = Collected(
                self.collected.claims, self.collected.files, sorted(self.problems)
            ).pack()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a finished xdist worker found."""
        packed = getattr(node, "workeroutput", {}).get(OUTPUT_KEY)
        if packed is not None:
            self.take(Collected.unpack(packed))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that skips itself while running, or fails (or passes) as expected."""
        if hasattr(report, "wasxfail"):
            self.problems.add(f"{report.nodeid} is an expected failure")
        elif report.skipped:
            self.problems.add(f"{report.nodeid} was skipped")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the table; turn a green session red when something is missing or skipped."""
        if self.output is not None:
            return
        collected = self.collected or Collected()
        option = self.config.option
        if option.scenario_table is not None:
            path = self.config.invocation_params.dir / option.scenario_table
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(self.plan, collected), encoding="utf-8")
        if option.scenario_check:
            self.gaps = find_gaps(self.plan, collected)
        judged = option.scenario_check or option.forbid_skips
        green = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if judged and green and (self.gaps or self.problems):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was found."""
        option = self.config.option
        if option.scenario_table is not None:
            terminalreporter.write_line(f"wrote {option.scenario_table}")
        if not (option.scenario_check or option.forbid_skips):
            return
        problems = sorted(self.problems)
        if self.gaps or problems:
            terminalreporter.section("scenarios", red=True)
            for text in [*self.gaps, *problems]:
                terminalreporter.write_line(text)
        if option.scenario_check:
            due = sum(scenario.since <= self.plan.current for scenario in self.plan.scenarios.values())
            terminalreporter.write_line(
                f"{due} scenarios due, {len(self.gaps)} with gaps, {len(problems)} other problems"
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the plugin's options."""
    group = parser.getgroup("scenarios")
    group.addoption("--scenario-table", metavar="PATH", help="write the table scenario x mode x driver, in Markdown")
    group.addoption("--scenario-check", action="store_true", help="fail on scenarios without a test, skips and xfails")
    group.addoption("--forbid-skips", action="store_true", help="fail on skips and xfails")
    parser.addini(
        "scenario_file", "the list of scenarios, relative to the root directory", default="tests/scenarios.toml"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start a session of the plugin when one of its options asks for it."""
    config.addinivalue_line(
        "markers",
        "scenario_cell(mode=..., driver_kind=...): which cells of the scenario table a test fills (a name or a tuple)",
    )
    option = config.option
    if option.scenario_table is not None or option.scenario_check or option.forbid_skips:
        config.pluginmanager.register(ScenarioTable(config), "scenario-table")
