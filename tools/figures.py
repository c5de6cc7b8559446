"""`make figures`: puts what the last runs counted into docs/explanation/how-we-test.md.

1. Nothing is counted here: `make test` and `make mutants` leave their figures in build/, and the page says what they said.
2. A figure that is missing is an error that names the command which makes it; a page with half of its figures is not written.
3. The figures stand between two marks; what is around them is written by people.

Usage: python tools/figures.py [--print]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["PAGE", "main", "read", "render", "replaced"]

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "explanation" / "how-we-test.md"
BEGIN: Final = "<!-- figures: begin (written by `make figures`) -->"
END: Final = "<!-- figures: end -->"

SOURCES: Final = {
    "incarnations": ("build/incarnations.json", "make test"),
    "explored": ("build/figures.json", "make test"),
    "mutants": ("build/mutants.json", "make mutants"),
}
"""Where each kind of figures is, and what makes it."""

COLUMNS: Final = ("before", "after", "again")

LABELS: Final = {
    "schedules": "orders of Trio's tasks, each drawn from a seed",
    "choices of the scheduler": "turns of the scheduler in which one was chosen",
    "power cuts": "different disks that a simulated power cut left, each opened",
    "fuzzed decoders": "decoders that were fuzzed",
    "fuzzed inputs": "inputs that they were given",
}
"""What each of the counted figures is, in the order of the page."""


class MissingFiguresError(Exception):
    """Figures are not there; the message says what makes them."""


def read(root: Path = ROOT) -> dict[str, Any]:
    """What the last runs counted, by kind.

    Raises:
        MissingFiguresError: A file is not there, or not of a complete run.
    """
    figures: dict[str, Any] = {}
    for kind, (name, command) in SOURCES.items():
        path = root / name
        if not path.exists():
            raise MissingFiguresError(f"{name} is not there; run `{command}`")
        figures[kind] = json.loads(path.read_text(encoding="utf-8"))
    control = figures["mutants"]["control"]
    if control is None or not control["whole_suite"]:
        raise MissingFiguresError("build/mutants.json is of a part of the mutants; run `make mutants ARGS=--control`")
    return figures


def render(figures: dict[str, Any]) -> str:
    """The figures as they stand in the page, in Markdown."""
    return "\n".join(_lines(figures)) + "\n"


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    deaths, explored, planted = figures["incarnations"], figures["explored"]["figures"], figures["mutants"]
    mutants: list[dict[str, Any]] = planted["mutants"]
    caught = [mutant for mutant in mutants if mutant["status"] == "caught"]
    yield f"One run of `make test` under Python {deaths['python']}, and one of `make mutants`:"
    yield ""
    yield from _table(("", "number"), [(what, f"{number:,}") for what, number in _totals(deaths, explored)])
    yield ""
    yield "Which kinds of entries the batch held at which a process was killed: just before it was written, just after, and"
    yield "at a write of the recovery from such a death. A batch may hold several, so the rows add up to more."
    yield ""
    ranked = sorted(deaths["histogram"].items(), key=lambda item: (-sum(item[1].values()), item[0]))
    yield from _table(
        ("at a write of", *COLUMNS), [(kind, *(f"{row[each]:,}" for each in COLUMNS)) for kind, row in ranked]
    )
    yield ""
    control = planted["control"]
    yield f"{len(caught)} of {len(mutants)} mutants were caught; without one, {control['passed']:,} tests passed. The first"
    yield "test that failed, of many as a rule:"
    yield ""
    yield from _table(
        ("mutant", "what is wrong", "breaks", "caught by"),
        [
            (f"`{each['name']}`", each["bug"], each["breaks"], _test(each) if each["status"] == "caught" else "nothing")
            for each in mutants
        ],
    )


def _totals(deaths: dict[str, Any], explored: dict[str, int]) -> Iterator[tuple[str, int]]:
    yield "writes at which an enumeration killed, all of those that there were", deaths["write_points"]
    yield "simulated processes killed at a write, after they had made new history", deaths["incarnations"]
    yield (
        "others, killed before that or between writes",
        (deaths["killed_before_new_history"] + deaths["killed_between_writes"]),
    )
    for name, label in LABELS.items():
        yield label, explored[name]


def _test(mutant: dict[str, Any]) -> str:
    """A test's file and name, without the parameters, which say little to a reader."""
    file, _, name = mutant["caught_by"].partition("[")[0].partition("::")
    return f"`{file.removeprefix('tests/')}`: {name.rpartition(':')[2].removeprefix('test_').replace('_', ' ')}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    columns = list(head)
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def replaced(page: str, figures: str) -> str:
    """The page with these figures between its marks.

    Raises:
        MissingFiguresError: It has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MissingFiguresError(f"{PAGE} has no marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{figures}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """The command; returns its exit status."""
    try:
        figures = render(read())
        if "--print" in arguments:
            print(figures, end="")
        else:
            page = replaced(PAGE.read_text(encoding="utf-8"), figures)
            PAGE.write_text(page, encoding="utf-8")
    except MissingFiguresError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
