"""`make mutants`: plants known bugs one at a time, runs the ordinary suite, and says which test caught each.

1. The suite is the one that `make test` runs, unchanged: no test is written for a mutant, and none is told of it.
2. All mutants are looked for in the same way: in the tests that are named after the changed module, then in those that cite a
   scenario which it breaks, then in the rest of the suite, up to the first test that fails. So what one part of the suite does
   not see another may, and a mutant survives only if nothing does.
3. The same tests pass without a mutant, run by the same means: the whole suite at the end of a complete run (`--control`), of
   a partial one the tests that caught something.
4. A mutant that cannot be planted is an error before anything runs. One under which a test file cannot even be imported
   counts as not caught: a bug that nobody could commit proves nothing.
5. A test that hangs has caught its mutant as well as one that fails; it is ended after `HANG_S`, and the page tells them apart.
6. Whoever else ends pytest (the kernel, a person, the end of `PLACE_S`) says nothing of the mutant: it counts as not caught.

The results go to build/mutants.json, in which those of other mutants stay.

Usage: python tests/mutants/mutants.py [--list] [--control] [--place PLACE | --tests PATH ...] [--jobs N] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from mutant import ROOT, Mutant, StaleMutantError
from mutants_engine import ENGINE_MUTANTS
from mutants_host import HOST_MUTANTS
from mutants_primitives import PRIMITIVE_MUTANTS
from mutants_storage import STORAGE_MUTANTS

__all__ = ["MUTANTS", "Result", "main", "places", "verdict"]

MUTANTS: Final = (*ENGINE_MUTANTS, *PRIMITIVE_MUTANTS, *HOST_MUTANTS, *STORAGE_MUTANTS)
"""All of them; their names are unique."""

HANG_S: Final = 240
"""After how many seconds a test that does not end is ended, and counts as one that failed."""

PLACE_S: Final = 3600
"""How long one place is looked at, in seconds."""

HUNG: Final = "it did not end"
"""The error of a test that was ended after `HANG_S`; tools/figures.py knows it."""

_EXIT_CODES: Final = frozenset((pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))
"""How pytest ends once its tests have been run; faulthandler's end of a test that hangs has the second, too."""

_NO_TEST: Final = frozenset((pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED))
"""How it ends where there is nothing to run: what it was given is wrong."""

_TIMEOUT: Final = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
"""What faulthandler writes before it ends a process."""

RESULTS: Final = ROOT / "build" / "mutants.json"
_PLANTED: Final = ROOT / "tests" / "mutants" / "planted"

GIVEN: Final = "given"
"""The place that a person has named (`--tests`), for a quick look."""

PLACES: Final = ("namesakes", "scenarios", "rest")
"""Where mutants are looked for, in this order."""

_ELSEWHERE: Final = {"reference", "faults", "mutants"}
"""Folders of tests that are no part of the suite that is run: commands of their own, and tests of this machinery itself."""

_ROOMS: Final = ("workflow", "conformance", "crash", "actors", "storage")
"""In which order other rooms than that of the changed layer are looked at; what is not named here is slow, and comes last."""

Status = Literal["caught", "survived", "unusable"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one mutant.

    Attributes:
        name: The mutant.
        bug: What it is.
        breaks: The scenarios that it breaks.
        status: Whether a test caught it; `unusable` if tests could not be imported, or pytest was ended by something else
            than its tests.
        caught_by: The first test that failed or did not end, as pytest names it, or `""`.
        error: How it failed; `HUNG` if it did not end; why it is `unusable`.
        place: Where the test was found: `namesakes`, `scenarios` or `rest`; `given` if a person said where to look.
        seconds: How long the search took.
    """

    name: str
    bug: str
    breaks: str
    status: Status
    caught_by: str
    error: str
    place: str
    seconds: float


def places(mutant: Mutant) -> Iterator[tuple[str, list[str]]]:
    """Where the mutant is looked for, one after the other: a name, and what pytest is given."""
    stems = [module.rpartition(".")[2] for module in mutant.modules]
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _room(path) not in _ELSEWHERE]
    namesakes = [path for path in files if any(_is_namesake(path.stem, stem) for stem in stems)]
    scenarios = mutant.breaks.split()
    cited = {path: _first_cited(path, scenarios) for path in files if path not in namesakes}
    layer = mutant.modules[0].split(".")[1]

    def order(path: Path) -> tuple[int, int, Path]:
        rooms = (layer, *_ROOMS)
        room = _room(path)
        return rooms.index(room) if room in rooms else len(rooms), cited[path], path

    citing = sorted((path for path in cited if cited[path] < len(scenarios)), key=order)
    for name, found in zip(PLACES, (namesakes, citing), strict=False):
        if found:
            yield name, [str(path.relative_to(ROOT)) for path in found]
    yield PLACES[-1], [f"--ignore={path.relative_to(ROOT)}" for path in (*namesakes, *citing)]


def _room(path: Path) -> str:
    return path.relative_to(ROOT / "tests").parts[0]


def _is_namesake(test: str, module: str) -> bool:
    """Whether a test file is named after a module, one of its parts, or that of which it is a part (`sqlite_file`, `sqlite`)."""
    name = test.removeprefix("test_")
    return name == module or name.startswith(f"{module}_") or module.startswith(f"{name}_")


def _first_cited(path: Path, scenarios: Sequence[str]) -> int:
    """The first of these scenarios that a test file cites, by its index; their number if it cites none."""
    found = {*re.findall(r"\bS\d+\b", path.read_text(encoding="utf-8"))}
    return next((index for index, scenario in enumerate(scenarios) if scenario in found), len(scenarios))


def run_pytest(arguments: Sequence[str], mutant: Mutant | None, workers: int = 1) -> list[dict[str, str]]:
    """Run tests up to the first failure, with a mutant planted in every process, or none.

    Returns:
        What `mutant_report` wrote; and at the end a line of the kind `hung` if faulthandler ended a test, or `broken` if
        something else ended pytest.

    Raises:
        RuntimeError: pytest had no test to run.
    """
    with tempfile.TemporaryDirectory(prefix="perdure-mutant-") as directory:
        report = Path(directory) / "report"
        report.touch()
        environment = {name: value for name, value in os.environ.items() if name != "PERDURE_MUTANT"}
        environment |= {
            "PYTHONPATH": str(_PLANTED),
            "PERDURE_MUTANT_REPORT": str(report),
            # Examples that failed because of a mutant are not to be tried first in every later run.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(directory) / "hypothesis"),
        }
        if mutant is not None:
            environment["PERDURE_MUTANT"] = mutant.order()
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "mutant_report"),
            *("-o", f"faulthandler_timeout={HANG_S}", "-o", "faulthandler_exit_on_timeout=true"),
            f"--basetemp={directory}/tests",
            *("--ignore", "tests/mutants"),  # they test this machinery, and so may see any mutant
            *(("-n", str(workers)) if workers > 1 else ()),
            *arguments,
        ]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PLACE_S, check=False
            )
            code, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, output = None, ""
        lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    if not lines and (code in _EXIT_CODES or code in _NO_TEST):
        raise RuntimeError(f"no test ran:\n{output[-2000:]}")
    return [*lines, *end_of(code, output)]


def end_of(code: int | None, output: str) -> list[dict[str, str]]:
    """What is to be said of how pytest ended: nothing, if that is the end of its tests.

    Args:
        code: Its exit code; `None` if it was ended after `PLACE_S`.
        output: All that it wrote.
    """
    if code is None:
        return [{"kind": "broken", "test": "", "error": f"pytest was ended after {PLACE_S} seconds"}]
    if code == pytest.ExitCode.TESTS_FAILED and _TIMEOUT.search(output):
        return [{"kind": "hung", "test": "", "error": HUNG}]
    if code in _EXIT_CODES:
        return []
    said = output.strip().splitlines()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return [{"kind": "broken", "test": "", "error": f"pytest {how}: {said[-1][:200] if said else 'it said nothing'}"}]


def verdict(lines: Sequence[dict[str, str]]) -> tuple[Status, str, str]:
    """What a report says: whether the mutant was caught, by which test, and how that failed."""
    for line in lines:
        if line["kind"] == "uncollected":
            return "unusable", line["test"], line["error"]
    for line in lines:
        if line["kind"] == "failed":
            return "caught", line["test"], line["error"]
    ended = {line["test"] for line in lines if line["kind"] == "ended"}
    under_way = next((line["test"] for line in lines if line["kind"] == "begun" and line["test"] not in ended), "")
    for line in lines:
        if line["kind"] == "hung":
            return ("caught" if under_way else "unusable"), under_way, line["error"]
        if line["kind"] == "broken":
            return "unusable", under_way, line["error"]
    if under_way:
        return "unusable", under_way, "pytest ended within this test, as if all was well"
    return "survived", "", ""


def look_for(mutant: Mutant, place: str, arguments: Sequence[str]) -> Result:
    """Plant a mutant and look for a test that fails, in one place."""
    began = time.monotonic()
    status, caught_by, error = verdict(run_pytest(arguments, mutant))
    seconds = round(time.monotonic() - began, 1)
    return Result(mutant.name, mutant.bug, mutant.breaks, status, caught_by, error, place, seconds)


def look_for_all(
    mutants: Sequence[Mutant], jobs: int, only: str | None = None, tests: dict[str, list[str]] | None = None
) -> Iterator[Result]:
    """Look for each in one place after the other; the quick places of all come first. The last result of each counts."""
    spent = {mutant.name: 0.0 for mutant in mutants}
    for place in PLACES if only is None else (only,):
        searched = [(mutant, tests or dict(places(mutant))) for mutant in mutants if mutant.name in spent]
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            searches = [
                pool.submit(look_for, mutant, place, found[place]) for mutant, found in searched if place in found
            ]
            for search in as_completed(searches):
                result = search.result()
                seconds = round(spent[result.name] + result.seconds, 1)
                yield replace(result, seconds=seconds)
                if result.status == "survived":
                    spent[result.name] = seconds
                else:
                    del spent[result.name]


def run_control(arguments: Sequence[str], workers: int) -> dict[str, Any]:
    """Run tests without a mutant, by the same means; they are to pass."""
    began = time.monotonic()
    lines = run_pytest(arguments, None, workers)
    status, test, error = verdict(lines)
    return {
        "passed": sum(line["kind"] == "passed" for line in lines),
        "failed": "" if status == "survived" else f"{test}: {error}",
        "whole_suite": not arguments,
        "seconds": round(time.monotonic() - began, 1),
    }


def store(results: Sequence[Result], control: dict[str, Any] | None) -> dict[str, Any]:
    """Write results into build/mutants.json, beside those of mutants that still exist; returns all."""
    kept: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    if RESULTS.exists():
        stored = json.loads(RESULTS.read_text(encoding="utf-8"))
        kept = {each["name"]: each for each in stored["mutants"]}
    kept |= {result.name: asdict(result) for result in results}
    table = {
        "python": platform.python_version(),
        "known": len(MUTANTS),
        "control": control or stored.get("control"),
        "mutants": [kept[mutant.name] for mutant in MUTANTS if mutant.name in kept],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return table


def check_planted() -> None:
    """See that every mutant can be planted.

    Raises:
        StaleMutantError: One cannot.
    """
    for mutant in MUTANTS:
        for module in mutant.modules:
            compile(mutant.source(module), module, "exec")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant known bugs, and see which test of the suite catches each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the mutants; all unless given")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--control", action="store_true", help="run the whole suite without a mutant, too")
    parser.add_argument("--tests", action="append", metavar="PATH", help="look in these tests only")
    parser.add_argument("--place", choices=PLACES, help="look in this place only")
    parser.add_argument(
        "--jobs", type=int, default=2, help="how many mutants are looked for side by side; 2 unless given"
    )
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - {mutant.name for mutant in MUTANTS})
    if unknown:
        parser.error(f"there is no mutant {', '.join(unknown)}; see --list")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0 if every mutant was caught and the control passed."""
    given = _arguments(arguments)
    try:
        check_planted()
    except StaleMutantError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = [mutant for mutant in MUTANTS if not given.names or mutant.name in given.names]
    if given.list:
        for mutant in chosen:
            print(f"{mutant.name:38} {mutant.bug} ({mutant.breaks})")
        return 0
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell. Ignored, it would be so in the tests as well, and those of Ctrl-C would hang.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    found: dict[str, Result] = {}
    tests: dict[str, list[str]] | None = {GIVEN: given.tests} if given.tests else None
    for result in look_for_all(chosen, given.jobs, GIVEN if tests else given.place, tests):
        found[result.name] = result
        store([result], None)
        shown = f"{result.status:9} {result.name:38} {result.place:9} {result.seconds:6.1f} s  {result.caught_by}"
        print(f"{shown}\n{'':10}{result.error}".rstrip(), flush=True)
    results = list(found.values())
    catchers = list(dict.fromkeys(result.caught_by for result in results if result.status == "caught"))
    control: dict[str, Any] | None = None
    if given.control or not given.names or (catchers and not given.tests):
        control = run_control([] if given.control or not given.names else catchers, given.jobs)
    store(results, control)
    missed = [result.name for result in results if result.status != "caught"]
    print(f"\n{len(results) - len(missed)} of {len(results)} caught, in {time.monotonic() - began:.0f} s")
    if missed:
        print(f"not caught: {', '.join(missed)}")
    if control is not None:
        said = f"failed: {control['failed']}" if control["failed"] else f"{control['passed']} tests passed"
        print(f"without a mutant: {said}")
    return 1 if missed or (control is not None and control["failed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
