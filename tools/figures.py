"""`make figures`: puts what the last runs counted into docs/explanation/how-we-test.md.

1. Nothing is counted here: `make test` and `make mutants` leave their figures in build/, and the page says what they said.
2. A figure that is missing is an error that names the command which makes it. With `--partial` the page says so in its place.
3. The figures stand between two marks; what is around them is written by people.

Usage: python tools/figures.py [--print] [--partial]
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
    "power cuts": "disks as simulated power cuts left them",
    "fuzzed decoders": "decoders that were fuzzed",
    "fuzzed inputs": "inputs that they were given",
}
"""What each of the counted figures is, in the order of the page."""


NOTHING: Final = {kind: [f"({name} was not there when this was written.)"] for kind, (name, _) in SOURCES.items()}
"""What stands in the place of figures that are missing."""

UNCONTROLLED: Final = "the whole suite had not passed without one, or not with all, when this was written"

HUNG: Final = "it did not end"
"""What `make mutants` says of a test that was ended as it hung."""

IN_ORDER: Final = ("namesakes", "scenarios", "rest")
"""Where `make mutants` looks for a mutant, unless a person says where."""


class MissingFiguresError(Exception):
    """Figures are not there; the message says what makes them."""


def read(root: Path = ROOT, *, partial: bool = False) -> dict[str, Any]:
    """What the last runs counted, by kind; with `partial`, as far as it is there.

    Raises:
        MissingFiguresError: A file is not there, or not of a complete run.
    """
    figures: dict[str, Any] = {}
    for kind, (name, command) in SOURCES.items():
        path = root / name
        if path.exists():
            figures[kind] = json.loads(path.read_text(encoding="utf-8"))
        elif not partial:
            raise MissingFiguresError(f"{name} is not there; run `{command}`, or see what there is with --partial")
    if not partial and not _is_complete(figures["mutants"]):
        raise MissingFiguresError(
            "build/mutants.json is of a part of the mutants, or its control failed; run `make mutants ARGS=--control`"
        )
    return figures


def _is_complete(planted: dict[str, Any]) -> bool:
    control = planted["control"]
    is_sound = control is not None and control["whole_suite"] and not control["failed"]
    return is_sound and len(planted["mutants"]) == planted["known"]


def render(figures: dict[str, Any]) -> str:
    """The figures as they stand in the page, in Markdown."""
    parts = [
        _deaths(figures["incarnations"]) if "incarnations" in figures else NOTHING["incarnations"],
        _explored(figures["explored"]) if "explored" in figures else NOTHING["explored"],
        _planted(figures["mutants"]) if "mutants" in figures else NOTHING["mutants"],
    ]
    return "\n".join(line for part in parts for line in (*part, ""))


def _deaths(deaths: dict[str, Any]) -> Iterator[str]:
    yield f"Deaths of simulated processes in one run of the suite, under Python {deaths['python']}:"
    yield ""
    yield from _table(("what", "number"), [(what, f"{number:,}") for what, number in _totals(deaths)])
    yield ""
    yield "Which kinds of entries the batch held at which a process was killed: just before it was written, just after, and"
    yield "at a write of the recovery from such a death. A batch may hold several, so the rows add up to more."
    yield ""
    ranked = sorted(deaths["histogram"].items(), key=lambda item: (-sum(item[1].values()), item[0]))
    yield from _table(
        ("at a write of", *COLUMNS), [(kind, *(f"{row[each]:,}" for each in COLUMNS)) for kind, row in ranked]
    )


def _explored(explored: dict[str, Any]) -> Iterator[str]:
    yield f"What else was explored, under Python {explored['python']}:"
    yield ""
    yield from _table(("what", "number"), [(label, f"{explored['figures'][name]:,}") for name, label in LABELS.items()])


def _planted(planted: dict[str, Any]) -> Iterator[str]:
    mutants: list[dict[str, Any]] = planted["mutants"]
    caught = [mutant for mutant in mutants if mutant["status"] == "caught"]
    control = planted["control"]
    without = f"without one, {control['passed']:,} tests passed" if _is_complete(planted) else UNCONTROLLED
    elsewhere = sum(mutant["place"] not in IN_ORDER for mutant in caught)
    where = f"; {elsewhere} were looked for only in tests that a person named (`--tests`)" if elsewhere else ""
    yield f"{len(caught)} of {planted['known']} mutants were caught; {without}{where}. The first test that failed:"
    yield ""
    yield from _table(
        ("mutant", "what is wrong", "breaks", "caught by"),
        [(f"`{each['name']}`", each["bug"], each["breaks"], _catcher(each)) for each in mutants],
    )


def _totals(deaths: dict[str, Any]) -> Iterator[tuple[str, int]]:
    yield "writes at which an enumeration killed, all of those that there were", deaths["write_points"]
    yield "simulated processes killed at a write, after they had made new history", deaths["incarnations"]
    yield (
        "others, killed before that or between writes",
        (deaths["killed_before_new_history"] + deaths["killed_between_writes"]),
    )


def _catcher(mutant: dict[str, Any]) -> str:
    """A test's file and name, without the parameters, which say little to a reader; and whether it hung."""
    if mutant["status"] != "caught":
        return "nothing yet"
    file, _, name = mutant["caught_by"].partition("[")[0].partition("::")
    words = name.rpartition(":")[2].removeprefix("test_").replace("_", " ")
    return f"`{file.removeprefix('tests/')}`: {words}{' (did not end)' if mutant['error'] == HUNG else ''}"


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
    return f"{before}{BEGIN}\n\n{figures}{END}{after}"


def main(arguments: list[str]) -> int:
    """The command; returns its exit status."""
    try:
        figures = render(read(partial="--partial" in arguments))
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
